"""Spans -> how stale each batch was: the `off_policy/*` figures by step or any other group.

Token figures come from the age counts. Episode figures follow prime-rl's own log: for a batch
trained on version `v` and an episode generated while policies `start` to `end` were live,
`total = max(0, v - start)`, of which `in_flight = min(total, max(0, end - start))` passed while it
was generated and `in_queue = total - in_flight` while it waited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import polars as pl

from traceage.ages import age, completions, field
from traceage.counts import (
    QUANTILES,
    Weighting,
    age_figures,
    merge_counts,
    read_batches,
    starts_completion,
    tokens,
)
from traceage.errors import TraceError
from traceage.groups import check_groups, sources_of, with_groups
from traceage.schema import COUNT
from traceage.spans import DEFAULT_LABEL, LabelReader

TOKEN_FIGURES = ("mean", "max", "min", *(f"p{q}" for q in QUANTILES))
EPISODE_FIGURES = {
    "total": "off_policy",
    "in_flight": "off_policy/in_flight",
    "in_queue": "off_policy/in_queue",
}

_READ = (
    "training_version",
    "shipped",
    "episode_id",
    "trace_id",
    "node",
    "start",
    "length",
    "label",
    "version",
    "mixed",
    "has_run",
    "policy_start",
    "policy_end",
)
_UNIT = (
    "training_version",
    "shipped",
    "episode_id",
    "trace_id",
    "has_run",
    "policy_start",
    "policy_end",
)


def off_policy_metrics(
    spans: pl.LazyFrame | pl.DataFrame,
    by: Sequence[str] = ("step",),
    weighting: Weighting = "nodes",
) -> pl.DataFrame:
    """One row a group of the spans table, sorted by group.

    Args:
        spans: a spans table, or a selection of it that keeps completions whole. A LazyFrame is
            read in batches, whatever its size.
        by: the columns of the spans table that make a group, or `index_bin` and `completion_bin`
            (see `traceage.groups`).
        weighting: `"nodes"` counts each completion once; `"branches"` once for every training
            sample that holds it.

    Returns:
        The columns of `by`; with `step` among them, `training_version` (null where a group has
        several); then

        - `episodes`, `traces`; `sampled_tokens` = `labelled_tokens` (they carry a version) +
          `default_tokens` + `unlabelled_tokens`; `coverage` = labelled / sampled;
        - `not_shipped`: episodes that no batch took, by the step at which they arrived (null where
          the layout does not tell);
        - `mixed_nodes`: completions with more than one label, of `sampled_nodes`;
        - `off_policy/token/{mean,max,min,p50,p95,p99}`: age of the labelled tokens, in policy
          versions. A quantile is the smallest age that at least that share does not exceed;
        - `off_policy/token/in_flight/{mean,max}`: `policy_end - version`, the updates that came
          after a token was sampled and before its episode was done;
          `off_policy/token/in_queue/{mean,max}`: `training_version - policy_end`, those that came
          while the episode waited. Over the labelled tokens of episodes that tell their policies,
          where the two add up to the age;
        - `off_policy/{mean,max}`, `off_policy/in_flight/...`, `off_policy/in_queue/...`: episode
          staleness, in policy versions, over the episodes whose record has a `run`.

        A figure that does not exist is null.

    >>> import traceage as ta
    >>> spans = ta.scan_spans("data/real-dump")
    >>> off_policy_metrics(spans).select("step", "sampled_tokens", "off_policy/token/max").head(2)
    shape: (2, 3)
    ┌──────┬────────────────┬──────────────────────┐
    │ step ┆ sampled_tokens ┆ off_policy/token/max │
    │ ---  ┆ ---            ┆ ---                  │
    │ i32  ┆ i64            ┆ i32                  │
    ╞══════╪════════════════╪══════════════════════╡
    │ 1    ┆ 4151           ┆ 0                    │
    │ 2    ┆ 5335           ┆ 1                    │
    └──────┴────────────────┴──────────────────────┘
    """
    tally = Tally(by, weighting)
    for batch in read_batches(spans, tally.columns, weighting):
        tally.add(batch)
    return tally.metrics()


class Tally:
    """A pass over a spans table, reduced to what the metrics and the age counts need."""

    def __init__(self, by: Sequence[str] = ("step",), weighting: Weighting = "nodes") -> None:
        check_groups(by)
        self.by = list(by)
        self.weighting = weighting
        self._counts: list[pl.DataFrame] = []
        self._totals: list[pl.DataFrame] = []
        self._waits: list[pl.DataFrame] = []
        self._units: list[pl.DataFrame] = []

    @property
    def columns(self) -> list[str]:
        """The columns of the spans table that a batch has to have."""
        return list(dict.fromkeys([*sources_of(self.by), *_READ]))

    def add(self, batch: pl.DataFrame) -> None:
        """Take up some rows of the spans table."""
        batch = with_groups(batch, self.by).with_columns(age(), tokens(self.weighting))
        aged = batch.filter(pl.col("age").is_not_null(), pl.col("tokens") > 0)
        self._counts.append(self._sum(aged, "age", "tokens"))
        self._totals.append(self._totals_of(batch))
        self._waits.append(self._aggregated(aged.with_columns(**_WAITS_OF_ROWS), _WAITS))
        unit = [pl.col(name).alias(f":{name}") for name in _UNIT]
        self._units.append(batch.select(*self.by, *unit).unique())
        if len(self._counts) >= 64:
            self._counts = [self.counts]
            self._totals = [self.totals]
            self._waits = [self._aggregated(pl.concat(self._waits), _WAITS)]

    @property
    def counts(self) -> pl.DataFrame:
        """The table of `age_counts`."""
        return merge_counts(*self._counts)

    @property
    def totals(self) -> pl.DataFrame:
        """Counts of tokens and completions by group."""
        return self._sum(pl.concat(self._totals), *_TOTALS)

    def metrics(self) -> pl.DataFrame:
        """The table of `off_policy_metrics`."""
        by = self.by
        table = self.totals
        for frame in (self._episodes(), age_figures(self.counts, by), self._token_waits()):
            table = _join(table, frame, by)
        table = table.with_columns(
            pl.when(pl.col("sampled_tokens") > 0)
            .then(pl.col("labelled_tokens") / pl.col("sampled_tokens"))
            .alias("coverage")
        )
        names = dict.fromkeys([*by, *(["training_version"] if "step" in by else []), *COLUMNS])
        table = table.select(*names)
        return table.sort(by, nulls_last=True) if by else table

    def _sum(self, frame: pl.DataFrame, *columns: str) -> pl.DataFrame:
        """`columns` summed by group; a leading `age` is part of the group."""
        keys = [*self.by, *(["age"] if columns[0] == "age" else [])]
        sums = [pl.col(name).sum().cast(COUNT) for name in columns if name != "age"]
        return frame.group_by(keys).agg(sums) if keys else frame.select(sums)

    def _aggregated(self, frame: pl.DataFrame, figures: list[pl.Expr]) -> pl.DataFrame:
        return frame.group_by(self.by).agg(figures) if self.by else frame.select(figures)

    def _token_waits(self) -> pl.DataFrame:
        """The part of the tokens' ages in flight and in queue."""
        waits = self._aggregated(pl.concat(self._waits), _WAITS)
        known = pl.col("waited") > 0
        return waits.select(
            *self.by,
            *(
                figure.alias(f"off_policy/token/{part}/{name}")
                for part in ("in_flight", "in_queue")
                for name, figure in (
                    ("mean", pl.when(known).then(pl.col(part) / pl.col("waited"))),
                    ("max", pl.col(f"{part}_max")),
                )
            ),
        )

    def _totals_of(self, batch: pl.DataFrame) -> pl.DataFrame:
        amount = pl.col("tokens")
        default = pl.col("label") == DEFAULT_LABEL
        labelled = pl.col("version").is_not_null()
        first = starts_completion()
        node = pl.col("branches") if self.weighting == "branches" else pl.lit(1)
        zero = pl.lit(0)
        batch = batch.with_columns(
            sampled_tokens=amount,
            labelled_tokens=pl.when(labelled).then(amount).otherwise(zero),
            default_tokens=pl.when(default).then(amount).otherwise(zero),
            unlabelled_tokens=pl.when(~labelled & ~default.fill_null(False))
            .then(amount)
            .otherwise(zero),
            sampled_nodes=pl.when(first).then(node).otherwise(zero),
            mixed_nodes=pl.when(first & pl.col("mixed")).then(node).otherwise(zero),
        )
        return self._sum(batch, *_TOTALS)

    def _episodes(self) -> pl.DataFrame:
        """Episodes and traces of each group, and how stale the episodes are."""
        by = self.by
        # An episode that no batch took stands there without a trace, to be counted as such.
        counted = pl.col(":trace_id").is_not_null() | pl.col(":shipped").fill_null(True)
        version, start, end = (
            pl.col(f":{n}") for n in ("training_version", "policy_start", "policy_end")
        )
        total = pl.max_horizontal(version - start, 0).fill_null(0)
        in_flight = pl.min_horizontal(total, pl.max_horizontal(end - start, 0)).fill_null(0)
        known = version.is_not_null() & pl.col(":has_run") & counted
        episodes = (
            pl.concat(self._units)
            .unique()
            .with_columns(
                total=pl.when(known).then(total),
                in_flight=pl.when(known).then(
                    pl.when(start.is_null()).then(0).otherwise(in_flight)
                ),
                counted=counted,
                # By any batch, whatever group its other traces are in.
                taken=pl.col(":shipped").fill_null(False).any().over(":episode_id"),
            )
            .group_by(*by, ":episode_id")
            .agg(
                pl.col("counted").any(),
                pl.col(":trace_id").drop_nulls().n_unique().alias("traces"),
                pl.col("taken").any(),
                pl.col(":shipped").is_not_null().any().alias("told"),
                pl.col(":training_version").min().alias("lowest"),
                pl.col(":training_version").max().alias("highest"),
                pl.col("total").max(),
                pl.col("in_flight").max(),
            )
            .with_columns(in_queue=pl.col("total") - pl.col("in_flight"))
        )
        lowest, highest = pl.col("lowest").min(), pl.col("highest").max()
        figures = [
            pl.when(lowest == highest).then(lowest).alias("training_version"),
            pl.col("counted").sum().cast(COUNT).alias("episodes"),
            pl.col("traces").sum().cast(COUNT),
            pl.when(pl.col("told").any())
            .then((pl.col("told") & ~pl.col("taken")).sum())
            .cast(COUNT)
            .alias("not_shipped"),
        ]
        for column, name in EPISODE_FIGURES.items():
            figures += [
                pl.col(column).mean().alias(f"{name}/mean"),
                pl.col(column).max().alias(f"{name}/max"),
            ]
        return episodes.group_by(by).agg(figures) if by else episodes.select(figures)


