"""Traces built and written by `verifiers` itself, read back by the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pytest
import reference as ref
from compare import assert_same_metrics, assert_same_tokens
from reference import Record, Stored

import traceage as ta

pytest.importorskip("verifiers")
configs = pytest.importorskip("verifiers.v1.configs.agent")
episodes = pytest.importorskip("verifiers.v1.episode")
graph = pytest.importorskip("verifiers.v1.graph")
semantic = pytest.importorskip("verifiers.v1.semantic")
task = pytest.importorskip("verifiers.v1.task")
traces = pytest.importorskip("verifiers.v1.trace")
types = pytest.importorskip("verifiers.v1.types")

STEP = 7

# (label, number of tokens) one after the other; no label at all where None.
Labels = list[tuple[str | None, int]]


def new_task() -> Any:
    data = task.WireTaskData(idx=3, note='"weight_versions":[{"version":"99"}]\u2028')
    return traces.TraceTask(type="T", data=data)


def new_trace(name: str = "solver", *, trainable: bool = True) -> Any:
    agent = traces.AgentInfo(config=configs.WireAgentConfig(), name=name, trainable=trainable)
    return traces.WireTrace(task=new_task(), agent=agent)


def spans_of(labels: Labels) -> list[Any] | None:
    spans = []
    at = 0
    for label, length in labels:
        if label is not None:
            spans.append(types.WeightVersionSpan(version=label, start=at, end=at + length))
        at += length
    return spans or None


def user(text: str) -> Any:
    return types.UserMessage(content=text)


def turn(trace: Any, prompt: list[Any], reply: str, labels: Labels) -> int:
    """One model call over `prompt`, committed by the graph builder as a rollout does it."""
    pending = graph.prepare_turn(trace, prompt)
    prefix = [i for nid in pending.prefix_node_ids for i in list(trace.nodes[nid].token_ids)]
    spans: list[tuple[int, int] | None] = [None] * len(pending.prefix_node_ids)
    ids = list(prefix)
    for message in pending.tail:
        start = len(ids)
        ids += [len(str(message.content)), 11, 12]
        spans.append((start, len(ids)))
    # The generation prompt: on the assistant node, before the completion, not sampled.
    ids += [2, 3]
    count = sum(length for _, length in labels)
    tokens = types.TurnTokens(
        prompt_ids=ids,
        completion_ids=[100 + i for i in range(count)],
        completion_logprobs=[-0.123456] * count,
        message_spans=spans,
        weight_versions=spans_of(labels),
    )
    response = types.Response(
        id="r",
        created=0,
        model="m",
        message=types.AssistantMessage(content=reply),
        finish_reason="stop",
        tokens=tokens,
    )
    node: int = pending.commit(response)
    return node


def link(trace: Any, node: int, to: int, kind: str) -> None:
    trace.nodes[node].semantic_parents.append(semantic.ParentLink(node=to, type=kind))


def chat() -> Any:
    """Two turns in one branch; the second mixes versions."""
    trace = new_trace()
    start = [types.SystemMessage(content="be good \u0085"), user("hello")]
    first = turn(trace, start, "hi", [("3", 4)])
    path = graph.path(trace, first)
    turn(trace, [*path, user("more")], "well", [("3", 2), ("5", 3), ("default", 1)])
    return trace


def forked() -> Any:
    """A shared first turn, three continuations, and an unrelated root."""
    trace = new_trace("writer")
    first = turn(trace, [user("hello")], "hi", [("4", 5)])
    path = graph.path(trace, first)
    for i in range(3):
        turn(trace, [*path, user(f"way {i}")], f"reply {i}", [(str(4 + i), 2), (None, i)])
    turn(trace, [user("subagent")], "on my own", [("10", 3)])
    return trace


def compacted(*, accepted: bool) -> Any:
    """A turn, an attempt to compact it, and a new root that resumed from the attempt or not."""
    trace = new_trace()
    first = turn(trace, [user("hello")], "hi", [("2", 3)])
    path = graph.path(trace, first)
    attempt = turn(trace, [*path, user("summarise")], "summary", [("2", 2), ("3", 2)])
    link(trace, attempt, first, "compaction_attempt")
    other = turn(trace, [*path, user("go on")], "going on", [("3", 4)])
    link(trace, other, first, "continuation")
    resumed = turn(trace, [user("summary so far")], "resumed", [("6", 5)])
    if accepted:
        link(trace, resumed, attempt, "compaction")
    return trace


def unlabelled() -> Any:
    """An engine that labels nothing, and a turn that came back empty."""
    trace = new_trace()
    first = turn(trace, [user("hello")], "hi", [(None, 4)])
    turn(trace, [*graph.path(trace, first), user("more")], "", [])
    return trace


def relayed() -> Any:
    """A turn of a provider that returns no tokens."""
    trace = new_trace()
    pending = graph.prepare_turn(trace, [user("hello")])
    message = types.AssistantMessage(content="hi")
    pending.commit(
        types.Response(id="r", created=0, model="m", message=message, finish_reason="stop")
    )
    return trace


def episode(name: str, *own: Any, policy: tuple[int, int] | None = (3, 5)) -> Any:
    span = None if policy is None else episodes.PolicySpan(start=policy[0], end=policy[1])
    made = episodes.WireEpisode(
        id=name,
        env=episodes.EnvInfo(id="toy", name="toy-long"),
        task=new_task(),
        group=episodes.GroupInfo(id="g0"),
        ok=True,
        traces=list(own),
    )
    work = episodes.TrainWorkInfo(step=4, policy=span)
    made.record_run(episodes.TrainRunInfo(id="run", work=work))
    for trace in own:
        trace.record_reward("r", 0.5, weight=2.0)
        trace.info["weight_versions"] = [{"version": "77", "start": 0, "end": 1}]
    return made


def batch() -> list[Any]:
    judge = new_trace("judge", trainable=False)
    turn(judge, [user("score this")], "5/5", [("default", 6)])
    return [
        episode("e0", chat(), judge),
        episode("e1", forked(), policy=(4, 4)),
        episode("e2", compacted(accepted=True), policy=(2, 6)),
        episode("e3", compacted(accepted=False), policy=None),
        episode("e4", unlabelled(), relayed()),
        episode("e5"),
    ]


def records_of(objects: list[Any]) -> list[Record]:
    """What stands on disk, after a JSON round trip."""
    return [json.loads(json.dumps(made.to_record())) for made in objects]


def write(path: Path, objects: list[Any]) -> Path:
    lines = [json.dumps(made.to_record(), ensure_ascii=False) + "\n" for made in objects]
    path.write_text("".join(lines), encoding="utf-8", newline="")
    return path


def test_episodes_read_back(tmp_path: Path) -> None:
    made = batch()
    path = write(tmp_path / "traces.jsonl", made)
    stored = [Stored(record, STEP, {}) for record in records_of(made)]
    rows = ref.token_rows(stored)
    assert_same_tokens(ta.scan_spans(path, step=STEP).collect(), rows)
    weightings: tuple[Literal["nodes", "branches"], ...] = ("nodes", "branches")
    for weighting in weightings:
        found = ta.off_policy_metrics(ta.scan_spans(path, step=STEP), weighting=weighting)
        assert_same_metrics(found, ref.metrics_rows(rows, weighting=weighting))


def test_bare_traces_read_back(tmp_path: Path) -> None:
    """A trace's own record keeps its nulls, unlike an episode's."""
    made = [chat(), forked(), compacted(accepted=True), compacted(accepted=False), relayed()]
    assert "null" in json.dumps(made[0].to_record())
    path = write(tmp_path / "traces.jsonl", made)
    stored = [Stored(record, STEP, {}) for record in records_of(made)]
    spans = ta.scan_spans(path, step=STEP).collect()
    assert_same_tokens(spans, ref.token_rows(stored))
    assert set(spans["episode_id"]) == {trace.id for trace in made}
    assert not spans["has_run"].any()


def test_branch_weighting_is_the_training_samples(tmp_path: Path) -> None:
    """The tokens counted are those of verifiers' trainable branches, one sample each."""
    made = batch()
    path = write(tmp_path / "traces.jsonl", made)
    expected: dict[str, int] = {}
    for one in made:
        for trace in one.traces:
            if trace.agent.trainable:
                samples = [branch for branch in trace.branches if branch.trainable]
                expected[trace.id] = sum(int(branch.sampled_mask.sum()) for branch in samples)
    spans = ta.scan_spans(path, step=STEP).filter(pl.col("trace_id").is_not_null()).collect()
    weighted = spans.group_by("trace_id").agg(
        (pl.col("length") * pl.col("branches").fill_null(0)).sum()
    )
    assert dict(weighted.rows()) == expected
    found = ta.off_policy_metrics(spans, weighting="branches")
    assert found["sampled_tokens"].to_list() == [sum(expected.values())]


