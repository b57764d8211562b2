"""Mismatch of engine and trainer by age: by hand, against plain loops, and by simulation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pytest
import reference as ref
from compare import write_lines, write_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from polars.testing import assert_frame_equal
from reference import Metrics, Stored, TokenRow
from strategies import stored_records

import traceage as ta
from traceage.mismatch import COLUMNS, MismatchTally, interval, resampled

DATA = Path(__file__).parent.parent / "data"

few = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)

LN2 = math.log(2)
INF = math.inf
INTERVALS = [name for name in COLUMNS if name.endswith(("_low", "_high"))]
FIGURES = [name for name in COLUMNS if name not in INTERVALS]


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of one example."""
    with TemporaryDirectory() as name:
        yield Path(name)


def frame(*tokens: tuple[str, int | None, float | None, float | None]) -> pl.DataFrame:
    """A tokens table of (episode, age, logprob, trainer's logprob)."""
    schema = {
        "episode_id": pl.String,
        "age": pl.Int32,
        "logprob": pl.Float64,
        "trainer_logprob": pl.Float64,
    }
    return pl.DataFrame(tokens, schema=schema, orient="row")


def ratios(*tokens: tuple[str, int | None, float]) -> pl.DataFrame:
    """A tokens table of (episode, age, importance ratio)."""
    return frame(*((episode, age, -3.0, math.log(w) - 3.0) for episode, age, w in tokens))


def drawn(values: NDArray[np.float64], episodes: NDArray[np.int64]) -> pl.DataFrame:
    """A tokens table of age 0, of log ratios and the number of each one's episode."""
    return pl.DataFrame(
        {
            "episode_id": episodes.astype(str),
            "age": pl.repeat(0, len(values), dtype=pl.Int32, eager=True),
            "logprob": np.zeros(len(values)),
            "trainer_logprob": values,
        }
    )


def tallied(
    pieces: Sequence[pl.DataFrame], by: Sequence[str] = (), clip: tuple[float, float] = (0.8, 1.2)
) -> MismatchTally:
    """A tally of some pieces of a tokens table, in their order."""
    tally = MismatchTally(by, clip)
    for piece in pieces:
        if "trainer_mismatch_kl" not in piece.columns:
            piece = piece.with_columns(trainer_mismatch_kl=pl.lit(None, pl.Float32))
        tally.add(piece)
    return tally


# --- worked by hand -------------------------------------------------------------------------------


def test_every_figure() -> None:
    """Ratios 1 and 2 in one episode, 1/2 in another."""
    tokens = ratios(("a", 0, 1.0), ("a", 0, 2.0), ("b", 0, 0.5)).with_columns(
        trainer_mismatch_kl=pl.Series([0.1, None, 0.3], dtype=pl.Float32)
    )
    table = ta.mismatch_by_age(tokens)
    assert table.columns == ["age", *COLUMNS]
    integers = ["tokens", "episodes", "missing", "non_finite"]
    assert table.schema == {
        "age": pl.Int32,
        **{name: pl.Int64 if name in integers else pl.Float64 for name in COLUMNS},
    }
    # k3 is 0, 2 - ln 2 - 1 and 1/2 + ln 2 - 1; both episodes are drawn twice over often enough
    # for the interval to reach from the one's mean to the other's.
    expected = {
        "age": 0,
        "tokens": 3,
        "episodes": 2,
        "missing": 0,
        "non_finite": 0,
        "mean_log_ratio": 0.0,
        "mean_log_ratio_low": -LN2,
        "mean_log_ratio_high": LN2 / 2,
        "mismatch_kl": 0.5 / 3,
        "mismatch_kl_low": (1 - LN2) / 2,
        "mismatch_kl_high": LN2 - 0.5,
        "mismatch_k1": 0.0,
        "mismatch_k2": LN2**2 / 3,
        "episode_mismatch_kl": LN2 / 4,
        "outside_clip": 2 / 3,
        "ess_ratio": 3.5**2 / (3 * 5.25),
        "kl_floor": 1 / 24,  # of whole numbers in the one stream alone
        "trainer_mismatch_kl": 0.2,
    }
    (row,) = table.to_dicts()
    for q, w in ((1, 0.5), (5, 0.5), (50, 1.0), (95, 2.0), (99, 2.0)):
        assert row.pop(f"importance_ratio_p{q:02}") == pytest.approx(w, rel=1e-4)
    assert row == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_ages_apart_and_in_order() -> None:
    """A negative age is an age; tokens without one stand last, and none is lost."""
    tokens = ratios(("a", 3, 2.0), ("a", None, 4.0), ("b", -2, 1.0), ("b", 3, 2.0), ("b", None, 4))
    table = ta.mismatch_by_age(tokens)
    assert table.select("age", "tokens", "episodes").rows() == [(-2, 1, 1), (3, 2, 2), (None, 2, 2)]
    assert table["mean_log_ratio"].to_list() == pytest.approx([0, LN2, 2 * LN2])


