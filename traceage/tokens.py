"""Spans -> a row a token, at the speed of memory.

A run of tokens is a value and a length, which is what Arrow calls run-end encoding: decoding it
fills each column with runs of one value, without an index in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from traceage.ages import age
from traceage.workers import available_cores

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_TOKENS = 1 << 18
"""Tokens that are numbered at a time, so that they stay in the processor's cache."""

WORTH_THREADS = 1 << 20


def explode(spans: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """A row a token of `spans`, in their order.

    Args:
        spans: a frame with `length` and, of its own or for what is derived, the columns named:
            `index` (Int32, the place among the sampled tokens of the node) needs `start`; `age`
            (Int32) is computed from `training_version` and `version` where it is not a column.
        columns: what the result holds, in this order, of the types they have in `spans`.

    Runs of length 0 give no row.

    >>> import polars as pl
    >>> spans = pl.DataFrame({"start": [0, 2], "length": [2, 1], "training_version": [7, 7],
    ...                       "version": [5, None]})
    >>> explode(spans, ["index", "version", "age"]).rows()
    [(0, 5, 2), (1, 5, 2), (2, None, None)]
    """
    if "age" in columns and "age" not in spans.columns:
        spans = spans.with_columns(age())
    if (spans["length"] == 0).any():
        spans = spans.filter(pl.col("length") > 0)
    lengths = spans["length"].to_numpy().astype(np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    starts = spans["start"].to_numpy() if "index" in columns else None

    # Strings are gathered: a view of 16 bytes each, where decoding would copy their text.
    texts = [name for name in columns if name != "index" and not _fixed_width(spans[name])]
    row = _fill(pl.Series(np.arange(spans.height, dtype=np.uint32)), ends) if texts else None

    def column(name: str) -> pl.Series:
        if name == "index":
            assert starts is not None
            return pl.Series(name, _numbers(starts, lengths, ends, total))
        if name in texts:
            assert row is not None
            return spans[name].gather(row).alias(name)
        return _fill(spans[name], ends).alias(name)

    made = _in_threads(column, columns, total)
    return pl.DataFrame(made) if made else pl.DataFrame(height=total)


def _fixed_width(values: pl.Series) -> bool:
    return values.dtype.is_numeric() or values.dtype == pl.Boolean


def _fill(values: pl.Series, ends: NDArray[np.int64]) -> pl.Series:
    import pyarrow as pa
    import pyarrow.compute as pc

    runs: Any = pa.RunEndEncodedArray.from_arrays(pa.array(ends), values.to_arrow())
    return pl.Series(pl.from_arrow(pc.run_end_decode(runs)))


def _numbers(
    starts: NDArray[np.int32], lengths: NDArray[np.int64], ends: NDArray[np.int64], total: int
) -> NDArray[np.int32]:
    """`start, start + 1, ...` of each run, one after the other."""
    numbers = np.empty(total, np.int32)
    ahead = (starts - (ends - lengths)).astype(np.int32)
    first = 0
    while first < len(ends):
        begin = int(ends[first] - lengths[first])
        last = max(int(np.searchsorted(ends, begin + BLOCK_TOKENS, "right")), first + 1)
        end = int(ends[last - 1])
        out = numbers[begin:end]
        out[:] = np.repeat(ahead[first:last], lengths[first:last])
        out += np.arange(begin, end, dtype=np.int32)
        first = last
    return numbers


def _in_threads(
    make: Callable[[str], pl.Series], names: Sequence[str], total: int
) -> list[pl.Series]:
    workers = min(len(names), available_cores())
    if total < WORTH_THREADS or workers < 2:
        return [make(name) for name in names]
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(make, names))
