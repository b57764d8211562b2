"""Lines of JSON, each an episode or a bare trace -> a block of plain columns.

A `Block` is what a worker process sends back for the lines it was given: one entry a trace in
`units`, one entry a run of tokens in `runs`, as bare lists and one integer array, so that it
crosses the process boundary for next to nothing. What only the layout knows (the step, what was
shipped, line numbers in the file) is added by the reader.

Only the keys that are needed are decoded. A line that a strict decoder refuses (a bare `NaN`, a
lone surrogate, a field of an unexpected type) is read again by a lenient one, which can say what
is wrong with it.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from traceage.errors import ExportsRead, Problem
from traceage.formats.annotations import Annotation, AnnotationReader, Branch, fold
from traceage.formats.dump import KeptNode, KeptTrace, kept_arrays
from traceage.formats.exports import EXPORTED, ExportFile, Exports, SameIds, exports_of
from traceage.formats.squeeze import ALL_ARRAYS, MASK_COUNT, arrays_but, squeeze
from traceage.formats.streams import (
    ANNOTATED,
    FLOATS,
    PLACED,
    STREAMS,
    before_of,
    keys_of,
    lengths_of,
    mask_of,
    per_sampled,
    placed,
)
from traceage.spans import Run, SpanError, tile

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from traceage.formats.streams import Stream


class Unit(NamedTuple):
    """One trace of an episode as it was recorded, or an episode that has no trace in scope."""

    line: int
    """Which line of the block, from 0; the units of one line are one episode."""
    episode_id: str | None
    trace_id: str | None
    """None for an episode that has no trace in scope; empty for a trace without an id."""
    env: str | None
    group_id: str | None
    agent: str | None
    trainable: bool
    kind: str | None
    has_run: bool
    policy_start: int | None
    policy_end: int | None
    reward: float | None
    arrival_step: int | None
    ship_step: int | None
    """The step stamped on the record itself; a trace store's annotations overrule it."""


RUN_FIELDS = (
    "unit",
    "node",
    "turn",
    "start",
    "end",
    "label",
    "mixed",
    "branches",
    "branch",
    "branch_tokens",
    "ancestor",
)
"""The integers of one run, in the order they stand in `Block.runs`; -1 where there is none.

`ancestor` is the nearest sampled node above `node`."""


class What(NamedTuple):
    """What a reader is to get out of its lines."""

    include_frozen: bool = False
    streams: frozenset[str] = frozenset()
    """Columns of `streams.STREAMS` that are wanted."""
    per_branch: bool = False
    """Each completion once for every trainable branch that holds it, branch after branch."""
    whole: bool = False
    """All that a dump keeps of a node."""
    messages: bool = False
    """With `whole`: the messages too."""
    annotations: tuple[str, int] | None = None
    """The root of the trace store whose annotations are folded in, and the size of its indexes."""
    exports: tuple[ExportFile, ...] = ()
    """The token exports of the file's step, whose streams are folded in."""

    def told_later(self, of: Collection[str]) -> frozenset[str]:
        """Which node keys are wanted that a side file may hold, if it holds those `of`."""
        wanted = ANNOTATED if self.whole else {FLOATS[s] for s in self.streams if s in FLOATS}
        return frozenset(ANNOTATED.intersection(wanted, of))


@dataclass
class Block:
    """What a stretch of lines holds."""

    lines: int = 0
    without_record: int = 0
    """Lines that stand for an episode whose record is not there."""
    units: list[Unit] = field(default_factory=list)
    runs: array[int] = field(default_factory=lambda: array("i"))
    """`RUN_FIELDS` of one run after the other; `label` indexes `labels`."""
    timestamps: array[float] = field(default_factory=lambda: array("d"))
    labels: list[str] = field(default_factory=list)
    streams: dict[str, Stream] = field(default_factory=dict)
    """The wanted streams, a value for each token of all runs."""
    kept: tuple[pa.Array, pa.Array] | None = None
    """The columns `nodes` and `branches` of a dump, a row a unit."""
    problems: list[Problem] = field(default_factory=list)
    """Their `line` counts from 0 in the block, and their `file` is empty: the reader knows both."""
    exports: ExportsRead | None = None
    """The token exports that the lines' branches looked into."""


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Node(msgspec.Struct):
    """What a question about spans needs of a node."""

    parent: Any = None
    sampled: Any = None
    timestamp: Any = None
    mask_count: int | None = msgspec.field(default=None, name=MASK_COUNT)
    mask: Any = None
    logprobs: Any = None
    token_ids: Any = None
    weight_versions: list[_Span] | None = None
    semantic_parents: Any = None


