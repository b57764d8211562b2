"""What limits on staleness leave to train on: by hand, and against plain loops."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import polars as pl
import pytest
import reference as ref
from compare import assert_same_metrics, write_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from reference import Metrics, Record, Stored
from store_writer import StoreWriter
from strategies import stored_records

import traceage as ta
from traceage.thresholds import masking_of
from traceage.traces import TraceTally

DATA = Path(__file__).parent.parent / "data"

few = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)

Run = tuple[int | None, int]
"""A version and how many tokens it labels."""


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of one example."""
    with TemporaryDirectory() as name:
        yield Path(name)


def trace(name: str, *completions: Sequence[Run], reward: float | None = None) -> Record:
    """A trace of some completions of one token or more a run."""
    nodes = []
    for runs in completions:
        spans, at = [], 0
        for version, length in runs:
            if version is not None:
                spans.append({"version": str(version), "start": at, "end": at + length})
            at += length
        nodes.append({"sampled": True, "mask": [True] * at, "weight_versions": spans})
    rewards = {} if reward is None else {"r": {"score": reward}}
    return {"id": name, "nodes": nodes, "rewards": rewards}


def episode(
    name: str,
    *traces: Record,
    start: int | None = None,
    group: str | None = None,
    env: str = "toy",
) -> Record:
    """An episode that was dispatched under policy `start`; of a frozen policy without one."""
    policy = {} if start is None else {"policy": {"start": start, "end": start}}
    return {
        "id": name,
        "env": {"id": env},
        "group": None if group is None else {"id": group},
        "run": {"type": "train", "work": {"type": "train", **policy}},
        "traces": list(traces),
    }


def spans_of(root: Path, *batches: tuple[int, Sequence[Record]]) -> pl.LazyFrame:
    """The spans of some batches, (step, episodes) each."""
    write_steps(root, [Stored(record, step, {}) for step, records in batches for record in records])
    return ta.scan_spans(root)


def limited(table: pl.DataFrame, policy: str, max_age: int) -> Metrics:
    return table.row(
        by_predicate=(pl.col("policy") == policy) & (pl.col("max_age") == max_age), named=True
    )


def kept(table: pl.DataFrame, policy: str) -> list[int]:
    return table.filter(policy=policy)["kept_tokens"].to_list()


# --- masking, worked by hand ----------------------------------------------------------------------


def test_every_figure(tmp_path: Path) -> None:
    """Two rollouts of a task: ages 0 and 2 in the one, 3 and none in the two turns of the other."""
    one = trace("t1", [(4, 6), (2, 4)], reward=1.0)
    two = trace("t2", [(1, 4)], [(1, 2), (None, 2)], reward=0.0)
    records = [episode("e1", one, start=2, group="g"), episode("e2", two, start=0, group="g")]
    table = ta.masking(spans_of(tmp_path, (5, records)), max_age=[1, 2, 3, 4])
    whole: Metrics = {
        "tokens": 18,
        "traces": 2,
        "groups": 1,
        "reward/all": 0.5,
        "completion_tokens/all": 6.0,
        "turns/all": 1.5,
    }
    nothing = {
        "kept_tokens": 0,
        "kept_share": 0.0,
        "lost_traces": 2,
        "lost_groups": 1,
        "small_groups": 1,
        "reward/kept": None,
        "completion_tokens/kept": None,
        "turns/kept": None,
    }
    first = {
        "kept_tokens": 10,
        "kept_share": 10 / 18,
        "lost_traces": 1,
        "lost_groups": 0,
        "small_groups": 1,
        "reward/kept": 1.0,
        "completion_tokens/kept": 10.0,
        "turns/kept": 1.0,
    }
    everything = {
        "kept_tokens": 18,
        "kept_share": 1.0,
        "lost_traces": 0,
        "lost_groups": 0,
        "small_groups": 0,
        "reward/kept": 0.5,
        "completion_tokens/kept": 6.0,
        "turns/kept": 1.5,
    }
    # 6 tokens of 10 and 2 of 8: the traces count 0.6 and 0.25.
    youngest = everything | {
        "kept_tokens": 8,
        "kept_share": 8 / 18,
        "reward/kept": 0.6 / 0.85,
        "completion_tokens/kept": (10 * 0.6 + 8 * 0.25) / (1 * 0.6 + 2 * 0.25),
        "turns/kept": (1 * 0.6 + 2 * 0.25) / 0.85,
    }
    # All of the one and 2 of 8 of the other.
    younger = everything | {
        "kept_tokens": 12,
        "kept_share": 12 / 18,
        "reward/kept": 1 / 1.25,
        "completion_tokens/kept": (10 + 8 * 0.25) / (1 + 2 * 0.25),
        "turns/kept": (1 + 2 * 0.25) / 1.25,
    }
    expected: dict[tuple[str, int], Metrics] = {
        ("token", 1): youngest,
        ("token", 2): younger,
        ("token", 3): everything,
        ("token", 4): everything,
        ("trace", 1): nothing,
        ("trace", 2): first,
        ("trace", 3): everything,
        ("trace", 4): everything,
        # Staleness is 4 - start, whatever the ages: 2 and 4.
        ("episode", 1): nothing,
        ("episode", 2): first,
        ("episode", 3): first,
        ("episode", 4): everything,
    }
    assert table.select("policy", "max_age").rows() == list(expected)
    for row, (key, figures) in zip(table.to_dicts(), expected.items(), strict=True):
        policy = {"policy": key[0], "max_age": key[1]}
        assert row == pytest.approx({**policy, **whole, **figures}), key


