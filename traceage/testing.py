"""Made-to-measure traces for the tests of code that reads or logs them.

`make_trace` and `make_episode` build records as `verifiers` writes them, with runs of tokens of the
versions that a test asks for; `write_run` puts them where a training run would have. What is built
follows from what was asked alone: the same call gives the same record, ids and streams included.

Records are plain lists and dicts, and nothing here imports polars, numpy or pyarrow before it has
to. `traceage.pytest_plugin` offers all three as fixtures.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, get_args

Record = dict[str, Any]

Label = str | int | None
"""What an engine says of a run of tokens: a version, `"default"`, or nothing at all."""

Runs = Sequence[tuple[Label, int]]
"""One completion: `(label, tokens)` runs in the order in which they were sampled."""

Layout = Literal["store", "steps"]

SCAFFOLD = [1, 2]
"""The generation prompt: in an assistant node's `token_ids`, before what was sampled."""
VOCABULARY = 32_000
DECIMALS = 4
"""Records keep this many of each float of a stream."""
START = 1_700_000_000.0
"""The clock of what is built stands here: seconds since the epoch."""


def make_trace(
    completions: Sequence[Runs],
    *,
    id: str | None = None,
    reward: float | None = None,
    prompt_tokens: int = 8,
    agent: str = "agent",
    trainable: bool = True,
    mismatch: float | None = None,
    advantage: float | None = None,
    entropy: float | None = None,
) -> Record:
    """A trace of one conversation: a user's message, a completion, a message, a completion, ...

    Args:
        completions: the runs of each completion, `(label, tokens)` one after the other. A label is
            a version (a string or an integer), `"default"`, or None for tokens without one.
        id: the trace's; by default it follows from everything else, so that equal traces have
            equal ids. Traces of one run need different ones.
        reward: its score; no reward by default.
        prompt_tokens: how many tokens each message of the user has.
        agent: the name of the agent, and `trainable`, whether its tokens train the policy.
        mismatch: stamps `trainer_logprobs`: the logprobs (between -3 and -1) and so much more.
        advantage: stamps `advantages`, the same for each sampled token.
        entropy: stamps `entropies`, likewise.

    Returns:
        A record as `verifiers` writes it, for `make_episode`, `write_run`, `ta.token_policy_ages`
        and `ta.batch_metrics`. Its floats have four decimals, as records keep them.

    Raises:
        TypeError: for a completion that is not a list of `(label, tokens)`.
        ValueError: for a number of tokens below 0.

    >>> import traceage as ta
    >>> trace = make_trace([[("9", 1), ("10", 2)], [(11, 1), (None, 4)]])
    >>> [node["message"]["role"] for node in trace["nodes"]]
    ['user', 'assistant', 'user', 'assistant']
    >>> ta.token_policy_ages(trace, training_version=11)
    array([2, 1, 1, 0], dtype=int32)
    """
    runs = [_runs(number, completion) for number, completion in enumerate(completions)]
    if prompt_tokens < 0:
        raise ValueError(f"prompt_tokens is {prompt_tokens}; give 0 or more")
    rewards = {} if reward is None else {"reward": {"score": float(reward), "weight": 1.0}}
    about = {"name": agent, "trainable": trainable, "config": {}}
    if id is None:
        id = _digest([runs, prompt_tokens, about, rewards, mismatch, advantage, entropy])
    stamps = {"trainer_logprobs": mismatch, "advantages": advantage, "entropies": entropy}
    draw = Random(id)
    nodes: list[Record] = []
    for number, completion in enumerate(runs):
        for node in _prompt(number, prompt_tokens, draw), _answer(number, completion, stamps, draw):
            parent = {"parent": len(nodes) - 1} if nodes else {}
            nodes.append({**parent, **node, "timestamp": START + number})
    return {
        "version": 1,
        "id": id,
        "task": {"type": "Test", "data": {"idx": 0}},
        "agent": about,
        "nodes": nodes,
        "calls": [],
        "rewards": rewards,
        "info": {},
        "is_completed": True,
        "ok": True,
        "errors": [],
        "timing": {"start": START},
    }


