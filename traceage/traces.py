"""Spans -> a row a trace, and the age counts of each trace: what is known of whole traces.

From these two small tables come every threshold of every masking policy, ages by reward, and how
many versions a trace holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from traceage.ages import age
from traceage.counts import age_figures, read_batches, starts_completion, tokens
from traceage.schema import COUNT

OF_TRACE = ("step", "training_version", "kind", "subset", "env", "agent", "trainable", "file")
"""The columns of the spans table that make groups of whole traces."""

_READ = (
    "step",
    "training_version",
    "shipped",
    "group_id",
    "episode_id",
    "trace_id",
    "node",
    "start",
    "length",
    "version",
    "has_run",
    "policy_start",
    "reward",
)


def versions_per_trace(spans: pl.LazyFrame | pl.DataFrame) -> pl.DataFrame:
    """How many policy versions the traces hold.

    `spans` is a spans table, or a selection of it that keeps traces whole. Returns a row for each
    number of distinct versions among the labelled tokens of a trace: `versions` (Int64, 0 for
    traces without any), `traces` (Int64), sorted. Traces without tokens are left out, and so is
    what no batch took.

    >>> import traceage as ta
    >>> versions_per_trace(ta.scan_spans("data/real-dump")).rows()
    [(1, 16), (2, 25), (3, 23), (4, 13), (5, 3)]
    """
    return TraceTally.of(spans).versions_per_trace()


def age_by_reward(spans: pl.LazyFrame | pl.DataFrame, quantiles: int = 4) -> pl.DataFrame:
    """Token age by the reward of the trace: do better traces hold older tokens?

    `spans` is a spans table, or a selection of it that keeps traces whole. Traces are cut into
    `quantiles` parts of equally many by their reward; equal rewards stay together, so parts can be
    missing where few rewards are distinct.

    Returns a row a part, sorted: `reward_quantile` (Int32, from 1; null for traces without a
    reward), `reward_min`, `reward_max` (Float64), `traces`, `labelled_tokens` (Int64) and
    `off_policy/token/{mean,max,min,p50,p95,p99}`, as `off_policy_metrics` has them.

    >>> import traceage as ta
    >>> by_reward = age_by_reward(ta.scan_spans("data/capture"))
    >>> by_reward.select("reward_quantile", "traces").rows()
    [(1, 160), (2, 161), (3, 159), (4, 160)]
    """
    return TraceTally.of(spans).age_by_reward(quantiles)


class TraceTally:
    """One pass over a spans table, reduced to a row a trace and to the age counts of each trace."""

    def __init__(self, by: Sequence[str] = ()) -> None:
        for name in by:
            if name not in OF_TRACE:
                raise ValueError(
                    f"{name!r} is no column to group traces by; there are {', '.join(OF_TRACE)}"
                )
        self.by = list(by)
        self._traces: list[pl.DataFrame] = []
        self._ages: list[pl.DataFrame] = []

    @classmethod
    def of(cls, spans: pl.LazyFrame | pl.DataFrame, by: Sequence[str] = ()) -> TraceTally:
        """The tally of a whole table."""
        tally = cls(by)
        for batch in read_batches(spans, tally.columns, "nodes"):
            tally.add(batch)
        return tally

    @property
    def columns(self) -> list[str]:
        """The columns of the spans table that a batch has to have."""
        return list(dict.fromkeys([*self.by, *_READ]))

    def add(self, batch: pl.DataFrame) -> None:
        """Take up some rows of the spans table."""
        batch = batch.filter(
            pl.col("trace_id").is_not_null(), pl.col("shipped").fill_null(True)
        ).select(
            # Ids are long and many: eight bytes tell them apart.
            pl.struct("step", "episode_id", "trace_id").hash(0).alias(":trace"),
            pl.struct("step", "episode_id").hash(0).alias(":episode"),
            pl.when(pl.col("group_id").is_not_null())
            .then(pl.struct("step", "group_id").hash(0))
            .alias(":group"),
            starts_completion().alias("first"),
            tokens("nodes"),
            age(),
            pl.when("has_run")
            .then(pl.max_horizontal(pl.col("training_version") - pl.col("policy_start"), 0))
            .alias("staleness"),
            "reward",
            *(pl.col(name).alias(f"by:{name}") for name in self.by),
        )
        names = [f"by:{name}" for name in self.by]
        self._traces.append(
            batch.group_by(":trace").agg(
                pl.col(":episode", ":group", "reward", *names).first(),
                pl.col("tokens").sum(),
                pl.col("first").sum().cast(COUNT).alias("turns"),
                pl.col("age").max().alias("oldest"),
                pl.col("staleness").max(),
            )
        )
        aged = batch.drop_nulls("age").filter(pl.col("tokens") > 0)
        self._ages.append(aged.group_by(":trace", "age").agg(pl.col("tokens").sum()))

    def traces(self) -> pl.DataFrame:
        """A row a trace that has tokens, in an order that only their ids decide.

        `:trace`, `:episode`, `:group` (keys; no group is null), `reward`, the groups as `by:...`,
        `tokens`, `turns`, `oldest` (the highest age; null without any), `staleness` (of its
        episode).
        """
        # A trace whose runs came in two batches is put together.
        whole = pl.concat(self._traces).group_by(":trace")
        names = [f"by:{name}" for name in self.by]
        traces = whole.agg(
            pl.col(":episode", ":group", "reward", *names).first(),
            pl.col("tokens", "turns").sum(),
            pl.col("oldest", "staleness").max(),
        )
        # In one order, so that the means over traces are the same to the last bit.
        return traces.filter(pl.col("tokens") > 0).sort(":trace")

    def ages(self) -> pl.DataFrame:
        """`:trace`, `age`, `tokens`: the age counts of each trace."""
        return pl.concat(self._ages).group_by(":trace", "age").agg(pl.col("tokens").sum())

    def versions_per_trace(self) -> pl.DataFrame:
        """The table of `versions_per_trace`."""
        # A batch trains one version, so that ages tell versions apart.
        held = self.ages().group_by(":trace").agg(pl.len().alias("versions"))
        traces = self.traces().join(held, on=":trace", how="left")
        versions = pl.col("versions").fill_null(0).cast(COUNT)
        return traces.group_by(versions).agg(pl.len().cast(COUNT).alias("traces")).sort("versions")

    def age_by_reward(self, quantiles: int = 4) -> pl.DataFrame:
        """The table of `age_by_reward`."""
        traces = self.traces()
        reward = pl.col("reward")
        below = [
            (reward > reward.quantile(k / quantiles, "lower")).cast(pl.Int32)
            for k in range(1, quantiles)
        ]
        part = pl.when(reward.is_not_null()).then(1 + pl.sum_horizontal(below)).cast(pl.Int32)
        traces = traces.with_columns(part.alias("reward_quantile"))
        ages = (
            self.ages()
            .join(traces.select(":trace", "reward_quantile"), on=":trace")
            .group_by("reward_quantile", "age")
            .agg(pl.col("tokens").sum())
        )
        table = traces.group_by("reward_quantile").agg(
            reward.min().alias("reward_min"),
            reward.max().alias("reward_max"),
            pl.len().cast(COUNT).alias("traces"),
        )
        table = table.join(
            ages.group_by("reward_quantile").agg(pl.col("tokens").sum().alias("labelled_tokens")),
            on="reward_quantile",
            how="left",
            nulls_equal=True,
        )
        table = table.with_columns(pl.col("labelled_tokens").fill_null(0))
        figures = age_figures(ages, ["reward_quantile"])
        return table.join(figures, on="reward_quantile", how="left", nulls_equal=True).sort(
            "reward_quantile", nulls_last=True
        )