def test_columns_and_dtypes(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, (5, [episode("e", trace("t", [(4, 1)]))]))
    counts = ["traces", "lost_traces", "groups", "lost_groups", "small_groups"]
    means = [
        f"{n}/{of}" for n in ("reward", "completion_tokens", "turns") for of in ("all", "kept")
    ]
    schema = {
        "step": pl.Int32,
        "env": pl.String,
        "policy": pl.String,
        "max_age": pl.Int32,
        "tokens": pl.Int64,
        "kept_tokens": pl.Int64,
        "kept_share": pl.Float64,
        **dict.fromkeys(counts, pl.Int64),
        **dict.fromkeys(means, pl.Float64),
    }
    for made in (spans, spans.filter(pl.lit(False))):
        table = ta.masking(made, max_age=[1], by=["step", "env"])
        assert dict(table.schema) == schema
        assert list(table.schema) == list(schema)
    assert table.height == 0
    # Of nothing at all there is a row a policy that says so.
    (row, *_) = ta.masking(spans.filter(pl.lit(False)), max_age=[1]).to_dicts()
    assert (row["tokens"], row["traces"], row["groups"]) == (0, 0, 0)
    assert row["kept_share"] is row["reward/all"] is row["turns/all"] is None


def test_tokens_without_an_age_and_negative_ages_are_kept(tmp_path: Path) -> None:
    own = trace("t", [(None, 3), (9, 2), (4, 1)])
    table = ta.masking(spans_of(tmp_path, (5, [episode("e", own, start=9)])), max_age=[-1, 0])
    assert kept(table, "token") == [5, 6]
    assert kept(table, "trace") == [0, 6]
    # A policy newer than the one that trained is no staleness below 0.
    assert kept(table, "episode") == [0, 6]
    unlabelled = ta.masking(
        spans_of(tmp_path / "2", (5, [episode("e", trace("t", [(None, 3)]), start=0)])), max_age=[0]
    )
    assert unlabelled["kept_tokens"].to_list() == [3, 3, 0]


def test_staleness_of_an_unknown_and_of_a_frozen_policy(tmp_path: Path) -> None:
    unknown = episode("unknown", trace("t1", [(0, 2)]))
    del unknown["run"]
    frozen = episode("frozen", trace("t2", [(0, 3)]), start=None)
    stale = episode("stale", trace("t3", [(0, 5)]), start=0)
    table = ta.masking(spans_of(tmp_path, (5, [unknown, frozen, stale])), max_age=[-1, 0, 4])
    assert kept(table, "episode") == [2, 2 + 3, 2 + 3 + 5]
    assert kept(table, "token") == [0, 0, 10]