def make_episode(
    traces: Sequence[Record],
    *,
    policy: tuple[int, int] | None = None,
    id: str | None = None,
    env: str = "env",
    group: str | None = None,
    kind: Literal["train", "eval"] = "train",
) -> Record:
    """An episode of some traces, which are not copied.

    Args:
        traces: of one agent or several; see `make_trace`.
        policy: the first and the last policy version that were live while it was generated; None
            for the work of a frozen policy, whose staleness counts as 0.
        id: the episode's; by default it follows from everything else.
        env: the name of its environment.
        group: the id of its group; none by default.
        kind: `"train"` or `"eval"`.

    Returns:
        A record as `verifiers` writes it, for `write_run` and `ta.batch_metrics`.

    Raises:
        ValueError: for a policy that ends before it starts.

    >>> import traceage as ta
    >>> episode = make_episode([make_trace([[("9", 1), ("10", 3)]])], policy=(9, 10))
    >>> metrics = ta.batch_metrics([episode], step=12)
    >>> metrics["off_policy/token/mean"], metrics["off_policy/in_flight/mean"]
    (1.25, 1.0)
    """
    # Dispatched while its first policy was live: what the batch after that policy trains.
    work: Record = {"type": kind, "step": 1}
    if policy is not None:
        start, end = policy
        if end < start:
            raise ValueError(f"policy {policy} ends before it starts; give (first, last)")
        work |= {"step": start + 1, "policy": {"start": start, "end": end}}
    episode: Record = {
        "env": {"id": env, "name": env},
        "task": {"type": "Test", "data": {"idx": 0}},
        **({} if group is None else {"group": {"id": group}}),
        "run": {"type": "train", "id": "run", "work": work},
        "ok": True,
        "errors": [],
        "traces": list(traces),
    }
    return {"id": _digest(episode) if id is None else id, **episode}


