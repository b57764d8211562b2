"""Tokens -> how far the engine that sampled them is from the trainer, by age.

For a token that the engine sampled with logprob `q` and that the trainer scored with logprob `p`,
the log importance ratio is `r = p - q` and the importance ratio `w = exp(r)`. Everything here is a
mean, a quantile or a count over tokens of one age. Batches of tokens are reduced to a few sums for
each episode and age, and to counts of `r` on a grid of 0.0001: so memory is bounded by the episodes
and not by the tokens, and intervals can come from a bootstrap over episodes, whose tokens are not
independent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Unpack

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceage.errors import TraceError
from traceage.scan import ReadingOptions, scan_tokens
from traceage.schema import COUNT, TOKENS

QUANTILES = (1, 5, 50, 95, 99)
"""Percentages of the importance-ratio quantiles."""

RESAMPLES = 1000
"""Bootstrap samples behind an interval."""

_GRID = 1e-4
_BUNDLES = 1000
"""Independent lots that a bootstrap draws from; where there are more episodes, a lot holds some."""

_SUMS = {
    "tokens": pl.col("r").count().cast(COUNT),
    "missing": pl.col("missing").sum().cast(COUNT),
    "non_finite": pl.col("non_finite").sum().cast(COUNT),
    "r": pl.col("r").sum(),
    "k2": (pl.col("r") ** 2 / 2).sum(),
    "k3": (pl.col("w") - pl.col("r") - 1).sum(),
    "w": pl.col("w").sum(),
    "ww": (pl.col("w") ** 2).sum(),
    "outside": pl.col("outside").sum().cast(COUNT),
    "given": pl.col("trainer_mismatch_kl").cast(pl.Float64).sum(),
    "given_tokens": pl.col("trainer_mismatch_kl").count().cast(COUNT),
}
"""What is kept of an episode's tokens of one age."""


class Trend(NamedTuple):
    """How mismatch KL changes with age: a least-squares line through all tokens."""

    slope: float
    """Mismatch KL a policy version."""
    low: float
    high: float
    """The interval of the slope, from a bootstrap over episodes."""


def mismatch_by_age(
    source: pl.DataFrame | pl.LazyFrame | str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    by: Sequence[str] = (),
    *,
    clip: tuple[float, float] = (0.8, 1.2),
    confidence: float = 0.95,
    seed: int = 0,
    **reading: Unpack[ReadingOptions],
) -> pl.DataFrame:
    """How engine and trainer disagree about the sampled tokens of each age.

    Args:
        source: a tokens table with `age`, `episode_id`, `logprob`, `trainer_logprob` and the
            columns of `by` (and `trainer_mismatch_kl`, where it is wanted), or what `scan_tokens`
            reads.
        by: further columns of the tokens table that make a group.
        clip: the importance ratios that a clipped objective leaves alone.
        confidence: of the intervals.
        seed: of the bootstrap that makes them.
        **reading: see `scan_spans`; only for what has to be read.

    Returns:
        A row a group and age, sorted; tokens without an age make a row with a null age. With
        `r = trainer_logprob - logprob` and `w = exp(r)`:

        - `tokens`: those that both logprobs are known of (Int64); `missing`: one is null;
          `non_finite`: one is infinite or NaN, or `w^2` is too large for a float; both are left
          out of everything else; `episodes`: those with at least one of `tokens`;
        - `mean_log_ratio`: the mean of `r`; `mismatch_kl`: the mean of `w - r - 1` (the k3
          estimator of KL(engine || trainer)); `mismatch_k1`: of `-r`; `mismatch_k2`: of `r^2 / 2`,
          see http://joschu.net/blog/kl-approx.html. Nats a token (Float64);
        - `mean_log_ratio_low`, `..._high`, `mismatch_kl_low`, `..._high`: percentile intervals of a
          bootstrap over episodes; null for fewer than two;
        - `episode_mismatch_kl`: the mean over episodes of each one's own mean;
        - `importance_ratio_p01`, `..._p05`, `..._p50`, `..._p95`, `..._p99`: the smallest `w` that
          at least that share of the tokens does not exceed, to 0.01%;
        - `outside_clip`: share of the tokens whose `w` is outside `clip`;
        - `ess_ratio`: `(sum w)^2 / (tokens * sum w^2)`, the effective sample size as a share; null
          where every `w` is 0;
        - `kl_floor`: the mismatch KL that two equal policies would show because the stored
          logprobs are rounded: half the variance of the rounding, `10^-2d / 12` where both streams
          have `d` decimals; a stream that is not rounded, or is all 0, adds nothing;
        - `trainer_mismatch_kl`: the mean of what the trainer itself logged as mismatch KL, never
          mixed with the recomputed one; null where it logged none.

    Raises:
        ValueError: for a tokens table without the columns.
        TraceError: where no token has a trainer's logprob; and as `scan_tokens`.

    >>> table = mismatch_by_age("data/real-dump")
    >>> table.select("age", "tokens", pl.col("mismatch_kl").round(6)).head(3)
    shape: (3, 3)
    ┌─────┬────────┬─────────────┐
    │ age ┆ tokens ┆ mismatch_kl │
    │ --- ┆ ---    ┆ ---         │
    │ i32 ┆ i64    ┆ f64         │
    ╞═════╪════════╪═════════════╡
    │ 0   ┆ 24717  ┆ 0.000054    │
    │ 1   ┆ 24997  ┆ 0.00011     │
    │ 2   ┆ 12316  ┆ 0.000166    │
    └─────┴────────┴─────────────┘
    """
    tally = MismatchTally(by, clip)
    for batch in mismatch_batches(source, tally.columns, reading):
        tally.add(batch)
    if not tally.anything:
        where = "the tokens" if isinstance(source, (pl.DataFrame, pl.LazyFrame)) else f"{source}"
        raise TraceError(
            f"{where}: no sampled token has both a logprob and a trainer_logprob; a trainer stamps "
            "them on nodes (trainer_logprobs), appends them as annotations of a trace store, or "
            "writes token_exports beside rollouts/"
        )
    return tally.table(confidence, seed)