def test_what_cannot_be_compared_is_counted_and_left_out() -> None:
    tokens = frame(
        ("a", 0, -1.5, -1.5),
        ("a", 0, None, -1.5),
        ("a", 0, -1.5, None),
        ("b", 0, -1.5, -INF),  # a ratio of 0, and yet no log of it
        ("b", 0, -INF, -1.5),
        ("b", 0, -INF, -INF),
        ("b", 0, math.nan, -1.5),
        ("b", 0, -400.0, -1.5),  # a ratio whose square is too large
        ("c", 1, None, None),
        ("c", 1, -INF, -1.5),
    ).with_columns(trainer_mismatch_kl=pl.Series([None] * 8 + [0.5, None], dtype=pl.Float32))
    fresh, old = ta.mismatch_by_age(tokens).to_dicts()
    counts = ("tokens", "episodes", "missing", "non_finite")
    assert [fresh[name] for name in counts] == [1, 1, 2, 5]
    assert [old[name] for name in counts] == [0, 0, 1, 1]
    for name in ("mean_log_ratio", "mismatch_kl", "mismatch_k2", "episode_mismatch_kl"):
        assert fresh[name] == 0
    assert fresh["ess_ratio"] == fresh["importance_ratio_p01"] == 1
    left = {name for name in COLUMNS if name not in counts and old[name] is not None}
    assert left == {"trainer_mismatch_kl"}
    assert old["trainer_mismatch_kl"] == 0.5


def test_one_episode_has_no_interval() -> None:
    table = ta.mismatch_by_age(ratios(("a", 0, 1.0), ("a", 0, 2.0), ("a", 1, 2.0), ("b", 1, 3.0)))
    assert table.select(INTERVALS).null_count().row(0) == (1,) * 4
    assert table.row(0, named=True)["mean_log_ratio_low"] is None
    # An episode without a comparable token is none.
    table = ta.mismatch_by_age(frame(("a", 0, -1.0, -1.0), ("b", 0, -1.0, None)))
    assert table.select(INTERVALS).null_count().row(0) == (1,) * 4


def test_a_probability_of_nothing() -> None:
    """A trainer's logprob as low as a mask's fill is a ratio of 0, at the low end."""
    tokens = frame(("a", 0, -1.5, -1e30), ("a", 0, -1.5, -1.5), ("a", 1, -1.5, -1e30))
    some, all_of_them = ta.mismatch_by_age(tokens).to_dicts()
    assert [some[f"importance_ratio_p{q}"] for q in ("01", "50", "95")] == [0, 0, 1]
    assert (some["ess_ratio"], all_of_them["ess_ratio"]) == (0.5, None)


def test_the_clip_is_the_callers_to_say() -> None:
    tokens = ratios(("a", 0, 0.5), ("a", 0, 1.0), ("a", 0, 2.0), ("a", 0, 3.0))
    for clip, outside in (((0.8, 1.2), 0.75), ((0.4, 2.5), 0.25), ((0.0, 2.5), 0.25)):
        assert ta.mismatch_by_age(tokens, clip=clip)["outside_clip"].item() == outside


def test_a_quantile_is_the_smallest_ratio_that_enough_tokens_do_not_exceed() -> None:
    tokens = ratios(*(("a", 0, 1 + number / 100) for number in range(100)))
    (row,) = ta.mismatch_by_age(tokens).to_dicts()
    found = [row[f"importance_ratio_p{q:02}"] for q in (1, 5, 50, 95, 99)]
    assert found == pytest.approx([1.0, 1.04, 1.49, 1.94, 1.98], rel=1e-4)