class _StreamNode(_Node):
    """What a question about tokens needs of a node."""

    is_content: Any = None
    advantages: Any = None
    trainer_logprobs: Any = None
    reference_logprobs: Any = None
    entropies: Any = None
    mismatch_kl: Any = None


class _WholeNode(_StreamNode):
    """All that a dump can keep of a node."""

    message: Any = None


NodeT = TypeVar("NodeT", bound=_Node)


class _Agent(msgspec.Struct):
    name: Any = None
    trainable: Any = None


class _Info(msgspec.Struct):
    kind: Any = None
    arrival: Any = None
    ship: Any = None
    effective: Any = None


class _Run(msgspec.Struct):
    type: Any = None
    work: Any = None


class _Trace(msgspec.Struct, Generic[NodeT]):
    id: Any = None
    agent: _Agent | None = None
    nodes: list[NodeT] | None = None
    rewards: Any = None
    info: _Info | None = None


class _Record(msgspec.Struct, Generic[NodeT]):
    """An episode or a bare trace: the keys of both."""

    id: Any = None
    env: Any = None
    group: Any = None
    run: _Run | None = None
    traces: list[_Trace[NodeT]] | msgspec.UnsetType | None = msgspec.UNSET
    nodes: list[NodeT] | msgspec.UnsetType | None = msgspec.UNSET
    agent: _Agent | None = None
    rewards: Any = None
    info: _Info | None = None


_FIX_TORN = "if the file is still being written, wait; otherwise repair or remove the line"
_FIX_RECORD = "give files whose lines are episodes (with `traces`) or traces (with `nodes`)"
_FIX_FIELD = "correct the record, or go on without it with on_error='skip' (--on-error skip)"
_FIX_SPANS = (
    "spans index the sampled tokens in order; was the completion cut after it was labelled "
    "(a stop string trimmed)? on_error='skip' counts the node's tokens as unlabelled"
)


class _Doubt(Exception):
    """A squeezed line does not tell; the whole one is needed."""


