"""A plain-Python reference: records -> one row a token -> metrics rows, by loops alone.

It shares no code with the library and prefers the obvious to the quick, so that a disagreement
between the two is worth reading. Nothing here validates: give it well-formed records, or pass
`skip=True` to treat a node whose spans make no sense as unlabelled.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

import zstandard

Record = dict[str, Any]
Metrics = dict[str, Any]
Number = TypeVar("Number", int, float)


class Extras(TypedDict, total=False):
    """What is known of a record besides its own text and its step."""

    training_version: int | None
    """Overrules `step - 1`."""
    kind: str | None
    subset: str | None
    store: bool
    """The record stood in a trace store: each trace's (folded) info tells the step."""


class Stored(NamedTuple):
    """One stored record, the step it was stored under, and what else is known of it."""

    record: Record
    step: int | None
    extras: Extras


@dataclass(frozen=True)
class TokenRow:
    """One sampled token; `index` is None where there is none but a node, trace or episode is."""

    step: int | None
    training_version: int | None
    kind: str | None
    subset: str | None
    shipped: bool | None
    env: str | None
    group_id: str | None
    episode_id: str
    has_run: bool
    policy_start: int | None
    policy_end: int | None
    trace_id: str | None = None
    agent: str | None = None
    trainable: bool | None = None
    reward: float | None = None
    node: int | None = None
    turn: int | None = None
    timestamp: float | None = None
    branches: int | None = None
    mixed: bool | None = None
    completion_tokens: int | None = None
    index: int | None = None
    label: str | None = None
    version: int | None = None
    age: int | None = None
    context_age: int | None = None
    position: int | None = None
    token_id: int | None = None
    is_content: bool | None = None
    logprob: float | None = None
    advantage: float | None = None
    trainer_logprob: float | None = None
    reference_logprob: float | None = None
    entropy: float | None = None
    trainer_mismatch_kl: float | None = None
    branch: int | None = None
    branch_tokens: int | None = None

    @property
    def index_bin(self) -> int:
        """The bin of the token's place; the first where there is no token."""
        return bin_of(self.index or 0)

    @property
    def completion_bin(self) -> int | None:
        return None if self.completion_tokens is None else bin_of(self.completion_tokens)


def bin_of(number: int) -> int:
    """The first number of the bin that holds a number: 0, then 32 and on in doubles."""
    first, after = 0, 32
    while number >= after:
        first, after = after, 2 * after
    return first


# --- the message graph ----------------------------------------------------------------------------


def get(record: Any, *keys: str) -> Any:
    """The value under nested keys; None where any of them is absent or null."""
    for key in keys:
        if not isinstance(record, dict):
            return None
        record = record.get(key)
    return record


def leaves_of(nodes: list[Record]) -> list[int]:
    """The nodes that are no node's parent, in node order."""
    parents = [node.get("parent") for node in nodes]
    return [i for i in range(len(nodes)) if i not in parents]


def path_to(nodes: list[Record], leaf: int) -> list[int]:
    """The nodes from the root down to `leaf`."""
    path = []
    at: int | None = leaf
    while at is not None:
        path.append(at)
        at = nodes[at].get("parent")
    return path[::-1]


def is_training_sample(nodes: list[Record], leaf: int) -> bool:
    """A leaf that is a compaction attempt trains only if some node resumed from it."""
    own_links = nodes[leaf].get("semantic_parents") or []
    if not any(link["type"] == "compaction_attempt" for link in own_links):
        return True
    for node in nodes:
        for link in node.get("semantic_parents") or []:
            if link["type"] == "compaction" and link["node"] == leaf:
                return True
    return False


def branch_counts(nodes: list[Record]) -> list[int]:
    """For every node, the number of training samples that hold it."""
    counts = [0] * len(nodes)
    for leaf in leaves_of(nodes):
        if is_training_sample(nodes, leaf):
            for i in path_to(nodes, leaf):
                counts[i] += 1
    return counts


# --- a node's tokens ------------------------------------------------------------------------------


def is_sampled(node: Record) -> bool:
    if node.get("sampled") is not None:
        return bool(node["sampled"])
    return node.get("weight_versions") is not None or any(node.get("mask") or [])


