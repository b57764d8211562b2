"""A study holds what the separate calls give; what it says of whole traces, by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pytest
import reference as ref
from compare import write_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from reference import Stored, TokenRow
from store_writer import tear
from strategies import stored_records

import traceage as ta
from traceage.counts import Weighting
from traceage.mismatch import MismatchTally, Trend, mismatch_batches
from traceage.study import BREAKDOWNS, LOOKED_AT, Study, read_study
from traceage.testing import Layout, Record, make_episode, make_trace, write_run
from traceage.traces import TraceTally

DATA = Path(__file__).parent.parent / "data"
RUNS = [DATA / name for name in ("real-dump", "real-dump-steps", "capture")]

Source = str | Path | list[Path]


# --- a study and the separate calls -------------------------------------------------------------


def trend_of(source: Source) -> Trend | None:
    tally = MismatchTally()
    for batch in mismatch_batches(source, tally.columns, {"quiet": True}):
        tally.add(batch)
    return tally.trend(confidence=0.99)


def assert_same(found: pl.DataFrame | None, expected: pl.DataFrame) -> None:
    """Equal but for the last bits of sums, for parts of a source come in any order."""
    assert found is not None
    assert_frame_equal(found, expected, check_exact=False, rel_tol=1e-9, abs_tol=1e-12)


def assert_is_the_study_of(study: Study, source: Source, weighting: Weighting, scored: bool) -> Any:
    """Each table of a study is that of the function that makes it."""
    spans = ta.scan_spans(source, quiet=True).collect()
    assert_same(study.metrics, ta.off_policy_metrics(spans, weighting=weighting))
    assert_same(study.counts, ta.age_counts(spans, weighting=weighting))
    by_env = ta.off_policy_metrics(spans, ["step", "env"], weighting)
    assert_same(study.by_env, by_env)
    assert list(study.breakdowns) == list(BREAKDOWNS)
    for name, table in study.breakdowns.items():
        assert_same(table, ta.off_policy_metrics(spans, [name], weighting))
    assert_same(study.index_counts, ta.age_counts(spans, ["index_bin"], weighting))
    assert_same(study.by_reward, ta.age_by_reward(spans))
    assert_same(study.versions, ta.versions_per_trace(spans))
    assert_same(study.masking, ta.masking(spans))
    assert_last_batch(study, spans)
    assert (study.mismatch is not None) == scored
    if scored:
        assert_same(study.mismatch, ta.mismatch_by_age(source, quiet=True))
        expected = trend_of(source)
        assert study.trend == (None if expected is None else pytest.approx(expected))
    else:
        assert study.trend is None


def assert_last_batch(study: Study, spans: pl.DataFrame) -> None:
    trained = spans.filter(pl.col("step").is_not_null(), pl.col("shipped").fill_null(True))
    last = trained.filter(pl.col("step") == pl.col("step").max())
    assert study.batch is not None
    assert_frame_equal(study.batch, last.select(study.batch.columns), check_row_order=False)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_study_of_a_stored_run_is_the_separate_calls(run: Path) -> None:
    study = read_study(run, quiet=True)
    assert_is_the_study_of(study, run, "nodes", scored=True)
    assert study.sources == [run]
    assert not study.notes


@pytest.mark.parametrize("weighting", ["nodes", "branches"])
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(stored=stored_records())
def test_a_study_of_any_run_is_the_separate_calls(
    weighting: Weighting, stored: list[Stored]
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        write_steps(root, stored)
        scored = any(
            row.logprob is not None and row.trainer_logprob is not None
            for row in ref.token_rows(stored)
        )
        study = read_study(root, weighting=weighting, quiet=True)
        assert_is_the_study_of(study, root, weighting, scored)


def test_branches_weigh_metrics_and_counts_alone(tmp_path: Path) -> None:
    """A completion that two samples share counts twice; masking has each token once."""
    trace = make_trace([[(0, 5)], [(1, 3)]], mismatch=0.01)
    trace["nodes"].append({**trace["nodes"][3], "parent": 2})  # a second answer to one message
    run = write_run(tmp_path, {2: [make_episode([trace], policy=(0, 1))]}, layout="steps")
    nodes, branches = (read_study(run, weighting=w) for w in ("nodes", "branches"))
    assert_is_the_study_of(branches, run, "branches", scored=True)
    assert [study.metrics["sampled_tokens"].item() for study in (nodes, branches)] == [11, 16]
    assert branches.counts["tokens"].to_list() == [6, 10]
    assert nodes.masking is not None
    assert branches.masking is not None
    assert nodes.masking.equals(branches.masking)
    assert nodes.masking["tokens"].unique().item() == 11


def test_several_sources_add_up() -> None:
    both = [DATA / "real-dump", DATA / "capture"]
    study = read_study(both, quiet=True)
    assert_is_the_study_of(study, both, "nodes", scored=True)
    assert study.sources == both


# --- the last batch -----------------------------------------------------------------------------


def episode(version: int, reward: float | None = None, tokens: int = 4, **of: Any) -> Record:
    trace = make_trace([[(version, tokens)]], reward=reward, **of)
    return make_episode([trace], policy=(version, version), group="g")


@pytest.mark.parametrize("order", [[9, 3, 7], [3, 7, 9], [7, 9, 3]])
def test_the_last_batch_may_be_read_at_any_time(tmp_path: Path, order: list[int]) -> None:
    runs = [
        write_run(tmp_path / f"{number}", {step: [episode(step - 2)]})
        for number, step in enumerate(order)
    ]
    batch = read_study(runs).batch
    assert batch is not None
    assert batch.select("step", "version", "length").rows() == [(9, 7, 4)]


def test_a_batch_that_did_not_train_is_not_the_last(tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        {2: [episode(0), episode(1)], 3: [episode(1, tokens=5)]},
        not_shipped={8: [episode(6)]},
    )
    study = read_study(run)
    assert study.batch is not None
    assert study.batch["step"].to_list() == [3]
    everything = read_study(run, subset="all", quiet=True)
    assert everything.metrics["step"].max() == 8
    assert everything.batch is not None
    assert everything.batch["step"].to_list() == [3]


# --- what is not there, and what was skipped ----------------------------------------------------


@pytest.mark.parametrize("layout", ["store", "steps"])
def test_without_a_trainer_there_is_no_mismatch(tmp_path: Path, layout: Layout) -> None:
    run = write_run(tmp_path, {1: [episode(0)], 2: [episode(0, tokens=7)]}, layout=layout)
    study = read_study(run)
    assert study.mismatch is None
    assert study.trend is None
    assert_is_the_study_of(study, run, "nodes", scored=False)


def test_a_trainer_is_looked_for_among_the_first_tokens(tmp_path: Path) -> None:
    scored = episode(0, mismatch=0.01)
    late = write_run(tmp_path / "late", {1: [episode(0, tokens=LOOKED_AT)], 2: [scored]})
    assert read_study(late).mismatch is None
    early = write_run(tmp_path / "early", {1: [episode(0, tokens=LOOKED_AT - 1)], 2: [scored]})
    assert read_study(early).mismatch is not None


def add_lines(run: Path, text: str) -> Path:
    path = run / "rollouts" / "step_1" / "train" / "effective" / "traces.jsonl"
    path.write_text(path.read_text() + text)
    return path


@pytest.mark.parametrize("mismatch", [None, 0.01])
def test_what_was_skipped_is_in_the_notes(tmp_path: Path, mismatch: float | None) -> None:
    run = write_run(tmp_path, {1: [episode(0, mismatch=mismatch)]}, layout="steps")
    bad = episode(0, tokens=6, mismatch=mismatch)
    bad["traces"][0]["nodes"][1]["weight_versions"][0]["end"] = 99
    add_lines(run, "no json\n" + json.dumps(bad) + "\n")
    with pytest.raises(ta.TraceError, match="not JSON"):
        read_study(run)
    summary = ta.ReadSummary()
    study = read_study(run, on_error="skip", quiet=True, summary=summary)
    assert summary.skipped == 2
    assert list(study.notes) == summary.lines()
    assert len(study.notes) == 2
    assert all(note.startswith("skipped 1 x ") for note in study.notes)
    assert any("traces.jsonl:2" in note for note in study.notes)
    assert any("traces.jsonl:3" in note for note in study.notes)
    assert study.metrics.select("sampled_tokens", "labelled_tokens").rows() == [(10, 4)]
    assert (study.mismatch is None) == (mismatch is None)


def test_a_live_run_is_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path, {1: [episode(0), episode(0, tokens=9)]}, layout="steps")
    path = add_lines(run, "")
    tear(path, 20)
    study = read_study(run, quiet=True)
    (note,) = study.notes
    assert note.startswith("last line still being written, left out: ")
    assert note.endswith("traces.jsonl:2")
    assert study.metrics["sampled_tokens"].to_list() == [4]


# --- whole traces, by hand ----------------------------------------------------------------------


def spans_of(
    folder: Path, traces: Iterable[tuple[Sequence[tuple[str | int | None, int]], float | None]]
) -> pl.DataFrame:
    """A spans table of one batch, of step 5: a trace each of (runs, reward)."""
    batch = [
        make_episode([make_trace([runs], reward=reward, id=f"t{n}")], policy=(0, 4), id=f"e{n}")
        for n, (runs, reward) in enumerate(traces)
    ]
    return ta.scan_spans(write_run(folder, {5: batch})).collect()


def test_versions_a_trace(tmp_path: Path) -> None:
    spans = spans_of(
        tmp_path,
        [
            ([(4, 3)], None),
            ([(3, 3), (4, 1)], None),
            ([(3, 3), (4, 1), (3, 2)], None),  # back again: still two
            ([("default", 3), (2, 1), (None, 5)], None),  # only labels that are versions count
            ([("default", 3)], None),
            ([(None, 3)], None),
            ([(4, 0)], None),  # no token: in no row
        ],
    )
    assert ta.versions_per_trace(spans).rows() == [(0, 2), (1, 2), (2, 2)]
    assert ta.versions_per_trace(spans).schema == {"versions": pl.Int64, "traces": pl.Int64}


COLUMNS = ["reward_quantile", "reward_min", "reward_max", "traces", "labelled_tokens"]
MEAN = "off_policy/token/mean"


def test_ages_by_reward(tmp_path: Path) -> None:
    traces: list[Any] = [([(4 - n // 2, n + 1)], n / 10) for n in range(8)]
    table = ta.age_by_reward(spans_of(tmp_path, traces))
    assert table.select(*COLUMNS, MEAN, "off_policy/token/max").rows() == [
        (1, 0.0, 0.1, 2, 1 + 2, 0.0, 0),
        (2, 0.2, 0.3, 2, 3 + 4, 1.0, 1),
        (3, 0.4, 0.5, 2, 5 + 6, 2.0, 2),
        (4, 0.6, 0.7, 2, 7 + 8, 3.0, 3),
    ]
    halves = ta.age_by_reward(spans_of(tmp_path / "again", traces), quantiles=2)
    assert halves[MEAN].to_list() == [7 / 10, (22 + 45) / 26]


def test_equal_rewards_stay_together(tmp_path: Path) -> None:
    rewards = [0.0] * 5 + [1.0] * 3
    table = ta.age_by_reward(spans_of(tmp_path, [([(4, 2)], r) for r in rewards]))
    assert table.select("reward_min", "reward_max", "traces").rows() == [(0, 0, 5), (1, 1, 3)]
    assert table["reward_quantile"].is_sorted()


def test_one_reward_makes_one_part(tmp_path: Path) -> None:
    table = ta.age_by_reward(spans_of(tmp_path, [([(4, 2)], 0.5)] * 6))
    assert table.select(COLUMNS).rows() == [(1, 0.5, 0.5, 6, 12)]


def test_traces_without_a_reward_stand_apart(tmp_path: Path) -> None:
    traces: list[Any] = [([(4, 2)], 0.5), ([(1, 3)], None), ([(None, 9)], None), ([(4, 0)], 0.1)]
    table = ta.age_by_reward(spans_of(tmp_path, traces))
    assert table.select(*COLUMNS, MEAN).rows() == [
        (1, 0.5, 0.5, 1, 2, 0.0),
        (None, None, None, 2, 3, 3.0),
    ]


def test_a_part_without_a_label_has_no_age(tmp_path: Path) -> None:
    table = ta.age_by_reward(spans_of(tmp_path, [([("default", 2)], 0.5)]))
    assert table.select(*COLUMNS, MEAN).rows() == [(1, 0.5, 0.5, 1, 0, None)]
    assert table.schema["labelled_tokens"] == pl.Int64


def test_no_traces_make_no_parts(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, [([(4, 2)], 0.5)])
    table = ta.age_by_reward(spans.head(0))
    assert table.is_empty()
    assert table.schema == ta.age_by_reward(spans).schema
    assert ta.versions_per_trace(spans.head(0)).is_empty()


# --- whole traces, against plain Python ---------------------------------------------------------


def traces_of(rows: Iterable[TokenRow]) -> list[list[TokenRow]]:
    """The tokens of each trace."""
    traces: dict[tuple[Any, ...], list[TokenRow]] = {}
    for row in rows:
        if row.index is not None:
            traces.setdefault((row.step, row.episode_id, row.trace_id), []).append(row)
    return list(traces.values())


def versions_by_hand(traces: list[list[TokenRow]]) -> list[tuple[int, int]]:
    held = Counter(len({t.version for t in trace} - {None}) for trace in traces)
    return sorted(held.items())


def by_reward_by_hand(traces: list[list[TokenRow]], quantiles: int) -> dict[int | None, Any]:
    """Part -> rewards and ages. A cut is a reward; what equals it stays below."""
    rewards = sorted(trace[0].reward for trace in traces if trace[0].reward is not None)
    cuts = [rewards[(len(rewards) - 1) * k // quantiles] for k in range(1, quantiles) if rewards]
    parts: dict[int | None, Any] = {}
    for trace in traces:
        reward = trace[0].reward
        part = None if reward is None else 1 + sum(reward > cut for cut in cuts)
        rewards_of, ages = parts.setdefault(part, ([], []))
        rewards_of.append(reward)
        ages += [token.age for token in trace if token.age is not None]
    return parts


@pytest.mark.parametrize("quantiles", [2, 4])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(stored=stored_records(max_size=8))
def test_whole_traces_are_those_of_the_reference(stored: list[Stored], quantiles: int) -> None:
    traces = traces_of(ref.token_rows(stored))
    with TemporaryDirectory() as folder:
        write_steps(Path(folder), stored)
        spans = ta.scan_spans(folder).collect()
    assert ta.versions_per_trace(spans).rows() == versions_by_hand(traces)
    table = ta.age_by_reward(spans, quantiles)
    parts = by_reward_by_hand(traces, quantiles)
    assert table["reward_quantile"].to_list() == sorted(parts, key=lambda k: (k is None, k))
    for row in table.iter_rows(named=True):
        rewards, ages = parts[row["reward_quantile"]]
        assert row["traces"] == len(rewards)
        if row["reward_quantile"] is not None:
            assert (row["reward_min"], row["reward_max"]) == (min(rewards), max(rewards))
        assert row["labelled_tokens"] == len(ages)
        assert row[MEAN] == (pytest.approx(sum(ages) / len(ages)) if ages else None)
        assert row["off_policy/token/max"] == max(ages, default=None)
        for q in (50, 95, 99):
            assert row[f"off_policy/token/p{q}"] == ref.quantile(ages, q)


@settings(max_examples=30, deadline=None)
@given(rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=40, unique=True))
def test_parts_of_distinct_rewards_are_equally_many(rewards: list[float]) -> None:
    """They differ by one at the most, and are in the order of the rewards."""
    n = len(rewards)
    spans = pl.DataFrame(
        {
            "step": [5] * n,
            "training_version": [4] * n,
            "shipped": [True] * n,
            "group_id": ["g"] * n,
            "episode_id": [f"e{k}" for k in range(n)],
            "trace_id": [f"t{k}" for k in range(n)],
            "node": [1] * n,
            "start": [0] * n,
            "length": [3] * n,
            "version": [2] * n,
            "has_run": [True] * n,
            "policy_start": [2] * n,
            "reward": rewards,
        }
    )
    table = ta.age_by_reward(spans)
    sizes = table["traces"].to_list()
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == min(n, 4)
    low, high = table["reward_min"].to_list(), table["reward_max"].to_list()
    assert all(a < b for a, b in zip(high, low[1:], strict=False))


@pytest.mark.parametrize("parts", [1, 2, 50])
def test_a_trace_may_come_in_parts(parts: int) -> None:
    """Whatever the batches that the rows come in."""
    spans = ta.scan_spans(DATA / "real-dump").collect().sample(fraction=1, shuffle=True, seed=4)
    tally, whole = TraceTally(), TraceTally.of(spans)
    size = -(-spans.height // parts)
    for at in range(0, spans.height, size):
        tally.add(spans[at : at + size])
    assert tally.versions_per_trace().equals(whole.versions_per_trace())
    assert tally.age_by_reward().equals(whole.age_by_reward())