def test_further_groups() -> None:
    tokens = ratios(("a", 0, 2.0), ("b", 0, 4.0), ("c", 1, 1.0), ("d", 0, 1.0)).with_columns(
        env=pl.Series(["x", "y", "x", None])
    )
    table = ta.mismatch_by_age(tokens, by=["env"])
    assert table.select("env", "age", "tokens").rows() == [
        ("x", 0, 1), ("x", 1, 1), ("y", 0, 1), (None, 0, 1),
    ]  # fmt: skip
    assert table["mean_log_ratio"].to_list() == pytest.approx([LN2, 0, 2 * LN2, 0])
    assert_frame_equal(ta.mismatch_by_age(tokens, by=["env", "age", "env"]), table)


# --- what is wrong --------------------------------------------------------------------------------


def test_no_logprobs_of_a_trainer(tmp_path: Path) -> None:
    said = "no sampled token has both a logprob and a trainer_logprob"
    path = tmp_path / "traces.jsonl"
    node = {"sampled": True, "mask": [True] * 2, "logprobs": [-1.0, -2.0]}
    write_lines(path, [{"id": "t", "nodes": [node]}])
    with pytest.raises(ta.TraceError, match=f"{path}: {said}.*trainer_logprobs"):
        ta.mismatch_by_age(path, step=1)
    for tokens in (frame(), frame(("a", 0, -1.0, None)), frame(("a", 0, -1.0, -INF))):
        with pytest.raises(ta.TraceError, match=f"the tokens: {said}"):
            ta.mismatch_by_age(tokens)
    untyped = pl.DataFrame(
        {"episode_id": ["a"], "age": [0], "logprob": [-1.0], "trainer_logprob": [None]}
    )
    with pytest.raises(ta.TraceError, match=said):
        ta.mismatch_by_age(untyped)


def test_a_table_that_lacks_columns() -> None:
    tokens = frame(("a", 0, -1.0, -1.0))
    with pytest.raises(ValueError, match=r"lacks episode_id, trainer_logprob; it has age, logprob"):
        ta.mismatch_by_age(tokens.select("age", "logprob"))
    with pytest.raises(ValueError, match="lacks env"):
        ta.mismatch_by_age(tokens, by=["env"])
    with pytest.raises(ValueError, match="no column 'length' to group by"):
        ta.mismatch_by_age(tokens, by=["length"])


@pytest.mark.parametrize("lazy", [False, True])
def test_options_of_reading_are_for_what_is_read(lazy: bool) -> None:
    tokens = frame(("a", 0, -1.0, -1.0))
    with pytest.raises(ValueError, match="quiet, step: only for a source that has to be read"):
        ta.mismatch_by_age(tokens.lazy() if lazy else tokens, quiet=True, step=3)


# --- against plain loops --------------------------------------------------------------------------


def assert_same_mismatch(
    found: pl.DataFrame, expected: Sequence[Metrics], by: Sequence[str] = ()
) -> None:
    """Row for row, in order: counts exactly, figures to 1e-9, quantiles to 0.01%."""
    keys = [*dict.fromkeys([*by, "age"])]
    assert found.columns == [*keys, *COLUMNS]
    assert found.height == len(expected)
    for ours, theirs in zip(found.to_dicts(), expected, strict=True):
        assert set(theirs) == {*keys, *FIGURES}
        for name, value in theirs.items():
            rel = 1e-4 if name.startswith("importance_ratio") else 1e-9
            wanted = pytest.approx(value, rel, 1e-9) if isinstance(value, float) else value
            assert ours[name] == wanted, (name, ours[name], value)
        for figure in ("mean_log_ratio", "mismatch_kl"):
            low, high = ours[f"{figure}_low"], ours[f"{figure}_high"]
            assert (low is None) == (high is None) == (ours["episodes"] < 2)
            if low is not None:
                assert low <= high


@few
@given(stored_records(), st.sampled_from([[], ["step"], ["env"], ["step", "env"], ["agent"]]))
def test_of_random_records(stored: list[Stored], by: list[str]) -> None:
    rows = ref.token_rows(stored)
    expected = ref.mismatch_rows(rows, by)
    with folder() as root:
        write_steps(root, stored)
        if any(row["tokens"] for row in expected):
            found = ta.mismatch_by_age(root, by)
            assert_same_mismatch(found, expected, by)
        else:
            with pytest.raises(ta.TraceError, match="trainer_logprob"):
                ta.mismatch_by_age(root, by)


values = st.sampled_from(
    [None, 0.0, -0.5, -1.25, -2.3456, -7.25, -30.0, -400.0, -1e30, -INF, math.nan, -math.pi]
)
numbers = st.integers(0, 2**32 - 1)
tokens_in_memory = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from([0, 1, 5, -1, None]),
        st.one_of(st.just(-1.0), values),
        st.one_of(st.just(-1.5), values),
        st.sampled_from([None, 0.25, 0.5]),
    ),
    min_size=1,
    max_size=40,
)