def sampled_count(node: Record) -> int:
    """How many tokens the node's completion has."""
    if node.get("mask") is not None:
        return sum(1 for flag in node["mask"] if flag)
    if node.get("logprobs") is not None:
        return len(node["logprobs"])
    if node.get("weight_versions"):
        return int(node["weight_versions"][-1]["end"])
    if node.get("token_ids"):
        raise ValueError("token_ids, but nothing says which of them were sampled")
    return 0


def spans_are_sound(spans: Any, count: int) -> bool:
    """Spans run forward, do not overlap and stay inside the completion."""
    if not isinstance(spans, list):
        return False
    at = 0
    for span in spans:
        if not isinstance(span, dict):
            return False
        start, end = span.get("start"), span.get("end")
        if type(start) is not int or type(end) is not int:
            return False
        if not isinstance(span.get("version"), str):
            return False
        if not at <= start <= end <= count:
            return False
        at = end
    return True


def labels_of(node: Record, *, skip: bool = False) -> list[str | None]:
    """One label a sampled token, None where the engine gave none."""
    count = sampled_count(node)
    labels: list[str | None] = [None] * count
    spans = node.get("weight_versions")
    if spans is None or (skip and not spans_are_sound(spans, count)):
        return labels
    for span in spans:
        for i in range(span["start"], span["end"]):
            labels[i] = span["version"]
    return labels


def version_of(label: str | None, *, skip: bool = False) -> int | None:
    """The policy version a label names; None for "default" and for no label."""
    if label is None or label == "default":
        return None
    if skip and not label.isdecimal():
        return None
    return int(label)


def versions_above(nodes: list[Record], i: int, *, skip: bool = False) -> list[int]:
    """The version of every labelled token that was sampled on the path to a node."""
    return [
        version
        for at in path_to(nodes, i)[:-1]
        if is_sampled(nodes[at])
        for label in labels_of(nodes[at], skip=skip)
        if (version := version_of(label, skip=skip)) is not None
    ]


# --- a node's streams -----------------------------------------------------------------------------

PER_SAMPLED = {
    "logprob": "logprobs",
    "advantage": "advantages",
    "trainer_logprob": "trainer_logprobs",
    "reference_logprob": "reference_logprobs",
    "entropy": "entropies",
    "trainer_mismatch_kl": "mismatch_kl",
}
"""What a token's value is called, and the stream of its node that holds it."""


def ids_of(node: Record) -> list[int]:
    """The tokens that a node adds to its branch."""
    return node.get("token_ids") or []


def places_of(node: Record, count: int) -> list[int] | None:
    """Where the sampled tokens stand in the node's `token_ids`; None when nothing tells."""
    ids, mask = ids_of(node), node.get("mask")
    if mask is not None:
        return [at for at in range(len(ids)) if mask[at]] if ids else None
    return list(range(count)) if len(ids) == count else None


def single(value: float | None) -> float | None:
    """A stored number as a 32-bit float; None for null and NaN."""
    if value is None or value != value:
        return None
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def streams_of(nodes: list[Record], i: int, count: int) -> list[Record]:
    """What is stamped on each sampled token of a node, and where the token stands."""
    node = nodes[i]
    before = sum(len(ids_of(nodes[at])) for at in path_to(nodes, i)[:-1])
    places = places_of(node, count)
    content = node.get("is_content")
    tokens: list[Record] = []
    for index in range(count):
        token: Record = {}
        if places is not None:
            at = places[index]
            token["position"] = before + at
            token["token_id"] = ids_of(node)[at]
            if content:
                token["is_content"] = content[at]
        for name, key in PER_SAMPLED.items():
            values = node.get(key)
            # A stream that does not fit is as good as none.
            if values and len(values) == count:
                token[name] = single(values[index])
        tokens.append(token)
    return tokens


# --- records -> token rows ------------------------------------------------------------------------


def reward_of(trace: Record) -> float | None:
    """The weighted sum of the rewards that were scored; None when none was."""
    values = []
    for reward in (trace.get("rewards") or {}).values():
        if reward is not None:
            weight = reward.get("weight")
            values.append(reward["score"] * (1.0 if weight is None else weight))
    return sum(values) if values else None