class RecordReader:
    """Reads lines into a `Block`, one after the other."""

    def __init__(self, what: What) -> None:
        self.what = what
        self.block = Block()
        self._label_index: dict[str, int] = {}
        self._trace: str | None = None
        self._kept: list[KeptTrace] = []
        self._streams: dict[str, list[Stream]] = {
            name: [] for name in STREAMS if name in what.streams
        }
        self._arrays: re.Pattern[bytes] | None = None
        if what.whole:
            self._type: Any = _Record[_WholeNode] if what.messages else _Record[_StreamNode]
        elif what.streams:
            self._type = _Record[_StreamNode]
            keep = keys_of(what.streams, what.annotations is not None or bool(what.exports))
            self._arrays = arrays_but(keep)
        else:
            self._type = _Record[_Node]
            self._arrays = ALL_ARRAYS
        self._decode = msgspec.json.Decoder(self._type).decode
        self._annotations: AnnotationReader | None = None
        self._exports: Exports | None = None
        self._looked_up: list[SameIds | None] = []
        """What each branch found in the exports."""
        if what.annotations is not None and (wanted := what.told_later(ANNOTATED)):
            self._annotations = annotation_reader(*what.annotations, wanted)
            self._wanted = wanted
        elif what.exports and (wanted := what.told_later(EXPORTED)):
            self._exports = exports_of(what.exports, wanted)
            self._wanted = wanted

    def finish(self) -> Block:
        """The block of all lines read."""
        for name, parts in self._streams.items():
            empty = np.zeros(0, np.int32 if name in PLACED else np.float32)
            self.block.streams[name] = np.concatenate([*parts, empty]).astype(empty.dtype)
        if self.what.whole:
            self.block.kept = kept_arrays(self._kept, self.what.messages)
        if self._exports is not None:
            self.block.exports = self._exports.read(self._looked_up)
        return self.block

    def read(self, data: bytes | bytearray, start: int, end: int) -> None:
        """Add the line `data[start:end]`; a blank one only counts as a line."""
        number = self.block.lines
        self.block.lines += 1
        arrays = self._arrays
        text = bytes(data[start:end]) if arrays is None else squeeze(data, start, end, arrays)
        if not text.strip():
            return
        before = self._mark()
        try:
            try:
                record = self._decode(text)
            except (msgspec.DecodeError, RecursionError):
                self._read_leniently(number, text, bytes(data[start:end]))
            else:
                # Squeezing shortens a line, or changes no length of an array in it.
                self._add(number, record, whole=len(text) == end - start)
        except _Doubt:
            self._reset(before)
            line = bytes(data[start:end])
            self._read_leniently(number, line, line)

    def _mark(self) -> list[int]:
        return [len(one) for one in self._growing()]

    def _reset(self, mark: list[int]) -> None:
        for one, length in zip(self._growing(), mark, strict=True):
            del one[length:]

    def _growing(self) -> list[Any]:
        block = self.block
        lists = [block.units, block.runs, block.timestamps, block.problems, self._kept]
        return [*lists, self._looked_up, *self._streams.values()]

    def _read_leniently(self, number: int, text: bytes, line: bytes) -> None:
        found = _parse(text)
        if isinstance(found, ValueError) and text is not line:
            text, found = line, _parse(line)
        if isinstance(found, ValueError):
            self._problem("not JSON", number, str(found), _FIX_TORN)
        elif not isinstance(found, dict):
            kind = type(found).__name__
            self._problem("not a record", number, f"the line is a JSON {kind}", _FIX_RECORD)
        else:
            record = self._convert(number, found)
            if record is not None:
                self._add(number, record, whole=text is line)

    def _convert(self, number: int, found: dict[str, Any]) -> _Record[_Node] | None:
        """A parsed line of any shape as a record; fields that do not fit are reported."""
        try:
            return self._convert_strictly(found)
        except msgspec.ValidationError:
            pass
        for key in ("run", "agent", "info"):
            _drop_unless_object(found, key)
        traces = found.get("traces", [found])
        if traces is not None and not _all_objects(traces):
            what = f"`traces` is {_name(traces)}"
            self._problem("malformed record", number, what, _FIX_FIELD)
            return None
        for trace in traces or []:
            _drop_unless_object(trace, "agent")
            _drop_unless_object(trace, "info")
            self._trace = _text(trace.get("id"))
            nodes = trace.get("nodes")
            if nodes is not None and not _all_objects(nodes):
                what = f"`nodes` is {_name(nodes)}"
                self._problem("malformed record", number, what, _FIX_FIELD)
                trace["nodes"] = []
                continue
            for index, node in enumerate(nodes or []):
                spans = node.get("weight_versions")
                try:
                    msgspec.convert(spans, list[_Span] | None)
                except msgspec.ValidationError as error:
                    what = f"weight_versions {_short(spans)}: {error}"
                    self._problem("malformed spans", number, what, _FIX_FIELD, index)
                    node["weight_versions"] = None
        self._trace = None
        return self._convert_strictly(found)

    def _convert_strictly(self, found: dict[str, Any]) -> _Record[_Node]:
        record: _Record[_Node] = msgspec.convert(found, self._type)
        return record

    def _add(self, number: int, record: _Record[_Node], whole: bool) -> None:
        if record.traces is msgspec.UNSET and record.nodes is msgspec.UNSET:
            self._problem(
                "not a record", number, "the line has neither `traces` nor `nodes`", _FIX_RECORD
            )
            return
        has_run = record.run is not None
        policy_start, policy_end = _policy(record.run)
        if record.traces is msgspec.UNSET:
            assert record.nodes is not msgspec.UNSET
            traces = [_Trace(record.id, record.agent, record.nodes, record.rewards, record.info)]
        else:
            traces = record.traces or []
        episode = _text(record.id)
        env, group = _env(record.env), _text(_get(record.group, "id"))
        kind = _kind(record.run, traces)

        def unit(trace: _Trace[_Node] | None, trainable: bool) -> Unit:
            info = (trace and trace.info) or _Info()
            return Unit(
                number,
                episode,
                (_text(trace.id) or "") if trace else None,
                env,
                group,
                _text(trace.agent.name) if trace and trace.agent else None,
                trainable,
                kind,
                has_run,
                policy_start,
                policy_end,
                _reward(trace.rewards) if trace else None,
                _integer(_get(info.arrival, "step")),
                None if info.effective is False else _integer(_get(info.ship, "step")),
            )

        in_scope = 0
        for trace in traces:
            trainable = trace.agent is None or trace.agent.trainable is not False
            if trainable or self.what.include_frozen:
                in_scope += 1
                self.block.units.append(unit(trace, trainable))
                self._trace = _text(trace.id)
                self._add_trace(number, trace.nodes or [], whole)
                self._trace = None
        if not in_scope:
            self.block.units.append(
                unit(traces[0] if traces else None, True)._replace(
                    trace_id=None, agent=None, reward=None
                )
            )
            self._add_empty()

    def _add_trace(self, number: int, nodes: Sequence[_Node], whole: bool) -> None:
        """The runs of a trace's completions, and their streams."""
        parents = self._parents(number, nodes)
        paths = _trainable_paths(nodes, parents)
        masks: list[NDArray[np.bool_] | None] = [None] * len(nodes)
        before: list[int] = []
        if self._streams or self.what.whole or self.what.per_branch:
            lengths = lengths_of(nodes)
            before = before_of(parents, lengths)
            for index, node in enumerate(nodes):
                if node.mask_count is not None or (node.sampled is False and not self.what.whole):
                    continue
                try:
                    masks[index] = mask_of(node)
                except ValueError as error:
                    self._problem("bad stream", number, str(error), _FIX_FIELD, index)
            self._fold_annotations(number, nodes, parents, lengths, masks)
            if self._exports is not None and self.block.units[-1].trainable:
                self._fold_exports(self._exports, nodes, parents, lengths, masks, paths)
        completions: list[_Completion] = []
        nearest: list[int] = []  # the last sampled node on the path to each, itself included
        for index, node in enumerate(nodes):
            ancestor = nearest[parents[index]] if parents[index] >= 0 else -1
            if not (_any_sampled(node) if node.sampled is None else node.sampled):
                nearest.append(ancestor)
                continue
            nearest.append(index)
            runs = self._runs(number, index, node, whole)
            labels = {label for _, _, label in runs if label is not None} if len(runs) > 1 else ()
            streams = {}
            if self._streams or self.what.whole:
                streams = self._values(
                    number, index, node, masks[index], runs[-1][1], before[index]
                )
            turn, mixed = len(completions), len(labels) > 1
            completions.append(_Completion(index, ancestor, turn, runs, mixed, streams))
        if self.what.whole:
            branches = [
                {"index": branch, "tokens": before[path[-1]] + lengths[path[-1]], "nodes": path}
                for branch, path in paths.items()
            ]
            kept = _kept(nodes, parents, before, masks, completions)
            self._kept.append(KeptTrace(kept, branches))
        if not completions:
            self._add_empty()
            return
        held = [0] * len(nodes)
        for path in paths.values():
            for index in path:
                held[index] += 1
        if not self.what.per_branch:
            for completion in completions:
                self._add_completion(nodes, completion, held[completion.node], -1, -1)
            return
        by_node = {completion.node: completion for completion in completions}
        for branch, path in paths.items():
            total = before[path[-1]] + lengths[path[-1]]
            for index in path:
                if index in by_node:
                    self._add_completion(nodes, by_node[index], held[index], branch, total)

    def _runs(self, number: int, index: int, node: _Node, whole: bool) -> list[Run]:
        spans = node.weight_versions or ()
        try:
            tokens = _sampled_tokens(node, whole)
        except ValueError as error:
            self._problem("no mask", number, str(error), _FIX_FIELD, index)
            return tile((), 0)
        try:
            return tile([(str(s.version), s.start, s.end) for s in spans], tokens)
        except SpanError as error:
            listed = [f"{s.version!r} {s.start}-{s.end}" for s in spans]
            what = f"{error}; spans: {_short(', '.join(listed))}"
            self._problem("bad spans", number, what, _FIX_SPANS, index)
            return tile((), tokens)

    def _values(
        self,
        number: int,
        index: int,
        node: _Node,
        mask: NDArray[np.bool_] | None,
        tokens: int,
        before: int,
    ) -> dict[str, Stream]:
        """The wanted streams of one completion; one that does not fit is reported and null."""
        wanted = STREAMS if self.what.whole else tuple(self._streams)
        try:
            made = placed(node, mask, tokens, before, wanted)
        except ValueError as error:
            self._problem("bad stream", number, str(error), _FIX_FIELD, index)
            made = placed(node, None, tokens, before, wanted)
        for name in wanted:
            if name in FLOATS:
                try:
                    made[name] = per_sampled(getattr(node, FLOATS[name]), tokens)
                except ValueError as error:
                    what = f"{FLOATS[name]}: {error}"
                    self._problem("bad stream", number, what, _FIX_FIELD, index)
                    made[name] = per_sampled(None, tokens)
        return made

    def _fold_annotations(
        self,
        number: int,
        nodes: Sequence[Any],
        parents: Sequence[int],
        lengths: Sequence[int],
        masks: Sequence[NDArray[np.bool_] | None],
    ) -> None:
        """Put onto the nodes what the trace store's annotations say of them."""
        if self._annotations is None or self._trace is None:
            return
        annotations = self._annotations.of(self._trace)
        if not annotations:
            return
        try:
            folded = fold(parents, lengths, masks, annotations, self._wanted)
        except ValueError as error:
            self._problem("bad annotation", number, str(error), _FIX_FIELD)
            return
        for stream, by_node in folded.items():
            for index, values in by_node.items():
                setattr(nodes[index], stream, values)

    def _fold_exports(
        self,
        exports: Exports,
        nodes: Sequence[Any],
        parents: Sequence[int],
        lengths: Sequence[int],
        masks: Sequence[NDArray[np.bool_] | None],
        paths: dict[int, list[int]],
    ) -> None:
        """Put onto the nodes what the token exports say of them and nobody stamped."""
        found: list[Branch] = []
        for branch, path in paths.items():
            sequences = exports.of([nodes[index].token_ids for index in path])
            self._looked_up.append(sequences)
            if sequences is not None:
                found.append(Branch(branch, sequences.streams))
        annotation = Annotation("token_exports", found)
        for stream, by_node in fold(parents, lengths, masks, [annotation], self._wanted).items():
            for index, values in by_node.items():
                if not getattr(nodes[index], stream):
                    setattr(nodes[index], stream, values)

    def _add_completion(
        self,
        nodes: Sequence[_Node],
        completion: _Completion,
        branches: int,
        branch: int,
        branch_tokens: int,
    ) -> None:
        stamp = nodes[completion.node].timestamp
        stamp = float(stamp) if isinstance(stamp, (int, float)) else math.nan
        unit = len(self.block.units) - 1
        known = self._label_index
        for start, end, label in completion.runs:
            at = -1
            if label is not None:
                at = known.setdefault(label, len(known))
                if at == len(self.block.labels):
                    self.block.labels.append(label)
            self.block.runs.extend(
                (
                    unit,
                    completion.node,
                    completion.turn,
                    start,
                    end,
                    at,
                    completion.mixed,
                    branches,
                    branch,
                    branch_tokens,
                    completion.ancestor,
                )
            )
            self.block.timestamps.append(stamp)
        for name, parts in self._streams.items():
            parts.append(completion.streams[name])

    def _add_empty(self) -> None:
        """A row of no tokens for a trace without completions, or an episode without traces."""
        unit = len(self.block.units) - 1
        self.block.runs.extend((unit, -1, -1, 0, 0, -1, 0, 0, -1, -1, -1))
        self.block.timestamps.append(math.nan)
        if self.what.whole and len(self._kept) < len(self.block.units):
            self._kept.append(KeptTrace([], []))

    def _parents(self, number: int, nodes: Sequence[_Node]) -> list[int]:
        parents: list[int] = []
        for index, node in enumerate(nodes):
            parent = node.parent
            if parent is None:
                parent = -1
            elif type(parent) is not int or not 0 <= parent < index:
                what = f"parent {_short(parent)} does not come before it"
                self._problem("bad parent", number, what, _FIX_FIELD, index)
                parent = -1
            parents.append(parent)
        return parents

    def _problem(
        self, reason: str, number: int, found: str, advice: str, node: int | None = None
    ) -> None:
        self.block.problems.append(Problem(reason, "", number, self._trace, node, found, advice))