def test_traces_of_an_episode_are_kept_apart_but_for_its_staleness(tmp_path: Path) -> None:
    both = episode("e", trace("t1", [(4, 2)]), trace("t2", [(1, 3)]), start=1, group="g")
    table = ta.masking(spans_of(tmp_path, (5, [both])), max_age=[0, 3])
    assert kept(table, "trace") == [2, 5]
    assert kept(table, "episode") == [0, 5]
    assert table["lost_traces"].to_list() == [1, 0, 1, 0, 2, 0]
    # One episode: its group cannot become small, but it can be lost.
    assert table["small_groups"].to_list() == [0] * 6
    assert table["lost_groups"].to_list() == [0, 0, 0, 0, 1, 0]


def test_groups_are_of_one_batch(tmp_path: Path) -> None:
    """Members in two batches make a group in each; nobody's group is none."""
    batches = (
        (5, [episode("e1", trace("t1", [(4, 2)]), group="g")]),
        (
            6,
            [
                episode("e2", trace("t2", [(5, 2)]), group="g"),
                episode("e3", trace("t3", [(0, 2)]), group="g"),
                episode("e4", trace("t4", [(0, 2)]), group="h"),
                episode("e5", trace("t5", [(0, 2)])),
                episode("e6", trace("t6", []), group="empty"),
            ],
        ),
    )
    table = ta.masking(spans_of(tmp_path, *batches), max_age=[0, 9])
    columns = ["groups", "lost_groups", "small_groups"]
    assert [limited(table, "trace", 0)[name] for name in columns] == [3, 1, 1]
    assert [limited(table, "trace", 9)[name] for name in columns] == [3, 0, 0]
    by_step = ta.masking(spans_of(tmp_path, *batches), max_age=[0], by=["step"])
    rows = by_step.filter(policy="trace").select("step", *columns).rows()
    assert rows == [(5, 1, 0, 0), (6, 2, 1, 1)]


def test_rewards_are_of_the_scored(tmp_path: Path) -> None:
    traces = [
        trace("t1", [(4, 1), (0, 3)], reward=2.0),
        trace("t2", [(4, 2)], reward=-1.0),
        trace("t3", [(4, 100)]),
        trace("t4", [], reward=50.0),
    ]
    records = [episode(f"e{i}", one) for i, one in enumerate(traces)]
    table = ta.masking(spans_of(tmp_path, (5, records)), max_age=[0])
    row = limited(table, "token", 0)
    assert row["reward/all"] == 0.5
    assert row["reward/kept"] == pytest.approx((0.25 * 2 - 1) / 1.25)
    assert limited(table, "trace", 0)["reward/kept"] == -1.0
    # A trace that has no token trains nothing; one without a reward does.
    assert (row["traces"], row["completion_tokens/all"]) == (3, 106 / 3)
    unscored = ta.masking(spans_of(tmp_path / "2", (5, [records[2]])), max_age=[0])
    assert unscored["reward/all"].null_count() == unscored["reward/kept"].null_count() == 3


def test_an_empty_completion_is_a_turn(tmp_path: Path) -> None:
    own = trace("t", [(4, 6)], [], [(4, 3)])
    table = ta.masking(spans_of(tmp_path, (5, [episode("e", own)])), max_age=[0])
    assert table["turns/all"].to_list() == [3.0] * 3
    assert table["completion_tokens/all"].to_list() == [3.0] * 3


def test_a_trace_that_is_read_in_pieces_is_one(tmp_path: Path) -> None:
    own = trace("t", [(4, 6), (1, 2)], [(3, 4)], reward=1.0)
    spans = spans_of(tmp_path, (5, [episode("e", own, start=1, group="g")])).collect()
    whole = ta.masking(spans)
    assert kept(whole, "trace") == [0, 0, 0, 12]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        tally = TraceTally()
        for row in order:
            tally.add(spans[row])
        assert_frame_equal(masking_of(tally), whole)