@pytest.mark.parametrize("accepted", [True, False])
def test_a_compaction_attempt_trains_only_if_resumed(tmp_path: Path, accepted: bool) -> None:
    trace = compacted(accepted=accepted)
    assert [branch.trainable for branch in trace.branches] == [accepted, True, True]
    path = write(tmp_path / "traces.jsonl", [trace])
    spans = ta.scan_spans(path, step=STEP).collect()
    branches = spans.group_by("turn").agg(pl.col("branches").first()).sort("turn")
    assert branches["branches"].to_list() == [2 if accepted else 1, int(accepted), 1, 1]
    # As nodes, each counts once either way.
    assert ta.off_policy_metrics(spans)["sampled_tokens"].to_list() == [3 + 4 + 4 + 5]
    by_branch = ta.off_policy_metrics(spans, weighting="branches")
    assert by_branch["sampled_tokens"].to_list() == [6 + 4 + 4 + 5 if accepted else 3 + 4 + 5]
    counts = dict(ta.age_counts(spans, weighting="branches").select("age", "tokens").rows())
    # Trained at version 6: labels 2, 3 and 6 are 4, 3 and 0 steps old.
    assert {age: n for age, n in counts.items() if n} == (
        {4: 6 + 2, 3: 2 + 4, 0: 5} if accepted else {4: 3, 3: 4, 0: 5}
    )