class _Completion(NamedTuple):
    """One sampled node: its runs and, where they are wanted, its streams."""

    node: int
    ancestor: int
    turn: int
    runs: list[Run]
    mixed: bool
    streams: dict[str, Stream]


def _trainable_paths(nodes: Sequence[_Node], parents: Sequence[int]) -> dict[int, list[int]]:
    """The trainable branches of a trace: index among the leaves -> nodes from root to leaf.

    Each becomes one training sample. A branch that ends in a compaction attempt does only when
    the run went on from it.
    """
    chain = list(range(len(nodes)))
    if not chain:
        return {}
    if parents[1:] == chain[:-1] and not nodes[-1].semantic_parents:
        return {0: chain}
    links = [
        (index, link)
        for index, node in enumerate(nodes)
        if isinstance(node.semantic_parents, list)
        for link in node.semantic_parents
    ]
    attempts = {at for at, link in links if _get(link, "type") == "compaction_attempt"}
    accepted = {_get(link, "node") for _, link in links if _get(link, "type") == "compaction"}
    has_child = set(parents)
    leaves = [index for index in range(len(nodes)) if index not in has_child]
    paths = {}
    for branch, leaf in enumerate(leaves):
        if leaf in attempts and leaf not in accepted:
            continue
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        paths[branch] = path[::-1]
    return paths


