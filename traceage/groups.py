"""What tokens can be grouped by: the columns of the spans table, and bins of where a token stands.

Two groups are derived, both in bins that double: 0-31, 32-63, 64-127, 128-255, ... A bin is named
by the first number in it.

- `index_bin`: the place of a token in its completion. Runs are cut where a bin ends, so that there
  is no row a token. A completion counts where its first token stands; what has no token stands in
  the first bin.
- `completion_bin`: how many sampled tokens the completion has; null for what has no completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from traceage.schema import SPANS

FIRST_BIN = 32

DERIVED: dict[str, tuple[str, ...]] = {
    "index_bin": ("start", "end", "length"),
    "completion_bin": ("completion_tokens",),
}
"""The derived groups, and the columns that each comes from."""


def check_groups(by: Iterable[str]) -> None:
    """Raise `ValueError` for a group that there is not."""
    for name in by:
        if name not in SPANS and name not in DERIVED:
            raise ValueError(
                f"no column {name!r} to group by; there are {', '.join([*SPANS, *DERIVED])}"
            )


def sources_of(by: Iterable[str]) -> list[str]:
    """The columns of the spans table that groups come from."""
    return [source for name in by for source in DERIVED.get(name, (name,))]


def with_groups(spans: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """`spans` with the derived groups of `by` as Int32 columns, runs cut at the ends of bins.

    >>> import polars as pl
    >>> spans = pl.DataFrame({"start": [0, 30], "end": [30, 70], "length": [30, 40]})
    >>> with_groups(spans, ["index_bin"]).rows()
    [(0, 30, 30, 0), (30, 32, 2, 0), (32, 64, 32, 32), (64, 70, 6, 64)]
    """
    if "index_bin" in by:
        spans = _cut(spans)
    if "completion_bin" in by:
        spans = spans.with_columns(bin_of(pl.col("completion_tokens")).alias("completion_bin"))
    return spans


def bin_of(number: pl.Expr) -> pl.Expr:
    """The first number of the bin that holds a number: Int32.

    >>> import polars as pl
    >>> pl.DataFrame({"n": [0, 31, 32, 1000]}).select(bin=bin_of(pl.col("n")))["bin"].to_list()
    [0, 0, 32, 512]
    """
    power = 31 - number.clip(1).cast(pl.UInt32).bitwise_leading_zeros().cast(pl.Int32)
    return pl.when(number < FIRST_BIN).then(0).otherwise(2**power).cast(pl.Int32)


def _cut(spans: pl.DataFrame) -> pl.DataFrame:
    """One row a run and bin."""
    last = pl.max_horizontal(pl.col("end") - 1, "start")
    ends = spans.select(first=bin_of(pl.col("start")), last=bin_of(last)).fill_null(0).to_numpy()
    # In numbers of bins: 0 for the first, one more for each doubling.
    first, last_ = (np.log2(np.maximum(e, FIRST_BIN // 2)).astype(np.int64) for e in ends.T)
    counts = last_ - first + 1
    row = np.repeat(np.arange(spans.height), counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    lower = 2 ** (first[row] + nth)
    cut = spans[row].with_columns(
        pl.Series("index_bin", np.where(lower < FIRST_BIN, 0, lower), pl.Int32),
        pl.Series(":upper", 2 * lower, pl.Int32),
    )
    return (
        cut.with_columns(
            start=pl.max_horizontal("start", "index_bin"), end=pl.min_horizontal("end", ":upper")
        )
        .with_columns(length=pl.col("end") - pl.col("start"))
        .drop(":upper")
    )