class MismatchTally:
    """One pass over a tokens table, reduced to what mismatch by age needs."""

    def __init__(self, by: Sequence[str] = (), clip: tuple[float, float] = (0.8, 1.2)) -> None:
        for name in by:
            if name not in TOKENS:
                raise ValueError(f"no column {name!r} to group by; there are {', '.join(TOKENS)}")
        self.by = list(dict.fromkeys([*by, "age"]))
        self.clip = clip
        self.decimals = {"logprob": _Decimals(), "trainer_logprob": _Decimals()}
        self._episodes: list[pl.DataFrame] = []
        self._grid: list[pl.DataFrame] = []

    @property
    def columns(self) -> list[str]:
        """The columns of the tokens table that a batch has to have."""
        read = ["episode_id", "logprob", "trainer_logprob", "trainer_mismatch_kl"]
        return list(dict.fromkeys([*self.by, *read]))

    @property
    def anything(self) -> bool:
        """Whether any token had both logprobs."""
        return any(frame["tokens"].sum() for frame in self._episodes)

    def add(self, batch: pl.DataFrame) -> None:
        """Take up some rows of the tokens table."""
        for name, decimals in self.decimals.items():
            decimals.see(batch[name])
        low, high = self.clip
        engine, trainer = (pl.col(name).cast(pl.Float64) for name in ("logprob", "trainer_logprob"))
        ratio = trainer - engine
        # A trainer's -inf gives a `w` of 0, yet no mean of `r`; and `ess_ratio` squares `w`.
        finite = ratio.is_finite() & (2 * ratio).exp().is_finite()
        kept = batch.select(
            *self.by,
            pl.col("trainer_mismatch_kl"),
            episode=pl.col("episode_id").hash(0),
            missing=ratio.is_null(),
            non_finite=~finite,
            r=pl.when(finite).then(ratio),
        ).with_columns(w=pl.col("r").exp())
        kept = kept.with_columns(outside=(pl.col("w") < low) | (pl.col("w") > high))
        sums = [sum.alias(name) for name, sum in _SUMS.items()]
        self._episodes.append(kept.group_by(*self.by, "episode").agg(sums))
        # Below -1000 every `w` is 0, and cells would leave their type.
        cell = (pl.col("r").clip(-1000) / _GRID).round().cast(pl.Int32).alias("cell")
        grid = kept.drop_nulls("r").group_by(*self.by, cell).agg(pl.len().cast(COUNT).alias("n"))
        self._grid.append(grid)
        if len(self._episodes) >= 64:
            self._episodes, self._grid = [self._by_episode()], [self._by_cell()]

    def _by_episode(self) -> pl.DataFrame:
        keys = [*self.by, "episode"]
        return pl.concat(self._episodes).group_by(keys).agg(pl.col(*_SUMS).sum())

    def _by_cell(self) -> pl.DataFrame:
        return pl.concat(self._grid).group_by(*self.by, "cell").agg(pl.col("n").sum())

    @property
    def kl_floor(self) -> float:
        """See `mismatch_by_age`."""
        return sum(stream.variance for stream in self.decimals.values()) / 2

    def table(self, confidence: float = 0.95, seed: int = 0) -> pl.DataFrame:
        """The table of `mismatch_by_age`."""
        by, n = self.by, pl.col("tokens")
        episodes = self._by_episode().sort(*by, "episode", nulls_last=True)
        there = n > 0

        def mean(name: str) -> pl.Expr:
            return pl.when(n > 0).then(pl.col(name) / n)

        table = (
            episodes.group_by(by, maintain_order=True)
            .agg(
                pl.col(*_SUMS).sum(),
                there.sum().cast(COUNT).alias("episodes"),
                (pl.col("k3") / n).filter(there).mean().alias("episode_mismatch_kl"),
            )
            .select(
                *by,
                "tokens",
                "episodes",
                "missing",
                "non_finite",
                mean("r").alias("mean_log_ratio"),
                mean("k3").alias("mismatch_kl"),
                (-mean("r")).alias("mismatch_k1"),
                mean("k2").alias("mismatch_k2"),
                "episode_mismatch_kl",
                mean("outside").alias("outside_clip"),
                pl.when(pl.col("ww") > 0)
                .then(pl.col("w") ** 2 / (n * pl.col("ww")))
                .alias("ess_ratio"),
                pl.when(n > 0).then(self.kl_floor).alias("kl_floor"),
                pl.when(pl.col("given_tokens") > 0)
                .then(pl.col("given") / pl.col("given_tokens"))
                .alias("trainer_mismatch_kl"),
            )
        )
        intervals = self._intervals(episodes.filter(there), confidence, seed)
        table = table.join(intervals, on=by, how="left", nulls_equal=True)
        table = table.join(self._quantiles(), on=by, how="left", nulls_equal=True)
        return table.select(*by, *COLUMNS).sort(by, nulls_last=True)

    def _intervals(self, episodes: pl.DataFrame, confidence: float, seed: int) -> pl.DataFrame:
        names = {"r": "mean_log_ratio", "k3": "mismatch_kl"}
        bounds: dict[str, list[float | None]] = {
            f"{name}_{end}": [] for name in names.values() for end in ("low", "high")
        }
        keys: list[pl.DataFrame] = []
        rng = np.random.default_rng(seed)
        for part in episodes.partition_by(self.by, maintain_order=True):
            keys.append(part.select(self.by).head(1))
            sums = part.select("tokens", *names).cast(pl.Float64).to_numpy()
            for at, name in enumerate(names.values(), start=1):
                low = high = None
                if part.height > 1:
                    drawn = resampled(sums, rng)
                    low, high = interval(drawn[:, at] / drawn[:, 0], confidence)
                bounds[f"{name}_low"].append(low)
                bounds[f"{name}_high"].append(high)
        ends = pl.DataFrame(bounds, schema=dict.fromkeys(bounds, pl.Float64()))
        return pl.concat([*keys, episodes.select(self.by).head(0)]).hstack(ends)

    def _quantiles(self) -> pl.DataFrame:
        cells = self._by_cell().sort(*self.by, "cell", nulls_last=True)
        share = pl.col("n").cum_sum() * 100
        ratio = (pl.col("cell") * _GRID).exp()
        return cells.group_by(self.by, maintain_order=True).agg(
            ratio.filter(share >= pl.col("n").sum() * q).first().alias(f"importance_ratio_p{q:02}")
            for q in QUANTILES
        )

    def trend(self, confidence: float = 0.95, seed: int = 0) -> Trend | None:
        """The slope of mismatch KL over age; None where tokens have one age, or one episode."""
        n, age = pl.col("tokens").cast(pl.Float64), pl.col("age")
        sums = (
            self._by_episode()
            .filter(pl.col("tokens") > 0, age.is_not_null())
            .group_by("episode")
            .agg(
                n.sum(),
                (age * n).sum().alias("a"),
                (age * age * n).sum().alias("aa"),
                pl.col("k3").sum(),
                (age * pl.col("k3")).sum().alias("ak"),
            )
            .sort("episode")
            .drop("episode")
            .to_numpy()
        )
        if len(sums) < 2:
            return None
        slope = _slope(sums.sum(axis=0)[None])[0]
        drawn = _slope(resampled(sums, np.random.default_rng(seed)))
        if not np.isfinite(slope) or not np.isfinite(drawn).any():
            return None
        low, high = interval(drawn[np.isfinite(drawn)], confidence)
        return Trend(float(slope), low, high)