def _kept(
    nodes: Sequence[Any],
    parents: Sequence[int],
    before: Sequence[int],
    masks: Sequence[NDArray[np.bool_] | None],
    completions: Sequence[_Completion],
) -> list[KeptNode]:
    """The nodes of a trace as a dump keeps them."""
    sampled = {completion.node: completion for completion in completions}
    kept = []
    for index, node in enumerate(nodes):
        floats: list[NDArray[np.float32] | None] = [None] * len(FLOATS)
        tokens = 0
        if (completion := sampled.get(index)) is not None:
            tokens = completion.runs[-1][1]
            for at, name in enumerate(FLOATS):
                values = completion.streams[name]
                if not np.isnan(values).all():
                    floats[at] = values.astype(np.float32)
        message = getattr(node, "message", None)
        stamp = node.timestamp
        kept.append(
            KeptNode(
                parent=parents[index] if parents[index] >= 0 else None,
                sampled=completion is not None,
                sampled_tokens=tokens,
                offset=before[index],
                timestamp=float(stamp) if isinstance(stamp, (int, float)) else None,
                token_ids=np.array(node.token_ids, np.int32) if node.token_ids else None,
                mask=masks[index],
                is_content=np.array(node.is_content, np.bool_) if node.is_content else None,
                floats=floats,
                message=None if message is None else _text(json.dumps(message, ensure_ascii=False)),
            )
        )
    return kept