def is_trainable(trace: Record) -> bool:
    return get(trace, "agent", "trainable") is not False


def ship_step(trace: Record) -> int | None:
    """The batch that trained on a trace of a trace store; None where none did."""
    if get(trace, "info", "effective") is False:
        return None
    step = get(trace, "info", "ship", "step")
    return None if step is None else int(step)


def trace_rows(base: TokenRow, trace: Record, *, skip: bool) -> Iterator[TokenRow]:
    """The rows of one trace; `base` carries the columns of its episode and step."""
    nodes: list[Record] = trace.get("nodes") or []
    of_trace = replace(
        base,
        trace_id=trace["id"],
        agent=get(trace, "agent", "name"),
        trainable=is_trainable(trace),
        reward=reward_of(trace),
    )
    branches = branch_counts(nodes)
    turn = 0
    for i, node in enumerate(nodes):
        if not is_sampled(node):
            continue
        labels = labels_of(node, skip=skip)
        of_node = replace(
            of_trace,
            node=i,
            turn=turn,
            timestamp=node.get("timestamp"),
            branches=branches[i],
            mixed=len({label for label in labels if label is not None}) > 1,
            completion_tokens=len(labels),
        )
        turn += 1
        if not labels:
            yield of_node
        streams = streams_of(nodes, i, len(labels))
        oldest = min(versions_above(nodes, i, skip=skip), default=None)
        for index, label in enumerate(labels):
            version = version_of(label, skip=skip)
            yield replace(
                of_node,
                index=index,
                label=label,
                version=version,
                age=age_of(version, base),
                context_age=age_of(oldest, base),
                **streams[index],
            )
            if version is not None:
                oldest = version if oldest is None else min(oldest, version)
    if turn == 0:
        yield of_trace


def age_of(version: int | None, base: TokenRow) -> int | None:
    """How old a version is when it is trained on; None where either is unknown."""
    if version is None or base.training_version is None:
        return None
    return base.training_version - version


def token_rows(
    stored: Iterable[Stored],
    *,
    subset: str = "effective",
    include_frozen: bool = False,
    skip: bool = False,
) -> list[TokenRow]:
    """Every sampled token of the records, one row each."""
    rows: list[TokenRow] = []
    for record, stored_step, extras in stored:
        bare = "traces" not in record
        traces: list[Record] = [record] if bare else record["traces"] or []
        run = record.get("run")
        base = TokenRow(
            step=stored_step,
            training_version=None if stored_step is None else stored_step - 1,
            kind=extras.get("kind"),
            subset=extras.get("subset"),
            shipped=None,
            env=get(record, "env", "name") or get(record, "env", "id"),
            group_id=get(record, "group", "id"),
            episode_id=record["id"],
            has_run=run is not None,
            policy_start=get(run, "work", "policy", "start"),
            policy_end=get(run, "work", "policy", "end"),
        )
        if "training_version" in extras:
            base = replace(base, training_version=extras["training_version"])
        if extras.get("store"):
            rows += store_rows(
                base, traces, subset=subset, include_frozen=include_frozen, skip=skip
            )
            continue
        own = [t for t in traces if include_frozen or is_trainable(t)]
        for trace in own:
            rows += trace_rows(base, trace, skip=skip)
        if not own:
            rows.append(base)
    return rows


def store_rows(
    base: TokenRow,
    traces: list[Record],
    *,
    subset: str,
    include_frozen: bool,
    skip: bool,
) -> list[TokenRow]:
    """The rows of an episode of a trace store: a trace trains in the batch that shipped it."""
    rows: list[TokenRow] = []
    first = traces[0] if traces else {}
    arrived = replace(
        base,
        kind=get(first, "info", "kind"),
        step=get(first, "info", "arrival", "step"),
        training_version=None,
        shipped=False,
    )
    steps = [step for t in traces if is_trainable(t) and (step := ship_step(t)) is not None]
    for trace in traces:
        step = ship_step(trace)
        if not is_trainable(trace):
            if not include_frozen:
                continue
            step = min(steps) if steps else None
        if step is not None:
            at = replace(arrived, step=step, training_version=step - 1, shipped=True)
            rows += trace_rows(at, trace, skip=skip)
        elif subset == "all":
            rows += trace_rows(arrived, trace, skip=skip)
    if not rows:
        rows.append(arrived)
    return rows


