"""Hypothesis strategies for stored records: what a producer may write, and what it may not.

`stored_records` gives lists of well-formed `Stored` episodes and bare traces; `invalid_records`
gives one record with one bad node and names what is wrong with it. `encode` turns a record into
one line of a file in any of the ways a JSON writer may spell it.

What an answer depends on (graphs, counts, spans, labels, runs) is drawn, so that it shrinks. The
noise around it (message text, free-form values, which keys were left out) comes from a seeded
`Random`: it costs less to make and there is more of it.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any, Literal, NamedTuple

from hypothesis import strategies as st
from reference import Record, Stored

# --- noise: text and values that look like something else -----------------------------------------

SPANS_LOOKALIKE = [{"version": "77", "start": 0, "end": 3}, {"version": "default", "start": 3}]

HOSTILE_TEXTS = (
    "",
    "plain",
    "raw separators: \u2028 \u2029 \u0085 and \v \f \x1c end",
    'a quote " and a backslash \\ and an escaped quote \\" and \\\\"',
    '"weight_versions":[{"version":"99","start":0,"end":4}]',
    '{"token_ids":[1,2,3],"mask":[true,true,true],"sampled":true}',
    '}]}]}\n{"id":"no","traces":[{"id":"no","nodes":[]}]}',
    "tab\t newline\n return\r\n nul\x00 escape\x1b",
    "\\u2028 \\n \\",
    "\ufeffbyte order mark, emoji \U0001f9ed, accents \u00e9\u00df\u4e2d",
)

HOSTILE_VALUES: tuple[Record, ...] = (
    {"weight_versions": SPANS_LOOKALIKE, "token_ids": [1, 2, 3], "mask": [True], "sampled": True},
    {"nodes": [{"sampled": True, "mask": [True, True], "weight_versions": SPANS_LOOKALIKE}]},
    {"traces": [{"id": "no", "nodes": [{"sampled": True, "mask": [True]}]}], "id": "no"},
    {"run": {"work": {"policy": {"start": 90, "end": 99}}}, "env": {"name": "no"}},
    {"agent": {"name": "no", "trainable": False}, "rewards": {"no": {"score": 5, "weight": 5}}},
    {"id": 2**70, "low": -(2**66), "float": 1.5e300, "nan": float("nan"), "null": None},
    {"semantic_parents": [{"node": 0, "type": "compaction_attempt"}], "parent": 0},
    {"": "", '"mask"': '"mask":[true]', "deep": [[[[{"weight_versions": [1, 2]}]]]]},
)

dice = st.integers(0, 2**32 - 1).map(Random)


def text(rng: Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(HOSTILE_TEXTS)
    return "".join(chr(rng.choice((rng.randrange(0x80), rng.randrange(0xD800)))) for _ in range(6))


def value(rng: Random) -> Record:
    return rng.choice(HOSTILE_VALUES)


def message(rng: Random, role: str) -> Record:
    """Content is a string, a list of parts, or nothing; tool arguments are text or an object."""
    written: Record = {"role": role}
    shape = rng.randrange(5)
    if shape <= 1:
        written["content"] = text(rng)
    elif shape == 2:
        written["content"] = [{"type": "text", "text": text(rng)} for _ in range(rng.randrange(3))]
    elif shape == 3:
        written["content"] = None
    if role == "tool":
        written["tool_call_id"] = "call_0"
    if role == "assistant" and rng.random() < 0.3:
        arguments = rng.choice([text(rng), value(rng)])
        written["tool_calls"] = [{"id": "call_0", "name": "f", "arguments": arguments}]
    return written


def lose(rng: Random, record: Record, *keys: str) -> None:
    """Drop some of the keys, or leave them null: a writer may do either."""
    for key in keys:
        luck = rng.random()
        if luck < 0.1:
            record.pop(key, None)
        elif luck < 0.2 and key in record:
            record[key] = None


# --- nodes ----------------------------------------------------------------------------------------

# Text order differs from number order from "10" on.
labels = st.sampled_from(["default", *(str(number) for number in range(13))])

# Gap before the span, its length, its label.
pieces = st.tuples(st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 4), labels)


@st.composite
def span_lists(draw: st.DrawFn, count: int) -> list[Record]:
    """Ordered spans inside `count` tokens, with gaps and zero-length ones between."""
    spans = []
    at = 0
    for gap, length, label in draw(st.lists(pieces, max_size=5)):
        start = min(at + gap, count)
        at = min(start + length, count)
        spans.append({"version": label, "start": start, "end": at})
    if at < count and draw(st.booleans()):
        # As an engine does: the labels reach the end.
        spans.append({"version": draw(labels), "start": at, "end": count})
    return spans


def mask_of(rng: Random, count: int) -> list[bool]:
    """A scaffold, then `count` sampled tokens, now and then with holes among them."""
    mask = [False] * rng.randrange(3)
    holes = {rng.randint(0, count) for _ in range(rng.choice([0, 0, 1, 2]))}
    for i in range(count):
        mask += [False] * (i in holes) + [True]
    return mask + [False] * (count in holes)


# What a consumer stamps on a node, a value a sampled token.
STAMPED = ("advantages", "trainer_logprobs", "reference_logprobs", "entropies", "mismatch_kl")


def logprob(rng: Random) -> float | None:
    return rng.choice([-rng.random(), -20 * rng.random(), 0.0, -1e-9, float("nan"), None])


@st.composite
def sampled_nodes(draw: st.DrawFn) -> Record:
    """An assistant node whose completion can be counted one way or another."""
    rng = draw(dice)
    count = draw(st.integers(0, 9))
    spans: list[Record] | None = draw(
        st.one_of(span_lists(count), span_lists(count), span_lists(count), st.none(), st.just([]))
    )
    counted_by = draw(st.sampled_from(["mask"] * 6 + ["logprobs", "spans", "nothing"]))
    if counted_by == "spans":
        spans = spans or [{"version": draw(labels), "start": 0, "end": count}]
        count = spans[-1]["end"]
    elif counted_by == "nothing":
        count, spans = 0, None

    mask = mask_of(rng, count)
    node: Record = {
        "message": message(rng, "assistant"),
        "sampled": True,
        "timestamp": 1.7e9 + rng.random(),
        "token_ids": [rng.randrange(200_000) for _ in mask],
        "mask": mask,
        "is_content": [],
        "logprobs": [logprob(rng) for _ in range(count)],
        "weight_versions": spans,
    }
    if rng.random() < 0.3:
        node["is_content"] = [rng.random() < 0.5 for _ in mask]
    if rng.random() < 0.3:
        node["loss_weights"] = {"rl": [1.0] * len(mask)}
    for stream in STAMPED:
        luck = rng.random()
        if luck < 0.5:
            node[stream] = [logprob(rng) for _ in range(count)]
        elif luck < 0.7:
            node[stream] = rng.choice([None, []])

    if counted_by == "mask":
        lose(rng, node, "logprobs", "weight_versions")
    elif counted_by == "logprobs":
        # Empty logprobs beside token ids would leave open whether anything was sampled.
        node["mask"] = None
        node["token_ids"] = node["token_ids"] if count else []
        lose(rng, node, "weight_versions")
    elif counted_by == "spans":
        del node["mask"], node["logprobs"]
    else:
        del node["mask"], node["logprobs"]
        node["token_ids"] = []
    lose(rng, node, "token_ids", "timestamp", "message", "is_content")
    # Without the flag, a node is sampled if its labels or its mask say so.
    if node.get("weight_versions") or any(node.get("mask") or []):
        lose(rng, node, "sampled")
    return node


@st.composite
def prompt_nodes(draw: st.DrawFn) -> Record:
    """A node that no model call produced."""
    rng = draw(dice)
    width = rng.randrange(4)
    node: Record = {
        "message": message(rng, rng.choice(["system", "user", "tool", "assistant"])),
        "sampled": False,
        "timestamp": 1.7e9,
        "token_ids": list(range(width)),
        "mask": [False] * width,
        "logprobs": [],
        "weight_versions": None,
    }
    lose(rng, node, "message", "sampled", "timestamp", "token_ids", "mask", "logprobs")
    return node


links = st.tuples(
    st.integers(0, 99),
    st.sampled_from(["compaction_attempt", "compaction", "subagent_return", "continuation"]),
)


@st.composite
def graphs(draw: st.DrawFn) -> list[Record]:
    """Nodes with shared prefixes, several roots, and links of every kind."""
    nodes: list[Record] = draw(
        st.lists(
            st.one_of(sampled_nodes(), sampled_nodes(), sampled_nodes(), prompt_nodes()),
            min_size=draw(st.sampled_from([0, 2, 4])),
            max_size=7,
        )
    )
    rng = draw(dice)
    for i, node in enumerate(nodes):
        # Mostly a chain, now and then a fork or another root.
        parent = draw(st.one_of(st.just(i - 1), st.just(i - 1), st.integers(-1, i - 1)))
        if parent >= 0:
            node["parent"] = parent
        elif rng.random() < 0.5:
            node["parent"] = None
        drawn = draw(st.lists(links, max_size=2))
        if drawn or rng.random() < 0.5:
            node["semantic_parents"] = [
                {"node": at % len(nodes), "type": kind} for at, kind in drawn
            ]
        if rng.random() < 0.3:
            node["future_key"] = value(rng)
    return nodes


# --- traces and episodes --------------------------------------------------------------------------

# Eighths and halves: their sums are exact in any order.
scores = st.integers(-16, 16).map(lambda eighths: eighths / 8)
rewards = st.dictionaries(
    st.sampled_from(["correct", "format", "length"]),
    st.one_of(
        st.none(),
        st.fixed_dictionaries(
            {"score": scores}, optional={"weight": st.sampled_from([1.0, 0.5, 0.0])}
        ),
    ),
    max_size=3,
)

policies = st.tuples(st.integers(0, 6), st.integers(0, 3)).map(
    lambda drawn: {"start": drawn[0], "end": drawn[0] + drawn[1]}
)


def train_run(work: Record | None) -> Record:
    run: Record = {"type": "train", "id": "run"}
    if work is not None:
        # `work.step` is the step of the dispatch, never the batch's.
        run["work"] = {"type": "train", "step": 99, **work}
    return run


runs = st.one_of(
    policies.map(lambda policy: train_run({"policy": policy})),
    policies.map(lambda policy: train_run({"policy": policy})),
    st.sampled_from([None, train_run(None), train_run({}), train_run({"policy": None})]),
)

envs = st.sampled_from(
    [
        None,
        {"id": "env-id"},
        {"id": "env-id", "name": None},
        {"id": "env-id", "name": "math"},
        {"id": "env-id", "name": "code"},
        {"id": "env-id", "name": "m\u00e4th \u2028"},
    ]
)


def info(rng: Random) -> Record:
    """Free-form info; never a key that means something in a trace store."""
    written: Record = {}
    if rng.random() < 0.5:
        written.update(value(rng))
    if rng.random() < 0.5:
        written["note"] = text(rng)
        written["nested"] = value(rng)
    return written


@st.composite
def traces(draw: st.DrawFn, trace_id: str, agent: Record | None) -> Record:
    rng = draw(dice)
    trace: Record = {
        "version": 1,
        "id": trace_id,
        "task": {"type": "T", "data": value(rng)},
        "agent": agent,
        "tools": [],
        "nodes": draw(graphs()),
        "calls": [],
        "rewards": draw(rewards),
        "info": info(rng),
        "ok": True,
        "timing": {"start": 1.7e9},
    }
    lose(rng, trace, "version", "task", "tools", "calls", "rewards", "info", "ok", "timing")
    if trace["agent"] is None:
        lose(rng, trace, "agent")
    return trace


AGENTS: tuple[Record | None, ...] = (
    {"config": {}, "name": "solver", "trainable": True},
    {"config": {}, "name": "judge", "trainable": False},
    {"name": "writer"},
    {"trainable": True},
    None,
)


@st.composite
def episodes(draw: st.DrawFn, number: int) -> Record:
    rng = draw(dice)
    agents = draw(
        st.lists(st.sampled_from(AGENTS), min_size=rng.choice([0, 1, 1, 1, 1, 1]), max_size=3)
    )
    episode: Record = {
        "id": f'ep-{number}-"\u00e9',
        "env": draw(envs),
        "task": {"type": "T", "data": value(rng)},
        "group": rng.choice([None, {"id": "g0"}, {"id": "g\u20281"}]),
        "run": draw(runs),
        "ok": True,
        "errors": [],
        "traces": [draw(traces(f"t-{number}-{i}", agent)) for i, agent in enumerate(agents)],
        "num_total_tokens": 2**63 + 5,
    }
    lose(rng, episode, "env", "task", "group", "run", "ok", "errors")
    for trace in episode["traces"]:
        # A trace that failed before its first turn.
        if rng.random() < 0.1:
            trace["nodes"] = []
            lose(rng, trace, "nodes")
    return episode


@st.composite
def bare_traces(draw: st.DrawFn, number: int) -> Record:
    """A line that is a trace itself; it may carry the run it belongs to."""
    trace: Record = draw(traces(f"bare-{number}", draw(st.sampled_from(AGENTS))))
    run = draw(runs)
    if run is not None:
        trace["run"] = run
    return trace


@st.composite
def stored_records(draw: st.DrawFn, *, max_size: int = 4, first: int = 0) -> list[Stored]:
    """Well-formed records, numbered from `first`, each with the step of its batch."""
    numbers = range(first, first + draw(st.integers(1, max_size)))
    records = [draw(st.one_of(episodes(i), episodes(i), bare_traces(i))) for i in numbers]
    return [Stored(record, draw(st.integers(1, 12)), {}) for record in records]


# --- records that are wrong -----------------------------------------------------------------------

Fault = Literal["overlap", "reversed", "negative", "overlong", "malformed", "label"]
FAULTS: tuple[Fault, ...] = ("overlap", "reversed", "negative", "overlong", "malformed", "label")


class Problem(NamedTuple):
    """What is wrong with a record, and where."""

    fault: Fault
    trace_id: str
    node: int
    label: str | None = None


def span(version: Any, start: Any, end: Any) -> Record:
    return {"version": version, "start": start, "end": end}


bad_labels = st.sampled_from(["latest", "v5", "5.0", "step-5", "", "Default", "0x5", "five\u2028"])


@st.composite
def bad_spans(draw: st.DrawFn, fault: Fault, count: int) -> Any:
    """A `weight_versions` value for a completion of `count` tokens (3 at least)."""
    at = draw(st.integers(1, count - 1))
    if fault == "overlap":
        return [span("3", 0, at + 1), span("4", at, count)]
    if fault == "reversed":
        return [span("3", 0, at), span("4", count, at)]
    if fault == "negative":
        return [span("3", -at, at), span("4", at, count)]
    if fault == "overlong":
        return [span("3", 0, at), span("4", at, count + draw(st.integers(1, 5)))]
    return draw(
        st.sampled_from(
            [
                span("3", 0, count),
                "3",
                [[0, count]],
                ["3"],
                [{"version": "3", "start": 0}],
                [{"start": 0, "end": count}],
                [span("3", "0", count)],
                [span("3", 0, 1.5)],
                [span("3", None, count)],
                [None],
            ]
        )
    )


@st.composite
def invalid_records(draw: st.DrawFn, faults: tuple[Fault, ...] = FAULTS) -> tuple[Record, Problem]:
    """A record with exactly one node that is wrong, in a trace that trains."""
    trace_id = "bad-trace"
    fault = draw(st.sampled_from(faults))
    count = draw(st.integers(3, 8))
    mask = mask_of(draw(dice), count)
    label = draw(bad_labels) if fault == "label" else None
    node: Record = {
        "sampled": True,
        "token_ids": list(range(len(mask))),
        "mask": mask,
        "logprobs": [-0.5] * count,
        "weight_versions": (
            [span("3", 0, 1), span(label, 1, count)]
            if fault == "label"
            else draw(bad_spans(fault, count))
        ),
    }
    trace: Record = draw(traces(trace_id, {"name": "solver", "trainable": True}))
    trace["nodes"].append(node)
    where = len(trace["nodes"]) - 1
    if where and draw(st.booleans()):
        node["parent"] = where - 1
    record = trace
    if draw(st.booleans()):
        record = {"id": "bad-episode", "env": draw(envs), "run": draw(runs), "traces": [trace]}
    return record, Problem(fault, trace_id, where, label)


# --- spelling -------------------------------------------------------------------------------------


class Style(NamedTuple):
    """One way to spell a record as JSON."""

    ascii: bool
    spaced: bool
    shuffle: int | None


styles = st.builds(
    Style,
    ascii=st.booleans(),
    spaced=st.booleans(),
    shuffle=st.one_of(st.none(), st.integers(0, 1000)),
)

PLAIN = Style(ascii=False, spaced=False, shuffle=None)


def reorder(value: Any, rng: Random) -> Any:
    """The same value with every object's keys in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: reorder(value[key], rng) for key in keys}
    if isinstance(value, list):
        return [reorder(item, rng) for item in value]
    return value


def encode(record: Record, style: Style = PLAIN) -> bytes:
    """One line of a file, with its newline. `NaN` is written bare, as Python's json does."""
    if style.shuffle is not None:
        record = reorder(record, Random(style.shuffle))
    separators = (", ", ": ") if style.spaced else (",", ":")
    written = json.dumps(record, ensure_ascii=style.ascii, separators=separators)
    return written.encode() + b"\n"