COLUMNS = (
    "tokens",
    "episodes",
    "missing",
    "non_finite",
    "mean_log_ratio",
    "mean_log_ratio_low",
    "mean_log_ratio_high",
    "mismatch_kl",
    "mismatch_kl_low",
    "mismatch_kl_high",
    "mismatch_k1",
    "mismatch_k2",
    "episode_mismatch_kl",
    *(f"importance_ratio_p{q:02}" for q in QUANTILES),
    "outside_clip",
    "ess_ratio",
    "kl_floor",
    "trainer_mismatch_kl",
)
"""The figures of a group and age, in order."""


class _Decimals:
    """To how many decimals a stream was rounded, judged by every value that was seen."""

    MOST = 5  # float32 cannot tell more of a logprob

    def __init__(self) -> None:
        self._least: int | None = 0
        self._any = False

    def see(self, values: pl.Series) -> None:
        """Take up more of the stream."""
        values = values.cast(pl.Float64)
        # 0 is a multiple of everything: it tells no rounding from another.
        values = values.filter(values.is_finite() & (values != 0))
        self._any |= len(values) > 0
        while self._least is not None:
            rounded = (values * 10**self._least).round() / 10**self._least
            if (rounded.cast(pl.Float32) == values.cast(pl.Float32)).all():
                return
            self._least = self._least + 1 if self._least < self.MOST else None

    @property
    def variance(self) -> float:
        """Of the rounding; 0 where there is none."""
        if self._least is None or not self._any:
            return 0.0
        return float(10 ** (-2 * self._least) / 12)