@lru_cache(maxsize=2)
def annotation_reader(root: str, size: int, wanted: frozenset[str]) -> AnnotationReader:
    """The annotations of a trace store, indexed once for each state (`size`) of its indexes."""
    return AnnotationReader(root, wanted)


def _parse(text: bytes) -> Any:
    """What a lenient parser makes of `text`; the error itself when it makes nothing of it."""
    try:
        return json.loads(text.decode("utf-8", "replace"))
    except RecursionError:
        return ValueError("nested too deeply to be read")
    except ValueError as error:
        return error


def _sampled_tokens(node: _Node, whole: bool) -> int:
    """How many tokens of a sampled node the model sampled."""
    if node.mask_count is not None:
        return node.mask_count
    if node.mask:
        return _count(node.mask)
    if not node.logprobs and not node.token_ids and not node.weight_versions:
        return 0
    if not whole:
        raise _Doubt
    if isinstance(node.logprobs, list) and node.logprobs:
        return len(node.logprobs)
    if node.weight_versions:
        return max(0, max(span.end for span in node.weight_versions))
    if not node.token_ids:
        return 0
    raise ValueError(
        f"{len(node.token_ids)} token_ids, but no mask, logprobs or spans that tell which of them "
        "were sampled"
    )


def _count(mask: Any) -> int:
    if not isinstance(mask, list) or not all(isinstance(value, (bool, int)) for value in mask):
        raise ValueError(f"mask {_short(mask)} is not a list of booleans")
    return sum(map(bool, mask))


