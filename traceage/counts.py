"""Spans -> how many tokens have each age.

Age is a small integer, so the table of `(group, age) -> tokens` is a sufficient statistic: mean,
extremes, quantiles, histograms and heat maps come from it exactly, and two such tables add up to
the table of both. Nothing here, or after here, ever has a row a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import polars as pl

from traceage.ages import age
from traceage.groups import sources_of, with_groups
from traceage.schema import COUNT

Weighting = Literal["nodes", "branches"]

QUANTILES = (50, 95, 99)
"""Percentages; see `off_policy_metrics`."""

_COMPACT_ROWS = 200_000
"""Partial rows that are kept before they are added up."""


def age_counts(
    spans: pl.LazyFrame | pl.DataFrame,
    by: Sequence[str] = ("step",),
    weighting: Weighting = "nodes",
) -> pl.DataFrame:
    """How many tokens of each group have each age.

    Args:
        spans: a spans table, or any frame with its columns `training_version`, `version`, `length`
            and those of `by`. A LazyFrame is read in batches, whatever its size.
        by: the columns of the spans table that make a group, or `index_bin` and `completion_bin`
            (see `traceage.groups`).
        weighting: `"nodes"` counts a token once; `"branches"` counts it once for every training
            sample that holds its node.

    Returns:
        The columns of `by`, `age` (Int32, signed) and `tokens` (Int64), sorted; only tokens that
        have an age. `merge_counts` adds such tables up.

    >>> import polars as pl
    >>> spans = pl.DataFrame({"step": [3, 3, 3], "training_version": [2, 2, 2],
    ...                       "version": [1, 2, None], "length": [10, 30, 5]})
    >>> age_counts(spans).to_dicts()
    [{'step': 3, 'age': 0, 'tokens': 30}, {'step': 3, 'age': 1, 'tokens': 10}]
    """
    by = list(by)
    needed = [*sources_of(by), "training_version", "version", "length"]
    partial: list[pl.DataFrame] = []
    for batch in read_batches(spans, needed, weighting):
        aged = with_groups(batch, by).with_columns(age(), tokens(weighting)).drop_nulls("age")
        partial.append(aged.group_by(*by, "age").agg(pl.col("tokens").sum()))
        if sum(frame.height for frame in partial) > _COMPACT_ROWS:
            partial = [merge_counts(*partial)]
    return merge_counts(*partial)


def merge_counts(*counts: pl.DataFrame) -> pl.DataFrame:
    """The sum of tables of `age_counts`: the same columns, as if all had been counted at once.

    >>> import polars as pl
    >>> one = pl.DataFrame({"step": [3], "age": [1], "tokens": [10]})
    >>> merge_counts(one, one)["tokens"].to_list()
    [20]
    """
    both = pl.concat(counts, how="vertical_relaxed")
    keys = [name for name in both.columns if name != "tokens"]
    total = both.group_by(keys).agg(pl.col("tokens").sum().cast(COUNT))
    return total.filter(pl.col("tokens") > 0).sort(keys, nulls_last=True)


def age_figures(counts: pl.DataFrame, by: Sequence[str] = ("step",)) -> pl.DataFrame:
    """Mean, extremes and quantiles of the ages of each group of a table of `age_counts`.

    Returns the columns of `by`, one row a group, and `off_policy/token/{mean,max,min,p50,p95,p99}`.

    >>> import polars as pl
    >>> counts = pl.DataFrame({"step": [3, 3], "age": [0, 1], "tokens": [30, 10]})
    >>> age_figures(counts).select("step", "off_policy/token/mean", "off_policy/token/p95").rows()
    [(3, 0.25, 1)]
    """
    by, weight = list(by), pl.col("tokens")
    counts = counts.sort([*by, "age"], nulls_last=True)
    below = weight.cum_sum().over(by) if by else weight.cum_sum()
    total = weight.sum().over(by) if by else weight.sum()
    counts = counts.with_columns(below.alias("below"), total.alias("total"))
    ages = pl.col("age")
    # Whole percentages keep the comparison in integers, hence exact.
    figures = [
        ((ages.cast(COUNT) * weight).sum() / weight.sum()).alias("mean"),
        ages.max().alias("max"),
        ages.min().alias("min"),
        *(
            ages.filter(pl.col("below") * 100 >= pl.col("total") * q).min().alias(f"p{q}")
            for q in QUANTILES
        ),
    ]
    named = [figure.name.prefix("off_policy/token/") for figure in figures]
    return counts.group_by(by).agg(named) if by else counts.select(named)


def tokens(weighting: Weighting) -> pl.Expr:
    """The tokens that a row of the spans table stands for: Int64."""
    length = pl.col("length").cast(COUNT)
    return (length * pl.col("branches") if weighting == "branches" else length).alias("tokens")


def starts_completion() -> pl.Expr:
    """Whether a row of the spans table is the one that starts a completion: Boolean.

    Runs tile a completion, so exactly one of them does.
    """
    return (pl.col("start") == 0) & pl.col("node").is_not_null()


def read_batches(
    spans: pl.LazyFrame | pl.DataFrame, columns: Sequence[str], weighting: Weighting
) -> Iterator[pl.DataFrame]:
    """`columns` of a spans table (and what the weighting needs), a batch at a time.

    There is always at least one batch, so that what is made of no rows has columns.
    Raises `ValueError` for an unknown weighting, `ColumnNotFoundError` for an unknown column.
    """
    check_weighting(weighting)
    columns = list(dict.fromkeys([*columns, *(["branches"] if weighting == "branches" else [])]))
    selected = spans.lazy().select(columns)
    yield pl.DataFrame(schema=selected.collect_schema())
    if isinstance(spans, pl.DataFrame):
        yield spans.select(columns)
    else:
        yield from selected.collect_batches()


def check_weighting(weighting: str) -> None:
    """Raise `ValueError` for a weighting that there is not."""
    if weighting not in ("nodes", "branches"):
        raise ValueError(f"weighting {weighting!r} is neither 'nodes' nor 'branches'")