def write_run(
    directory: str | os.PathLike[str],
    batches: Mapping[int, Sequence[Record]],
    *,
    layout: Layout = "store",
    not_shipped: Mapping[int, Sequence[Record]] | None = None,
) -> Path:
    """Write what a training run would have: a directory that `ta.scan_spans` reads.

    Args:
        directory: made if it is not there.
        batches: for each step the episodes that its batch trained on. A bare trace is written as an
            episode without a `run`. Of an episode of kind `"eval"` it is the step at which it ran.
        layout: `"store"` for prime-rl's trace store, `"steps"` for the directories a step that it
            wrote before.
        not_shipped: for each step the episodes that arrived then and that no batch took: a trace
            store tells them apart, the directories a step have them under `subset="all"` alone.

    Returns:
        The directory.

    Raises:
        FileExistsError: for a directory that holds a run already.
        ValueError: for two traces or two episodes with one id, an episode that a batch cannot have
            trained on because no agent in it is trainable, and an unknown layout. Nothing is
            written then.

    >>> import traceage as ta
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     run = write_run(folder, {2: [make_trace([[("0", 1), ("1", 3)]])]})
    ...     ta.scan_spans(run).select("step", "label", "length").collect().rows()
    [(2, '0', 1), (2, '1', 3)]
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout {layout!r} is not known; give one of {get_args(Layout)}")
    root = Path(directory)
    for part in ("monitors", "rollouts"):
        if (root / part).exists():
            raise FileExistsError(f"{root / part}: a run is there; write to another directory")
    arrivals = [*_arrivals(batches, True), *_arrivals(not_shipped or {}, False)]
    arrivals.sort(key=lambda arrival: arrival.step)
    _check_ids(arrivals)
    if layout == "store":
        _write_store(root, arrivals)
    else:
        _write_steps(root, arrivals)
    return root


class _Arrival(NamedTuple):
    """An episode that came to a run, and whether the batch of that step took it."""

    step: int
    episode: Record
    kind: str
    taken: bool


def _arrivals(batches: Mapping[int, Sequence[Record]], taken: bool) -> Iterator[_Arrival]:
    for step, records in batches.items():
        for record in records:
            episode = record if "traces" in record else _episode_of(record)
            work = (episode.get("run") or {}).get("work") or {}
            kind = work.get("type", "train")
            if taken and kind != "eval" and not any(map(_trains, episode["traces"])):
                raise ValueError(
                    f"step {step}: episode {episode['id']} has no trace of a trainable agent, so "
                    "no batch trains on it; give it as not_shipped, or a trainable trace to it"
                )
            yield _Arrival(step, episode, kind, taken)


def _episode_of(trace: Record) -> Record:
    parts = {"task": trace["task"], "ok": True, "errors": [], "traces": [trace]}
    return {"id": trace["id"], **parts}


def _trains(trace: Record) -> bool:
    return (trace.get("agent") or {}).get("trainable") is not False


def _check_ids(arrivals: Sequence[_Arrival]) -> None:
    """Traces are taken and episodes are counted by their ids, so no two may share one."""
    steps: dict[tuple[str, str], int] = {}
    for step, episode, _, _ in arrivals:
        ids = [*(("trace", one["id"]) for one in episode["traces"]), ("episode", episode["id"])]
        for what in ids:
            if what in steps:
                kind, name = what
                raise ValueError(
                    f"{kind} {name} stands at step {steps[what]} and again at step {step}; give "
                    f"each its own id: make_{kind}(..., id=...)"
                )
            steps[what] = step


def _write_store(root: Path, arrivals: Sequence[_Arrival]) -> None:
    # Brings pyarrow, which a test that writes no run need not load.
    from traceage.capture.store import TraceStoreWriter

    with TraceStoreWriter(root) as store:
        for step, episode, kind, taken in arrivals:
            work = (episode.get("run") or {}).get("work") or {}
            store.append(
                episode,
                dispatch_step=work.get("step", step),
                arrival_step=step,
                dispatch_time=START,
                arrival_time=START,
                kind=kind,
            )
            # What an eval finds is never trained on.
            for trace in episode["traces"] if taken and kind != "eval" else ():
                if _trains(trace):
                    ship = {"step": step, "time": START}
                    store.annotate("orch", trace["id"], {"effective": True, "ship": ship})


def _write_steps(root: Path, arrivals: Sequence[_Arrival]) -> None:
    for step, episode, kind, taken in arrivals:
        line = json.dumps(episode, ensure_ascii=False, separators=(",", ":")) + "\n"
        for subset in ("all", "effective") if taken else ("all",):
            path = root / "rollouts" / f"step_{step}" / kind / subset / "traces.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(line.encode())


def _runs(number: int, completion: Runs) -> list[tuple[str | None, int]]:
    """The runs of a completion, labels as text."""
    try:
        runs = [(_label(label), operator.index(tokens)) for label, tokens in completion]
    except (TypeError, ValueError):
        raise TypeError(
            f"completion {number} is {completion!r}, which is not a list of (label, tokens); "
            'a trace of one completion is [[("3", 10), ("4", 5)]]'
        ) from None
    for label, tokens in runs:
        if tokens < 0:
            raise ValueError(
                f"completion {number}: run {label!r} has {tokens} tokens; give 0 or more"
            )
    return runs


def _label(label: Label) -> str | None:
    return label if label is None or isinstance(label, str) else str(operator.index(label))


def _prompt(number: int, tokens: int, draw: Random) -> Record:
    """A message of the user: a node that no model sampled."""
    return {
        "message": {"role": "user", "content": f"prompt {number}"},
        "sampled": False,
        "token_ids": _token_ids(tokens, draw),
        "mask": [False] * tokens,
        "logprobs": [],
    }


def _answer(
    number: int,
    runs: Sequence[tuple[str | None, int]],
    stamps: Mapping[str, float | None],
    draw: Random,
) -> Record:
    """A completion: behind the generation prompt, the tokens of the runs and their streams."""
    tokens = sum(length for _, length in runs)
    logprobs = [round(-1.0 - 2.0 * draw.random(), DECIMALS) for _ in range(tokens)]
    node: Record = {
        "message": {"role": "assistant", "content": f"completion {number}"},
        "sampled": True,
        "token_ids": SCAFFOLD + _token_ids(tokens, draw),
        "mask": [False] * len(SCAFFOLD) + [True] * tokens,
        "logprobs": logprobs,
    }
    for stream, value in stamps.items():
        if value is not None:
            base = logprobs if stream == "trainer_logprobs" else [0.0] * tokens
            node[stream] = [round(one + value, DECIMALS) for one in base]
    spans = _spans(runs)
    # An engine that labels nothing has no list to give; for an output of no tokens it is empty.
    if spans or not tokens:
        node["weight_versions"] = spans
    return node


def _spans(runs: Sequence[tuple[str | None, int]]) -> list[Record]:
    """The engine's spans: tokens without a label are in none."""
    spans: list[Record] = []
    at = 0
    for label, tokens in runs:
        if label is not None and tokens:
            spans.append({"version": label, "start": at, "end": at + tokens})
        at += tokens
    return spans


def _token_ids(count: int, draw: Random) -> list[int]:
    # `random` alone is promised to give the same numbers in every version of Python.
    return [int(draw.random() * VOCABULARY) for _ in range(count)]


def _digest(value: Any) -> str:
    """An id that follows from what it is for."""
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