def sample_rows(stored: Iterable[Stored], rows: Iterable[TokenRow]) -> list[TokenRow]:
    """The tokens of `rows` once for every training sample that holds them, sample after sample."""
    tokens: dict[tuple[str | None, int | None], list[TokenRow]] = {}
    for row in rows:
        if row.index is not None:
            tokens.setdefault((row.trace_id, row.node), []).append(row)
    found: list[TokenRow] = []
    for record, _, _ in stored:
        for trace in [record] if "traces" not in record else record["traces"] or []:
            nodes: list[Record] = trace.get("nodes") or []
            for branch, leaf in enumerate(leaves_of(nodes)):
                if not is_trainable(trace) or not is_training_sample(nodes, leaf):
                    continue
                path = path_to(nodes, leaf)
                width = sum(len(ids_of(nodes[i])) for i in path)
                for i in path:
                    for row in tokens.get((trace["id"], i), ()):
                        found.append(replace(row, branch=branch, branch_tokens=width))
    return found


# --- token rows -> ages and metrics ---------------------------------------------------------------


def weight_of(row: TokenRow, weighting: str) -> int:
    """How often a row's node counts."""
    if weighting == "branches":
        return row.branches or 0
    return 1


def age_counts(
    rows: Iterable[TokenRow], by: Sequence[str] = ("step",), weighting: str = "nodes"
) -> dict[tuple[Any, ...], int]:
    """(the `by` columns, age) -> tokens, over the tokens that have an age."""
    counts: dict[tuple[Any, ...], int] = {}
    for row in rows:
        weight = weight_of(row, weighting)
        if row.age is None or weight == 0:
            continue
        key = (*(getattr(row, column) for column in by), row.age)
        counts[key] = counts.get(key, 0) + weight
    return counts


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def quantile(values: Sequence[Number], percent: int) -> Number | None:
    """The smallest value that at least `percent` % of them do not exceed."""
    for value in sorted(set(values)):
        if 100 * sum(1 for other in values if other <= value) >= percent * len(values):
            return value
    return None


def metrics_rows(
    rows: Iterable[TokenRow], by: Sequence[str] = ("step",), weighting: str = "nodes"
) -> list[Metrics]:
    """One dict a group, its keys in the library's order; sorted by the group, nulls first."""
    groups: dict[tuple[Any, ...], list[TokenRow]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, column) for column in by), []).append(row)
    ordered = sorted(groups, key=lambda key: [(part is not None, part) for part in key])
    return [
        {
            **dict(zip(by, key, strict=True)),
            **({"training_version": the_only_version(groups[key])} if "step" in by else {}),
            **metrics(groups[key], weighting),
        }
        for key in ordered
    ]


def the_only_version(rows: list[TokenRow]) -> int | None:
    versions = {row.training_version for row in rows if row.training_version is not None}
    return versions.pop() if len(versions) == 1 else None