def test_token_policy_ages_of_objects_and_records() -> None:
    for trace in (chat(), forked(), compacted(accepted=True), unlabelled(), relayed()):
        (record,) = records_of([trace])
        rows = ref.token_rows([Stored(record, STEP, {})])
        expected = [row.age for row in rows if row.age is not None]
        for given in (trace, record):
            ages = ta.token_policy_ages(given, STEP - 1)
            assert ages.dtype == "int32"
            assert ages.tolist() == expected


def test_node_policy_versions_of_objects_and_records() -> None:
    for trace in (chat(), forked(), unlabelled(), relayed()):
        (record,) = records_of([trace])
        for node, written in zip(trace.nodes, record["nodes"], strict=True):
            if not node.sampled:
                continue
            expected = [ref.version_of(label) for label in ref.labels_of(written)]
            for given in (node, written):
                versions = ta.node_policy_versions(given)
                assert versions.dtype == pl.Int32
                assert versions.to_list() == expected


@pytest.mark.parametrize("version", [None, 9])
def test_batch_metrics_of_objects_and_records(tmp_path: Path, version: int | None) -> None:
    made = batch()
    of_objects = ta.batch_metrics(made, step=STEP, training_version=version)
    of_records = ta.batch_metrics(records_of(made), step=STEP, training_version=version)
    assert of_objects == of_records
    path = write(tmp_path / "traces.jsonl", made)
    told: Any = "step-1" if version is None else version
    spans = ta.scan_spans(path, step=STEP, training_version=told)
    (row,) = ta.off_policy_metrics(spans).to_dicts()
    figures = {name: value for name, value in row.items() if name.startswith("off_policy/")}
    assert None not in figures.values()
    assert len(figures) == 16
    assert of_objects == figures | {"off_policy/token/coverage": row["coverage"]}


def test_wire_episodes_validated_from_the_record_give_the_same() -> None:
    made = batch()
    again = [episodes.WireEpisode.model_validate(record) for record in records_of(made)]
    assert ta.batch_metrics(again, step=STEP) == ta.batch_metrics(made, step=STEP)