def token_row(
    episode: str, age: int | None, engine: float | None, trainer: float | None, kl: float | None
) -> TokenRow:
    return TokenRow(
        step=1,
        training_version=0,
        kind=None,
        subset=None,
        shipped=None,
        env=None,
        group_id=None,
        episode_id=episode,
        has_run=False,
        policy_start=None,
        policy_end=None,
        index=0,
        age=age,
        logprob=engine,
        trainer_logprob=trainer,
        trainer_mismatch_kl=kl,
    )


@few
@given(tokens_in_memory, numbers)
def test_of_any_values_and_in_any_pieces(tokens: list[Any], seed: int) -> None:
    """Infinite, absent and extreme logprobs; and the order of the pieces does not matter."""
    whole = frame(*(token[:4] for token in tokens)).with_columns(
        trainer_mismatch_kl=pl.Series([token[4] for token in tokens], dtype=pl.Float32)
    )
    table = tallied([whole]).table()
    assert_same_mismatch(table, ref.mismatch_rows([token_row(*token) for token in tokens]))
    rows = list(range(whole.height))
    Random(seed).shuffle(rows)
    in_pieces = tallied([whole[row] for row in rows]).table()
    assert_frame_equal(in_pieces, table, rel_tol=1e-9, abs_tol=1e-9)


def test_many_pieces_of_many_episodes() -> None:
    """More pieces than are kept before they are added up, intervals and trend among the rest."""
    tokens = ta.scan_tokens(DATA / "real-dump").head(6_000).collect()
    rng = np.random.default_rng(0)
    tokens = tokens[rng.permutation(tokens.height)]
    whole = tallied([tokens], ["env"])
    pieces = tallied(list(tokens.iter_slices(40)), ["env"])
    assert_frame_equal(pieces.table(), whole.table(), rel_tol=1e-9, abs_tol=1e-12)
    one, other = pieces.trend(), whole.trend()
    assert one is not None
    assert other is not None
    assert one == pytest.approx(other, rel=1e-9)


# --- real dumps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "kl_floor"),
    [
        # Both streams to 4 decimals; of the exports' 6 decimals float32 keeps too little to tell.
        ("real-dump", 1e-8 / 12),
        ("real-dump-steps", 1e-8 / 24),
    ],
)
def test_figures_of_the_real_dumps(layout: str, kl_floor: float) -> None:
    table = ta.mismatch_by_age(DATA / layout)
    assert_frame_equal(ta.mismatch_by_age(ta.scan_tokens(DATA / layout)), table, rel_tol=1e-9)
    figures = json.loads((DATA / layout / "expected.json").read_text())["mismatch_by_age"]
    assert [str(age) for age in table["age"]] == sorted(figures)
    for row in table.to_dicts():
        expected = figures[str(row["age"])]
        assert row["tokens"] == expected["tokens"]
        # Stored logprobs are rounded to 4 decimals, the expected figures are of unrounded ones.
        assert row["mean_log_ratio"] == pytest.approx(expected["mean_log_ratio"], abs=1e-6)
        assert row["mismatch_kl"] == pytest.approx(expected["mismatch_kl"], rel=3e-4)
        assert row["trainer_mismatch_kl"] == pytest.approx(expected["mismatch_kl"], rel=3e-4)
        assert row["kl_floor"] == pytest.approx(kl_floor)
        assert (row["missing"], row["non_finite"]) == (0, 0)


# --- the floor ------------------------------------------------------------------------------------


def compared(
    engine: NDArray[np.float64], trainer: NDArray[np.float64], dtype: Any = pl.Float32
) -> Metrics:
    """The figures of two streams of logprobs."""
    tokens = pl.DataFrame({"logprob": engine, "trainer_logprob": trainer}).cast(dtype)
    tokens = tokens.with_columns(episode_id=pl.lit("a"), age=pl.lit(0, pl.Int32))
    return ta.mismatch_by_age(tokens).row(0, named=True)