def metrics(rows: list[TokenRow], weighting: str = "nodes") -> Metrics:
    """The figures of one group of rows."""
    # A token as often as its node counts.
    tokens: list[TokenRow] = []
    nodes: dict[tuple[str, str | None, int], TokenRow] = {}
    for row in rows:
        # A completion counts where its first token stands.
        if row.node is not None and row.index in (None, 0):
            nodes[row.episode_id, row.trace_id, row.node] = row
        if row.index is not None:
            tokens += [row] * weight_of(row, weighting)
    labelled = [row for row in tokens if row.version is not None]
    default = [row for row in tokens if row.label == "default"]
    ages = [row.age for row in labelled if row.age is not None]

    # What passed while the token's episode was generated, and while it waited.
    token_flight, token_queue = [], []
    for row in labelled:
        if None not in (row.training_version, row.policy_end, row.version):
            token_flight.append(row.policy_end - row.version)  # type: ignore[operator]
            token_queue.append(row.training_version - row.policy_end)  # type: ignore[operator]

    # Staleness is an episode's: one entry each, however many rows it has.
    trained = {row.episode_id: row for row in rows if row.training_version is not None}
    staleness = [found for row in trained.values() if (found := episode_staleness(row))]
    totals = [total for total, _, _ in staleness]
    in_flight = [flight for _, flight, _ in staleness]
    in_queue = [queue for _, _, queue in staleness]

    layout_tells = any(row.shipped is not None for row in rows)
    left_behind = {row.episode_id for row in rows if row.shipped is False}
    return {
        "episodes": len({row.episode_id for row in rows if row.shipped is not False}),
        "traces": len({row.trace_id for row in rows if row.trace_id is not None}),
        "sampled_tokens": len(tokens),
        "labelled_tokens": len(labelled),
        "default_tokens": len(default),
        "unlabelled_tokens": len(tokens) - len(labelled) - len(default),
        "coverage": len(labelled) / len(tokens) if tokens else None,
        "not_shipped": len(left_behind) if layout_tells else None,
        "mixed_nodes": sum(weight_of(row, weighting) for row in nodes.values() if row.mixed),
        "sampled_nodes": sum(weight_of(row, weighting) for row in nodes.values()),
        "off_policy/token/mean": mean(ages),
        "off_policy/token/max": max(ages, default=None),
        "off_policy/token/min": min(ages, default=None),
        "off_policy/token/p50": quantile(ages, 50),
        "off_policy/token/p95": quantile(ages, 95),
        "off_policy/token/p99": quantile(ages, 99),
        "off_policy/token/in_flight/mean": mean(token_flight),
        "off_policy/token/in_flight/max": max(token_flight, default=None),
        "off_policy/token/in_queue/mean": mean(token_queue),
        "off_policy/token/in_queue/max": max(token_queue, default=None),
        "off_policy/mean": mean(totals),
        "off_policy/max": max(totals, default=None),
        "off_policy/in_flight/mean": mean(in_flight),
        "off_policy/in_flight/max": max(in_flight, default=None),
        "off_policy/in_queue/mean": mean(in_queue),
        "off_policy/in_queue/max": max(in_queue, default=None),
    }


def episode_staleness(row: TokenRow) -> tuple[int, int, int] | None:
    """(total, in flight, in queue) of the row's episode; None where nothing tells its run."""
    if not row.has_run or row.training_version is None:
        return None
    if row.policy_start is None or row.policy_end is None:
        return 0, 0, 0
    total = max(0, row.training_version - row.policy_start)
    in_flight = min(total, max(0, row.policy_end - row.policy_start))
    return total, in_flight, total - in_flight


# --- token rows -> mismatch of engine and trainer -------------------------------------------------


def mismatch_rows(
    rows: Iterable[TokenRow], by: Sequence[str] = (), clip: tuple[float, float] = (0.8, 1.2)
) -> list[Metrics]:
    """One dict a group and age, sorted, nulls last; without the intervals, which chance decides."""
    tokens = [row for row in rows if row.index is not None]
    streams = ([t.logprob for t in tokens], [t.trainer_logprob for t in tokens])
    floor = sum(rounding_variance(stream) for stream in streams) / 2
    groups: dict[tuple[Any, ...], list[TokenRow]] = {}
    for token in tokens:
        key = (*(getattr(token, column) for column in by), token.age)
        groups.setdefault(key, []).append(token)
    return [
        {
            **dict(zip([*by, "age"], key, strict=True)),
            **mismatch(groups[key], clip, floor),
        }
        for key in sorted(groups, key=nulls_last)
    ]


def nulls_last(key: Sequence[Any]) -> list[tuple[bool, Any]]:
    return [(part is None, part) for part in key]


def log_ratio(token: TokenRow) -> float | None:
    if token.logprob is None or token.trainer_logprob is None:
        return None
    return token.trainer_logprob - token.logprob


def usable_ratio(token: TokenRow) -> bool:
    """The ratio of the two probabilities, and its square, are finite numbers."""
    r = log_ratio(token)
    if r is None or not math.isfinite(r):
        return False
    try:
        math.exp(2 * r)
    except OverflowError:
        return False
    return True