_WAITS_OF_ROWS = {
    "waited": pl.col("tokens") * pl.col("policy_end").is_not_null(),
    "in_flight": (pl.col("policy_end") - pl.col("version")).cast(COUNT) * pl.col("tokens"),
    "in_queue": (pl.col("training_version") - pl.col("policy_end")).cast(COUNT) * pl.col("tokens"),
    "in_flight_max": pl.col("policy_end") - pl.col("version"),
    "in_queue_max": pl.col("training_version") - pl.col("policy_end"),
}
"""Of the tokens of a row: how many are known to have waited, and their updates in all."""

_WAITS = [
    pl.col("waited", "in_flight", "in_queue").sum().cast(COUNT),
    pl.col("in_flight_max", "in_queue_max").max().cast(pl.Int32),
]

_TOTALS = (
    "sampled_tokens",
    "labelled_tokens",
    "default_tokens",
    "unlabelled_tokens",
    "sampled_nodes",
    "mixed_nodes",
)

COLUMNS = (
    "episodes",
    "traces",
    "sampled_tokens",
    "labelled_tokens",
    "default_tokens",
    "unlabelled_tokens",
    "coverage",
    "not_shipped",
    "mixed_nodes",
    "sampled_nodes",
    *(f"off_policy/token/{figure}" for figure in TOKEN_FIGURES),
    *(
        f"off_policy/token/{part}/{f}"
        for part in ("in_flight", "in_queue")
        for f in ("mean", "max")
    ),
    *(f"{name}/{figure}" for name in EPISODE_FIGURES.values() for figure in ("mean", "max")),
)
"""The metrics of a group, in order."""