@pytest.mark.parametrize("dtype", [pl.Float32, pl.Float64])
@pytest.mark.parametrize("decimals", [0, 1, 2, 3, 4, 5])
def test_the_floor_is_of_the_streams_decimals(decimals: int, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    engine, trainer = -rng.exponential(3, (2, 5_000))
    of_one = 10.0 ** (-2 * decimals) / 24
    rounded = np.round(engine, decimals), np.round(trainer, decimals)
    assert compared(*rounded, dtype)["kl_floor"] == pytest.approx(2 * of_one)
    assert compared(rounded[0], trainer, dtype)["kl_floor"] == pytest.approx(of_one)
    assert compared(engine, rounded[1], dtype)["kl_floor"] == pytest.approx(of_one)
    assert compared(engine, trainer, dtype)["kl_floor"] == 0
    # One value that is not rounded says that none is meant to be.
    but_one = np.append(rounded[0], -1 / 3)
    assert compared(but_one, np.append(trainer, 0), dtype)["kl_floor"] == 0


def test_zeros_tell_of_no_rounding() -> None:
    """An engine that is sure of every token logs 0 to any number of decimals."""
    zeros = np.zeros(4)
    assert compared(zeros, zeros)["kl_floor"] == 0
    assert compared(zeros, zeros - [0, 0, 0, 0.0001])["kl_floor"] == pytest.approx(1e-8 / 24)


def test_rounding_adds_the_floor() -> None:
    """Two streams that are all but equal, before and after they are rounded."""
    rng = np.random.default_rng(2)
    engine = -rng.uniform(0, 8, 200_000)
    # As far apart as the grid is fine: the errors of the two are independent.
    trainer = engine + rng.normal(0, 1e-4, 200_000)
    before = compared(engine, trainer, pl.Float64)
    after = compared(np.round(engine, 4), np.round(trainer, 4), pl.Float64)
    assert before["kl_floor"] == 0
    assert after["kl_floor"] == pytest.approx(1e-8 / 12)
    added = after["mismatch_kl"] - before["mismatch_kl"]
    assert added == pytest.approx(after["kl_floor"], rel=0.05)


# --- intervals ------------------------------------------------------------------------------------

MEAN, OF_EPISODES, OF_TOKENS = 0.02, 0.1, 0.1


def clustered(
    rng: np.random.Generator, episodes: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Log ratios of episodes of unequal lengths, which differ as much as their tokens do."""
    lengths = rng.integers(10, 60, episodes)
    episode = np.repeat(np.arange(episodes), lengths)
    of_episode = rng.normal(0, OF_EPISODES, episodes)[episode]
    return MEAN + of_episode + rng.normal(0, OF_TOKENS, len(episode)), episode


def test_intervals_cover_the_truth() -> None:
    variance = OF_EPISODES**2 + OF_TOKENS**2
    truth = {
        "mean_log_ratio": MEAN,
        "mismatch_kl": math.exp(MEAN + variance / 2) - MEAN - 1,
    }
    covered = dict.fromkeys(truth, 0)
    widths = []
    found = []
    for seed in range(60):
        (row,) = ta.mismatch_by_age(
            drawn(*clustered(np.random.default_rng(seed), 40)), seed=seed
        ).to_dicts()
        for name, value in truth.items():
            covered[name] += row[f"{name}_low"] <= value <= row[f"{name}_high"]
        widths.append(row["mean_log_ratio_high"] - row["mean_log_ratio_low"])
        found.append(row["mean_log_ratio"])
    assert min(covered.values()) >= 48, covered
    # And they are no wider than the figure is uncertain.
    assert np.mean(widths) == pytest.approx(2 * 1.96 * np.std(found), rel=0.3)


def test_intervals_know_that_tokens_are_not_independent() -> None:
    values, episode = clustered(np.random.default_rng(7), 60)
    (row,) = ta.mismatch_by_age(drawn(values, episode)).to_dicts()
    (alone,) = ta.mismatch_by_age(drawn(values, np.arange(len(values)))).to_dicts()
    for name in ("mean_log_ratio", "mismatch_kl"):
        assert row[name] == pytest.approx(alone[name])
        wide, narrow = (r[f"{name}_high"] - r[f"{name}_low"] for r in (row, alone))
        assert wide > 2 * narrow


def test_intervals_are_of_their_seed_and_confidence() -> None:
    tokens = drawn(*clustered(np.random.default_rng(3), 30))
    table = ta.mismatch_by_age(tokens)
    assert_frame_equal(ta.mismatch_by_age(tokens, seed=0), table, check_exact=True)
    other = ta.mismatch_by_age(tokens, seed=1)
    assert other.select(FIGURES).equals(table.select(FIGURES))
    assert not other.select(INTERVALS).equals(table.select(INTERVALS))
    (row,), (sure,) = table.to_dicts(), ta.mismatch_by_age(tokens, confidence=0.5).to_dicts()
    for name in ("mean_log_ratio", "mismatch_kl"):
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        assert low < sure[f"{name}_low"] < sure[f"{name}_high"] < high


def test_an_interval_leaves_as_much_below_as_above() -> None:
    samples = np.random.default_rng(0).permutation(201) / 2.0
    for confidence, ends in ((0.9, (5, 95)), (0.95, (2.5, 97.5)), (0.5, (25, 75))):
        assert interval(samples, confidence) == pytest.approx(ends)


@pytest.mark.parametrize("episodes", [1_001, 2_500, 4_000])
def test_lots_of_episodes_give_the_interval_of_single_ones(episodes: int) -> None:
    values, episode = clustered(np.random.default_rng(11), episodes)
    (row,) = ta.mismatch_by_age(drawn(values, episode)).to_dicts()
    sums, lengths = np.bincount(episode, values), np.bincount(episode)
    drawn_anew = np.random.default_rng(12).integers(0, episodes, (1_000, episodes))
    means = sums[drawn_anew].sum(axis=1) / lengths[drawn_anew].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    found = row["mean_log_ratio_low"], row["mean_log_ratio_high"]
    assert found == pytest.approx((low, high), abs=0.15 * (high - low))


def test_lots_lose_nothing() -> None:
    sums = np.random.default_rng(0).random((2_345, 2))
    totals = resampled(sums, np.random.default_rng(1), samples=400)
    assert totals.shape == (400, 2)
    # 2345 rows by chance: their total is the table's, give or take what chance adds.
    error = math.sqrt(2_345 / 12) / math.sqrt(400)
    assert totals.mean(axis=0) == pytest.approx(sums.sum(axis=0), abs=5 * error)
    ones = resampled(np.ones((3_000, 1)), np.random.default_rng(1), samples=5)
    assert ones.tolist() == [[3_000.0]] * 5


# --- the trend ------------------------------------------------------------------------------------


def test_the_slope_of_a_line_through_all_tokens() -> None:
    rng = np.random.default_rng(5)
    age = rng.integers(-1, 6, 400)
    tokens = drawn(rng.normal(0, 0.1, 400) * np.sqrt(age + 2), rng.integers(0, 20, 400))
    tokens = tokens.with_columns(age=pl.Series(age, dtype=pl.Int32))
    r = tokens["trainer_logprob"].to_numpy()
    line = np.polyfit(age, np.exp(r) - r - 1, 1)
    without_age = frame(("x", None, -1.0, -9.0), ("y", 3, -1.0, None))
    trend = tallied([tokens, without_age]).trend()
    assert trend is not None
    assert trend.slope == pytest.approx(line[0])
    assert trend.low < trend.slope < trend.high
    assert trend == tallied([tokens, without_age]).trend(seed=0)
    other = tallied([tokens]).trend(confidence=0.5, seed=1)
    assert other is not None
    assert trend.low < other.low < other.high < trend.high


def test_where_there_is_no_trend() -> None:
    one_age = ratios(("a", 2, 1.0), ("b", 2, 2.0), ("b", 2, 1.5))
    one_episode = ratios(("a", 0, 1.0), ("a", 1, 2.0))
    no_age = ratios(("a", None, 1.0), ("b", None, 2.0))
    one_age_compared = frame(("a", 0, -1.0, -1.0), ("b", 0, -1.0, -2.0), ("b", 1, -1.0, None))
    for tokens in (one_age, one_episode, no_age, one_age_compared):
        assert tallied([tokens]).trend() is None


@pytest.fixture(scope="module")
def capture() -> pl.DataFrame:
    columns = ["episode_id", "age", "logprob", "trainer_logprob"]
    return ta.scan_tokens(DATA / "capture", columns, quiet=True).collect()


def test_mismatch_of_the_capture_grows_with_age(capture: pl.DataFrame) -> None:
    trend = tallied([capture]).trend(confidence=0.99)
    assert trend is not None
    assert 0 < trend.low < trend.slope < trend.high


@pytest.mark.parametrize("seed", range(5))
def test_shuffled_ages_show_no_trend(capture: pl.DataFrame, seed: int) -> None:
    shuffled = capture.with_columns(pl.col("age").shuffle(seed=seed))
    trend = tallied([shuffled]).trend(confidence=0.99)
    assert trend is not None
    assert trend.low < 0 < trend.high