def mismatch(tokens: list[TokenRow], clip: tuple[float, float], floor: float) -> Metrics:
    """The figures of the tokens of one group and age."""
    usable = [token for token in tokens if usable_ratio(token)]
    missing = [token for token in tokens if log_ratio(token) is None]
    logged = [kl for token in tokens if (kl := token.trainer_mismatch_kl) is not None]
    ratios = [r for token in usable if (r := log_ratio(token)) is not None]
    weights = [math.exp(r) for r in ratios]
    episodes: dict[str, list[float]] = {}
    for token, r, w in zip(usable, ratios, weights, strict=True):
        episodes.setdefault(token.episode_id, []).append(w - r - 1)
    of_episodes = [sum(k3) / len(k3) for k3 in episodes.values()]
    return {
        "tokens": len(usable),
        "episodes": len(episodes),
        "missing": len(missing),
        "non_finite": len(tokens) - len(missing) - len(usable),
        "mean_log_ratio": mean(ratios),
        "mismatch_kl": mean([w - r - 1 for r, w in zip(ratios, weights, strict=True)]),
        "mismatch_k1": mean([-r for r in ratios]),
        "mismatch_k2": mean([r * r / 2 for r in ratios]),
        "episode_mismatch_kl": mean(of_episodes),
        **{f"importance_ratio_p{q:02}": quantile(weights, q) for q in (1, 5, 50, 95, 99)},
        "outside_clip": mean([float(not clip[0] <= w <= clip[1]) for w in weights]),
        "ess_ratio": effective_share(weights),
        "kl_floor": floor if weights else None,
        "trainer_mismatch_kl": mean(logged),
    }


def effective_share(weights: list[float]) -> float | None:
    """The effective sample size of weighted tokens, as a share of how many there are."""
    squares = sum(w * w for w in weights)
    return sum(weights) ** 2 / (len(weights) * squares) if squares else None


def rounding_variance(stream: Iterable[float | None]) -> float:
    """Of the error of a stream rounded to 5 decimals or fewer; 0 if it is not, or is all zeros."""
    values = [value for value in stream if value and math.isfinite(value)]
    for decimals in range(6):
        if values and all(single(round(value, decimals)) == single(value) for value in values):
            return float(10 ** (-2 * decimals) / 12)
    return 0.0


# --- token rows -> what limits on staleness leave -------------------------------------------------

POLICIES = ("token", "trace", "episode")


def masking_rows(
    rows: Iterable[TokenRow], thresholds: Iterable[int], by: Sequence[str] = ()
) -> list[Metrics]:
    """One dict a group, policy and threshold, in that order."""
    traces: dict[tuple[Any, ...], list[TokenRow]] = {}
    for row in rows:
        if row.trace_id is not None and row.shipped is not False:
            traces.setdefault((row.step, row.episode_id, row.trace_id), []).append(row)
    groups: dict[tuple[Any, ...], list[list[TokenRow]]] = {} if by else {(): []}
    for trace in traces.values():
        if any(row.index is not None for row in trace):
            key = tuple(getattr(trace[0], column) for column in by)
            groups.setdefault(key, []).append(trace)
    thresholds = sorted(set(thresholds))
    return [
        {
            **dict(zip(by, key, strict=True)),
            "policy": policy,
            "max_age": k,
            **masked(groups[key], policy, k),
        }
        for key in sorted(groups, key=nulls_last)
        for policy in POLICIES
        for k in thresholds
    ]


def kept_tokens(trace: list[TokenRow], policy: str, k: int) -> int:
    """How many tokens of a trace a limit leaves."""
    tokens = [row for row in trace if row.index is not None]
    if policy == "token":
        return sum(1 for token in tokens if token.age is None or token.age <= k)
    if policy == "trace":
        oldest = max((token.age for token in tokens if token.age is not None), default=None)
        return len(tokens) if oldest is None or oldest <= k else 0
    staleness = episode_staleness(trace[0])
    return len(tokens) if staleness is None or staleness[0] <= k else 0


