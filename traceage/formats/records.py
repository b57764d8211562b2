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
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from traceage.errors import Problem
from traceage.formats.squeeze import MASK_COUNT, squeeze
from traceage.spans import SpanError, tile


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


RUN_FIELDS = ("unit", "node", "turn", "start", "end", "label", "mixed", "branches")
"""The integers of one run, in the order they stand in `Block.runs`; -1 where there is none."""


@dataclass
class Block:
    """What a stretch of lines holds."""

    lines: int = 0
    units: list[Unit] = field(default_factory=list)
    runs: array[int] = field(default_factory=lambda: array("i"))
    """`RUN_FIELDS` of one run after the other; `label` indexes `labels`."""
    timestamps: array[float] = field(default_factory=lambda: array("d"))
    labels: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    """Their `line` counts from 0 in the block, and their `file` is empty: the reader knows both."""


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Node(msgspec.Struct):
    parent: Any = None
    sampled: Any = None
    timestamp: Any = None
    mask_count: int | None = msgspec.field(default=None, name=MASK_COUNT)
    mask: Any = None
    logprobs: Any = None
    token_ids: Any = None
    weight_versions: list[_Span] | None = None
    semantic_parents: Any = None


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


class _Trace(msgspec.Struct):
    id: Any = None
    agent: _Agent | None = None
    nodes: list[_Node] | None = None
    rewards: Any = None
    info: _Info | None = None


class _Record(msgspec.Struct):
    """An episode or a bare trace: the keys of both."""

    id: Any = None
    env: Any = None
    group: Any = None
    run: _Run | None = None
    traces: list[_Trace] | None | msgspec.UnsetType = msgspec.UNSET
    nodes: list[_Node] | None | msgspec.UnsetType = msgspec.UNSET
    agent: _Agent | None = None
    rewards: Any = None
    info: _Info | None = None


_decode = msgspec.json.Decoder(_Record).decode

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

    def __init__(self, include_frozen: bool) -> None:
        self.include_frozen = include_frozen
        self.block = Block()
        self._label_index: dict[str, int] = {}
        self._trace: str | None = None

    def read(self, data: bytes, start: int, end: int) -> None:
        """Add the line `data[start:end]`; a blank one only counts as a line."""
        number = self.block.lines
        self.block.lines += 1
        squeezed = squeeze(data, start, end)
        if not squeezed.strip():
            return
        units, runs = len(self.block.units), len(self.block.runs)
        stamps, problems = len(self.block.timestamps), len(self.block.problems)
        try:
            try:
                record = _decode(squeezed)
            except (msgspec.DecodeError, RecursionError):
                self._read_leniently(number, squeezed, data[start:end])
            else:
                self._add(number, record, whole=len(squeezed) == end - start)
        except _Doubt:
            line = data[start:end]
            del self.block.units[units:], self.block.runs[runs:]
            del self.block.timestamps[stamps:], self.block.problems[problems:]
            self._read_leniently(number, line, line)

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

    def _convert(self, number: int, found: dict[str, Any]) -> _Record | None:
        """A parsed line of any shape as a record; fields that do not fit are reported."""
        try:
            return msgspec.convert(found, _Record)
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
        return msgspec.convert(found, _Record)

    def _add(self, number: int, record: _Record, whole: bool) -> None:
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

        def unit(trace: _Trace | None, trainable: bool) -> Unit:
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
            if trainable or self.include_frozen:
                in_scope += 1
                self.block.units.append(unit(trace, trainable))
                self._add_runs(number, self.block.units[-1].trace_id, trace.nodes or [], whole)
        if not in_scope:
            self.block.units.append(
                unit(traces[0] if traces else None, True)._replace(
                    trace_id=None, agent=None, reward=None
                )
            )
            self._run(-1, -1, (0, 0, None), 0, 0, math.nan)

    def _add_runs(
        self, number: int, trace_id: str | None, nodes: Sequence[_Node], whole: bool
    ) -> None:
        self._trace = trace_id
        branches = self._branches(number, nodes)
        turn = 0
        for index, node in enumerate(nodes):
            spans = node.weight_versions
            if not (_any_sampled(node) if node.sampled is None else node.sampled):
                continue
            try:
                tokens = _sampled_tokens(node, whole)
                runs = tile([(str(s.version), s.start, s.end) for s in spans or ()], tokens)
            except SpanError as error:
                listed = [f"{s.version!r} {s.start}-{s.end}" for s in spans or ()]
                what = f"{error}; spans: {_short(', '.join(listed))}"
                self._problem("bad spans", number, what, _FIX_SPANS, index)
                runs = tile((), tokens)
            except ValueError as error:
                self._problem("no mask", number, str(error), _FIX_FIELD, index)
                runs = tile((), 0)
            stamp = node.timestamp
            stamp = float(stamp) if isinstance(stamp, (int, float)) else math.nan
            mixed = 0
            if len(runs) > 1:
                mixed = len({label for _, _, label in runs if label is not None}) > 1
            for run in runs:
                self._run(index, turn, run, mixed, branches[index], stamp)
            turn += 1
        if not turn:
            self._run(-1, -1, (0, 0, None), 0, 0, math.nan)
        self._trace = None

    def _run(
        self,
        node: int,
        turn: int,
        run: tuple[int, int, str | None],
        mixed: int,
        branches: int,
        stamp: float,
    ) -> None:
        start, end, label = run
        index = -1
        if label is not None:
            known = self._label_index
            index = known.setdefault(label, len(known))
            if index == len(self.block.labels):
                self.block.labels.append(label)
        unit = len(self.block.units) - 1
        self.block.runs.extend((unit, node, turn, start, end, index, mixed, branches))
        self.block.timestamps.append(stamp)

    def _branches(self, number: int, nodes: Sequence[_Node]) -> list[int]:
        """How many trainable branches (root-to-leaf paths that become samples) hold each node."""
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
        links = [
            (index, link)
            for index, node in enumerate(nodes)
            if isinstance(node.semantic_parents, list)
            for link in node.semantic_parents
        ]
        attempts = {at for at, link in links if _get(link, "type") == "compaction_attempt"}
        accepted = {_get(link, "node") for _, link in links if _get(link, "type") == "compaction"}
        has_child = set(parents)
        held = [
            int(leaf not in has_child and (leaf not in attempts or leaf in accepted))
            for leaf in range(len(nodes))
        ]
        # A parent comes before its child, so one pass from the end sums every subtree.
        for index in range(len(nodes) - 1, 0, -1):
            if parents[index] >= 0:
                held[parents[index]] += held[index]
        return held

    def _problem(
        self, reason: str, number: int, found: str, advice: str, node: int | None = None
    ) -> None:
        self.block.problems.append(Problem(reason, "", number, self._trace, node, found, advice))


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


def _kind(run: _Run | None, traces: Sequence[_Trace]) -> str | None:
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