def mismatch_batches(
    source: pl.DataFrame | pl.LazyFrame | str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    columns: Sequence[str],
    reading: ReadingOptions,
) -> Iterator[pl.DataFrame]:
    """`columns` of a tokens table, or of what is read as one, a batch at a time."""
    if isinstance(source, pl.DataFrame):
        source = source.lazy()
    if not isinstance(source, pl.LazyFrame):
        source = scan_tokens(source, columns, **reading)
    elif reading:
        raise ValueError(f"{', '.join(reading)}: only for a source that has to be read")
    there = source.collect_schema().names()
    lacking = [name for name in columns if name not in there and name != "trainer_mismatch_kl"]
    if lacking:
        raise ValueError(f"the tokens table lacks {', '.join(lacking)}; it has {', '.join(there)}")
    if "trainer_mismatch_kl" not in there:
        source = source.with_columns(trainer_mismatch_kl=pl.lit(None, pl.Float32))
    yield from source.select(columns).collect_batches()


def resampled(
    sums: NDArray[np.float64], rng: np.random.Generator, samples: int = RESAMPLES
) -> NDArray[np.float64]:
    """Bootstrap samples of a total: a row a sample, of the column sums over rows drawn anew.

    With more than a thousand rows, lots of several rows, put together at random, are drawn.

    >>> import numpy as np
    >>> resampled(np.ones((7, 2)), np.random.default_rng(0), samples=3).tolist()
    [[7.0, 7.0], [7.0, 7.0], [7.0, 7.0]]
    """
    if len(sums) > _BUNDLES:
        lots = rng.permutation(len(sums)) % _BUNDLES
        sums = np.stack([np.bincount(lots, column, _BUNDLES) for column in sums.T], axis=1)
    drawn = rng.integers(0, len(sums), (samples, len(sums)))
    return np.stack([column[drawn].sum(axis=1) for column in sums.T], axis=1)


def interval(drawn: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """The percentile interval of bootstrap samples."""
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _slope(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least-squares slopes from rows of tokens, sum of age, of age^2, of KL and of age * KL."""
    n, a, aa, k, ak = sums.T
    spread = n * aa - a * a
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((n * ak - a * k) / np.where(spread > 0, spread, np.nan))