def masked(traces: list[list[TokenRow]], policy: str, k: int) -> Metrics:
    """The figures of one policy and threshold over traces that have tokens."""
    tokens = [sum(1 for row in trace if row.index is not None) for trace in traces]
    turns = [len({row.node for row in trace if row.node is not None}) for trace in traces]
    kept = [kept_tokens(trace, policy, k) for trace in traces]
    members: dict[tuple[Any, ...], set[str]] = {}
    left: dict[tuple[Any, ...], set[str]] = {}
    for trace, count in zip(traces, kept, strict=True):
        row = trace[0]
        if row.group_id is not None:
            group = (row.step, row.group_id)
            members.setdefault(group, set()).add(row.episode_id)
            left.setdefault(group, set()).update([row.episode_id] if count else [])
    figures: Metrics = {
        "tokens": sum(tokens),
        "kept_tokens": sum(kept),
        "kept_share": sum(kept) / sum(tokens) if traces else None,
        "traces": len(traces),
        "lost_traces": kept.count(0),
        "groups": len(members),
        "lost_groups": sum(1 for group in members if not left[group]),
        "small_groups": sum(1 for g in members if len(members[g]) >= 2 and len(left[g]) < 2),
    }
    shares = [count / of for count, of in zip(kept, tokens, strict=True)]
    weights = {"all": [1.0] * len(traces), "kept": shares}
    rewards = [trace[0].reward for trace in traces]
    for of, weight in weights.items():
        scored = [(r, w) for r, w in zip(rewards, weight, strict=True) if r is not None]
        figures[f"reward/{of}"] = weighted_mean(scored)
    for of, weight in weights.items():
        # Each completion of a trace counts as the trace does.
        pairs = [(n / t, t * w) for n, t, w in zip(tokens, turns, weight, strict=True)]
        figures[f"completion_tokens/{of}"] = weighted_mean(pairs)
    for of, weight in weights.items():
        figures[f"turns/{of}"] = weighted_mean(list(zip(turns, weight, strict=True)))
    return figures


def weighted_mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


# --- stored files -> records ----------------------------------------------------------------------


def read_bytes(path: Path) -> bytes:
    """A file's content, decompressed by its name."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(
            io.BytesIO(data), read_across_frames=True
        )
        return reader.read()
    return data


def read_lines(path: Path) -> list[Record]:
    """Every complete line of a JSONL file. Lines end at a newline byte and nowhere else."""
    *complete, _torn = read_bytes(path).split(b"\n")
    return [json.loads(line) for line in complete]


def read_chunks(directory: Path, one_file: Path) -> list[Record]:
    """The lines of a chunked log, in order, each chunk once; or of the older single file."""
    if one_file.exists():
        return read_lines(one_file)
    lines: list[Record] = []
    numbers = sorted({path.name[:5] for path in directory.glob("?????.jsonl*")})
    for number in numbers:
        sealed = directory / f"{number}.jsonl.zst"
        plain = directory / f"{number}.jsonl"
        lines += read_lines(sealed if sealed.exists() else plain)
    return lines


def merge_onto(target: Record, update: Mapping[str, Any]) -> None:
    """Deep-merge: a dict goes into a dict, and otherwise the newer word wins."""
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            merge_onto(target[key], value)
        else:
            target[key] = json.loads(json.dumps(value))


def fold_store(root: Path) -> list[Stored]:
    """The episodes of a run directory's trace store, orch's words folded onto each trace's info.

    The annotation *streams* are read, not their index.
    """
    folder = root / "monitors" / "file" / "traces"
    episodes = read_chunks(folder / "stream", folder / "stream.jsonl")
    words = read_chunks(folder / "annotations" / "orch", folder / "annotations" / "orch.jsonl")
    for episode in episodes:
        for trace in episode.get("traces", [episode]):
            for word in words:
                if word["trace_id"] == trace["id"]:
                    trace.setdefault("info", {})
                    merge_onto(trace["info"], word.get("info") or {})
    return [Stored(episode, None, {"store": True}) for episode in episodes]


def read_steps(root: Path, *, kind: str = "train", subset: str = "effective") -> list[Stored]:
    """The records of the per-step layout, each with the step of its folder."""
    stored = []
    for folder in sorted((root / "rollouts").glob("step_*")):
        for path in sorted((folder / kind / subset).glob("traces.jsonl*")):
            step = int(folder.name.removeprefix("step_"))
            for record in read_lines(path):
                stored.append(Stored(record, step, {"kind": kind, "subset": subset}))
    return stored