def _join(left: pl.DataFrame, right: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    if not by:
        return left.hstack(right)
    return left.join(right, on=by, how="left", nulls_equal=True)


def batch_metrics(
    episodes: Iterable[Any],
    step: int,
    training_version: int | None = None,
    version_pattern: str | None = None,
) -> dict[str, float | int | None]:
    """The `off_policy/*` metrics of one batch, for an orchestrator to log as it ships it.

    Args:
        episodes: the batch's episodes or bare traces, as `verifiers` objects or plain records.
        step: the batch's step.
        training_version: the policy version the batch trains; `step - 1` by default.
        version_pattern: see `scan_spans`.

    Returns:
        `off_policy/token/{mean,max,min,p50,p95,p99}`, `off_policy/token/in_flight/{mean,max}`,
        `off_policy/token/in_queue/{mean,max}` and `off_policy/token/coverage` over the sampled
        tokens of trainable agents, and `off_policy/...`, `off_policy/in_flight/...`,
        `off_policy/in_queue/...` (`mean` and `max` each) over the episodes: the figures that
        `off_policy_metrics` gives for the stored batch. None where there is none.

    Raises:
        TraceError: for spans that do not fit their node and for a label that is no version.

    >>> node = {"sampled": True, "mask": [True] * 4, "weight_versions": [
    ...     {"version": "9", "start": 0, "end": 1}, {"version": "10", "start": 1, "end": 4}]}
    >>> run = {"work": {"policy": {"start": 9, "end": 10}}}
    >>> metrics = batch_metrics([{"run": run, "traces": [{"nodes": [node]}]}], step=12)
    >>> metrics["off_policy/token/mean"], metrics["off_policy/mean"]
    (1.25, 2.0)
    """
    trained = step - 1 if training_version is None else training_version
    read = LabelReader(version_pattern)
    ages: Counter[int] = Counter()
    in_flight: Counter[int] = Counter()
    in_queue: Counter[int] = Counter()
    sampled = 0
    staleness: list[tuple[int, int, int]] = []
    for episode in episodes:
        traces = field(episode, "traces")
        if traces is None:
            traces = [episode]
        run = field(episode, "run")
        policy_end = _policy(run)[1]
        if run is not None:
            staleness.append(_episode_staleness(run, trained))
        for trace in traces:
            if field(field(trace, "agent"), "trainable") is False:
                continue
            for where, runs in completions(trace):
                for start, end, label in runs:
                    sampled += end - start
                    try:
                        version = read(label)
                    except ValueError as error:
                        raise TraceError(
                            f"{where}: {error}; name the labels' form with version_pattern"
                        ) from None
                    if version is not None:
                        ages[trained - version] += end - start
                        if policy_end is not None:
                            in_flight[policy_end - version] += end - start
                            in_queue[trained - policy_end] += end - start
    labelled = sum(ages.values())
    metrics: dict[str, float | int | None] = dict.fromkeys(
        f"off_policy/token/{figure}" for figure in TOKEN_FIGURES
    )
    if labelled:
        ordered = sorted(ages)
        metrics["off_policy/token/mean"] = sum(a * n for a, n in ages.items()) / labelled
        metrics["off_policy/token/max"] = ordered[-1]
        metrics["off_policy/token/min"] = ordered[0]
        for q in QUANTILES:
            below = 0
            for value in ordered:
                below += ages[value]
                if below * 100 >= labelled * q:
                    metrics[f"off_policy/token/p{q}"] = value
                    break
    for name, waited in (("in_flight", in_flight), ("in_queue", in_queue)):
        known = sum(waited.values())
        mean = sum(a * n for a, n in waited.items()) / known if known else None
        metrics[f"off_policy/token/{name}/mean"] = mean
        metrics[f"off_policy/token/{name}/max"] = max(waited, default=None)
    metrics["off_policy/token/coverage"] = labelled / sampled if sampled else None
    for at, name in enumerate(EPISODE_FIGURES.values()):
        values = [one[at] for one in staleness]
        metrics[f"{name}/mean"] = sum(values) / len(values) if values else None
        metrics[f"{name}/max"] = max(values, default=None)
    return metrics


def _policy(run: Any) -> tuple[int | None, int | None]:
    """The first and last policy that was live while an episode was generated."""
    policy = field(field(run, "work"), "policy")
    start, end = field(policy, "start"), field(policy, "end")
    return start, start if end is None else end


def _episode_staleness(run: Any, trained: int) -> tuple[int, int, int]:
    """Total, in flight, in queue, in policy versions; an episode of a frozen policy has none."""
    start, end = _policy(run)
    if start is None or end is None:
        return 0, 0, 0
    total = max(0, trained - start)
    in_flight = min(total, max(0, end - start))
    return total, in_flight, total - in_flight