def test_what_no_batch_took_is_left_out(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.append(
        episode("e1", trace("t1", [(2, 3)]), trace("t2", [(0, 5)]), start=1, group="g"),
        episode("e2", trace("t3", [(0, 7)]), start=0, group="g"),
        arrival=2,
    )
    writer.ship(3, "t1")
    for subset in ("all", "effective"):
        table = ta.masking(ta.scan_spans(tmp_path, subset=subset, quiet=True), max_age=[0])
        assert table.select("tokens", "kept_tokens", "traces", "groups", "small_groups").rows() == [
            (3, 3, 1, 1, 0),
            (3, 3, 1, 1, 0),
            (3, 0, 1, 1, 0),
        ]


def test_thresholds_in_any_order(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, (5, [episode("e", trace("t", [(4, 2), (3, 1), (1, 1)]))]))
    table = ta.masking(spans, max_age=[3, 0, 1, 3])
    assert table["max_age"].to_list() == [0, 1, 3] * 3
    assert kept(table, "token") == [2, 3, 4]
    with pytest.raises(ValueError, match="max_age holds no threshold"):
        ta.masking(spans, max_age=[])


@pytest.mark.parametrize("most", [0, 1, 31, 32, 61, 62, 63, 64, 100, 1000])
@pytest.mark.parametrize("of_tokens", [True, False])
def test_thresholds_that_are_not_given(most: int, of_tokens: bool) -> None:
    """From 0 to where nothing is lost, evenly; every whole number where they are 32 or fewer."""
    tally = TraceTally()
    tally.add(
        pl.DataFrame(
            {
                "step": [9],
                "training_version": [most],
                "shipped": [None],
                "group_id": [None],
                "episode_id": ["e"],
                "trace_id": ["t"],
                "node": [0],
                "start": [0],
                "length": [1],
                "version": [0 if of_tokens else None],
                "has_run": [not of_tokens],
                "policy_start": [0],
                "reward": [None],
            },
            schema_overrides={"shipped": pl.Boolean, "version": pl.Int32, "reward": pl.Float64},
        )
    )
    tried = masking_of(tally).filter(policy="trace" if of_tokens else "episode")
    thresholds = tried["max_age"].to_list()
    assert (thresholds[0], thresholds[-1]) == (0, most)
    assert tried["kept_tokens"].to_list() == [0] * (len(thresholds) - 1) + [1]
    if most < 32:
        assert thresholds == list(range(most + 1))
    else:
        gaps = {b - a for a, b in pairwise(thresholds[:-1])}
        assert len(gaps) == 1
        assert thresholds[-1] - thresholds[-2] <= gaps.pop()
        assert 16 < len(thresholds) <= 32


def test_groups_of_traces(tmp_path: Path) -> None:
    records = [
        episode("e1", trace("t1", [(4, 2)]), group="g"),
        episode("e2", trace("t2", [(0, 5)]), env="code", start=0),
    ]
    del records[0]["env"]
    table = ta.masking(spans_of(tmp_path, (5, records)), max_age=[4, 0], by=["env"])
    assert table.select("env", "policy", "max_age", "kept_tokens", "groups").rows() == [
        (env, policy, k, tokens if k == 4 or env is None else 0, groups)
        for env, tokens, groups in (("code", 5, 0), (None, 2, 1))
        for policy in ("token", "trace", "episode")
        for k in (0, 4)
    ]
    for wrong in ("node", "reward", "index_bin"):
        with pytest.raises(ValueError, match=f"'{wrong}' is no column to group traces by"):
            ta.masking(ta.scan_spans(tmp_path), by=[wrong])


# --- masking, against plain loops -----------------------------------------------------------------

groupings = st.sampled_from(
    [[], ["step"], ["env"], ["step", "env"], ["agent"], ["training_version"]]
)


def assert_same_masking(
    found: pl.DataFrame, expected: Sequence[Metrics], by: Sequence[str] = ()
) -> None:
    keys = [*by, "policy", "max_age"]
    assert found.select(keys).rows() == [tuple(row[name] for name in keys) for row in expected]
    assert_same_metrics(found, expected, keys)


@few
@given(
    stored_records(max_size=6),
    st.lists(st.integers(-2, 13), min_size=1, max_size=4),
    groupings,
    st.integers(0, 2**32 - 1),
)
def test_of_random_records(
    stored: list[Stored], thresholds: list[int], by: list[str], seed: int
) -> None:
    with folder() as root:
        write_steps(root, stored)
        spans = ta.scan_spans(root).collect()
    found = ta.masking(spans, thresholds, by)
    assert_same_masking(found, ref.masking_rows(ref.token_rows(stored), thresholds, by), by)
    rows = list(range(spans.height))
    Random(seed).shuffle(rows)
    tally = TraceTally(by)
    for first in range(0, spans.height, 5):
        tally.add(spans[rows[first : first + 5]])
    assert_frame_equal(masking_of(tally, thresholds), found, rel_tol=1e-9, abs_tol=1e-9)


@few
@given(stored_records(), groupings)
def test_thresholds_of_random_records(stored: list[Stored], by: list[str]) -> None:
    """Those that are tried by themselves reach from 0 to where nothing is lost."""
    rows = ref.token_rows(stored)
    with folder() as root:
        write_steps(root, stored)
        found = ta.masking(ta.scan_spans(root), by=by)
    ages = [row.age for row in rows if row.age is not None]
    stale = [
        staleness[0]
        for row in rows
        if row.index is not None and (staleness := ref.episode_staleness(row))
    ]
    expected = ref.masking_rows(rows, range(max([0, *ages, *stale]) + 1), by)
    assert_same_masking(found, expected, by)


def test_of_the_real_dumps() -> None:
    rows = ref.token_rows(ref.fold_store(DATA / "real-dump"))
    found = ta.masking(ta.scan_spans(DATA / "real-dump"), by=["step"])
    assert_same_masking(found, ref.masking_rows(rows, range(5), ["step"]), ["step"])
    same = ta.masking(ta.scan_spans(DATA / "real-dump-steps"), by=["step"])
    assert_frame_equal(same, found, rel_tol=1e-12)
    # By age, the dump's own figures say how many tokens there are.
    figures = json.loads((DATA / "real-dump/expected.json").read_text())["mismatch_by_age"]
    of_age = [figures[str(age)]["tokens"] for age in range(5)]
    whole = ta.masking(ta.scan_spans(DATA / "real-dump"))
    assert kept(whole, "token") == [sum(of_age[: k + 1]) for k in range(5)]


# --- a mask of single tokens ----------------------------------------------------------------------


def test_a_mask_keeps_order_and_unknown_ages() -> None:
    ages = pl.DataFrame({"age": [3, None, 0, -2, 2, 7]}, schema={"age": pl.Int32})
    expected = [False, True, True, True, True, False]
    for tokens in (ages, ages.lazy()):
        mask = ta.staleness_mask(tokens, 2)
        assert mask.name == "staleness_mask"
        assert mask.dtype == pl.Boolean
        assert mask.to_list() == expected
    assert ta.staleness_mask(ages.clear(), 2).to_list() == []
    trained = pl.DataFrame(
        {"training_version": [4, None, 4, 4], "version": [1, 1, 3, None]},
        schema=dict.fromkeys(["training_version", "version"], pl.Int32),
    )
    assert ta.staleness_mask(trained, 2).to_list() == [False, True, True, True]
    # What stands there as the age is the age.
    said = trained.with_columns(age=pl.Series([0, 9, 9, 9]))
    assert ta.staleness_mask(said, 2).to_list() == [True, False, False, False]


def test_a_mask_needs_ages() -> None:
    with pytest.raises(ValueError, match=r"neither `age` nor .* it has version, logprob"):
        ta.staleness_mask(pl.DataFrame({"version": [1], "logprob": [0.0]}), 2)


def test_a_mask_keeps_what_the_limit_on_tokens_keeps() -> None:
    tokens = ta.scan_tokens(DATA / "real-dump", ["age"])
    table = ta.masking(ta.scan_spans(DATA / "real-dump"), max_age=[0, 2])
    assert [ta.staleness_mask(tokens, k).sum() for k in (0, 2)] == kept(table, "token")