def _any_sampled(node: _Node) -> bool:
    """Whether a node that does not say so itself was sampled."""
    return bool(
        node.weight_versions or node.mask_count or (isinstance(node.mask, list) and any(node.mask))
    )


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _text(value: Any) -> str | None:
    """An id or name as text, whatever type it was stored as."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _integer(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 2**31 else None


def _env(env: Any) -> str | None:
    if not isinstance(env, dict):
        return _text(env)
    name = env.get("name")
    return _text(env.get("id") if name is None else name)


def _policy(run: _Run | None) -> tuple[int | None, int | None]:
    policy = _get(run.work, "policy") if run else None
    start, end = _integer(_get(policy, "start")), _integer(_get(policy, "end"))
    return start, start if end is None else end


def _kind(run: _Run | None, traces: Sequence[_Trace[_Node]]) -> str | None:
    for trace in traces:
        if trace.info is not None and isinstance(trace.info.kind, str):
            return _text(trace.info.kind)
    if run is None:
        return None
    return _text(_get(run.work, "type") or run.type)


def _reward(rewards: Any) -> float | None:
    """The weighted sum of the scores that are there; None when there is none."""
    if not isinstance(rewards, dict):
        return None
    total = None
    for reward in rewards.values():
        if isinstance(reward, dict):
            score, weight = reward.get("score"), reward.get("weight", 1.0)
        else:
            score, weight = reward, 1.0
        if isinstance(score, (int, float)) and isinstance(weight, (int, float)):
            total = (total or 0.0) + float(score) * float(weight)
    return total


def _all_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _drop_unless_object(found: dict[str, Any], key: str) -> None:
    # A user's own `info` or an older `agent` can be anything; nothing is read from it then.
    if not isinstance(found.get(key), dict):
        found.pop(key, None)


def _name(value: Any) -> str:
    if isinstance(value, list):
        return "a list that holds other things than objects"
    return f"a {type(value).__name__}, not a list"


def _short(value: Any, limit: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
