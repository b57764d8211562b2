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
    import torch
    from numpy.typing import NDArray

BLOCK_TOKENS = 1 << 15
"""Tokens that are numbered at a time, so that they stay in the processor's cache."""

WORTH_THREADS = 1 << 20

WITHIN_RUNS = ("index", "context_age")
"""Columns that are not one value a run."""


def explode(spans: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """A row a token of `spans`, in their order.

    Args:
        spans: a frame with `length` and, of its own or for what is derived, the columns named:
            `index` (Int32, the place among the sampled tokens of the node) needs `start`; `age`
            (Int32) is computed from `training_version` and `version` where it is not a column, and
            `context_age` (Int32) from these and `context_version`, the lowest version among the
            tokens before the run.
        columns: what the result holds, in this order, of the types they have in `spans`.

    Runs of length 0 give no row.

    >>> import polars as pl
    >>> spans = pl.DataFrame({"start": [0, 2], "length": [2, 1], "training_version": [7, 7],
    ...                       "version": [5, None]})
    >>> explode(spans, ["index", "version", "age"]).rows()
    [(0, 5, 2), (1, 5, 2), (2, None, None)]
    >>> explode(spans.with_columns(context_version=pl.Series([6, 5])), ["context_age"]).rows()
    [(1,), (2,), (2,)]
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
    texts = [name for name in columns if name not in WITHIN_RUNS and not _fixed_width(spans[name])]
    row = _fill(pl.Series(np.arange(spans.height, dtype=np.uint32)), ends) if texts else None

    def column(name: str) -> pl.Series:
        if name == "index":
            assert starts is not None
            return pl.Series(name, _numbers(starts, lengths, ends, total))
        if name == "context_age":
            return _context_ages(spans, lengths, ends)
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


def _context_ages(
    spans: pl.DataFrame, lengths: NDArray[np.int64], ends: NDArray[np.int64]
) -> pl.Series:
    """The age of the oldest token before each; from its second token on, a run sees itself."""
    before, trained = pl.col("context_version"), pl.col("training_version")
    first, later = spans.select(
        first=(trained - before).cast(pl.Int32),
        later=(trained - pl.min_horizontal(before, "version")).cast(pl.Int32),
    )
    return _fill(later, ends).scatter(ends - lengths, first).alias("context_age")


def _numbers(
    starts: NDArray[np.int32], lengths: NDArray[np.int64], ends: NDArray[np.int64], total: int
) -> NDArray[np.int32]:
    """`start, start + 1, ...` of each run, one after the other."""
    numbers = np.empty(total, np.int32)
    begins = ends - lengths
    count = np.arange(BLOCK_TOKENS, dtype=np.int32)
    first = 0
    while first < len(ends):
        begin = int(begins[first])
        last = int(np.searchsorted(ends, begin + BLOCK_TOKENS, "right"))
        if last == first:  # a run longer than a block
            start, end = int(starts[first]), int(ends[first])
            numbers[begin:end] = np.arange(start, start + end - begin, dtype=np.int32)
            first += 1
            continue
        end = int(ends[last - 1])
        ahead = (starts[first:last] - (begins[first:last] - begin)).astype(np.int32)
        shift = np.repeat(ahead, lengths[first:last])
        np.add(shift, count[: end - begin], out=numbers[begin:end])
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


def to_numpy(
    tokens: pl.DataFrame | pl.LazyFrame, column: str | pl.Expr, fill: float | bool | None = None
) -> dict[tuple[str, int], NDArray[Any]]:
    """One array a training sample, aligned with the `token_ids` of its branch.

    Args:
        tokens: a tokens table read with `weighting="branches"`; the columns `trace_id`, `branch`,
            `branch_tokens` and `position` of it are needed.
        column: what to lay out, a column or an expression over columns: `"age"`, `"version"`,
            `pl.col("age") <= 2`.
        fill: stands at tokens that were not sampled or have no value. By default False for
            booleans, NaN for floats, and -2147483648 for integers, which no age or version is.

    Returns:
        `(trace_id, branch)` -> array of `branch_tokens` values of the column's type; views of one
        block of memory. A sample without sampled tokens has no entry.

    Raises:
        ValueError: when `tokens` was not read with `weighting="branches"`.

    >>> import traceage as ta, polars as pl
    >>> tokens = ta.scan_tokens("data/real-dump", weighting="branches")
    >>> fresh = to_numpy(tokens, pl.col("age") <= 1)
    >>> len(fresh), sum(int(mask.sum()) for mask in fresh.values())
    (80, 49714)
    """
    value = (pl.col(column) if isinstance(column, str) else column).alias("value")
    keys = ["trace_id", "branch"]
    frame = tokens.lazy().select(*keys, "branch_tokens", "position", value).collect()
    if (
        frame.select(pl.col("branch", "branch_tokens", "position").has_nulls()).row(0)
        != (False,) * 3
    ):
        raise ValueError(
            "tokens without branch or position: read them with scan_tokens(..., "
            "weighting='branches') from records that hold token ids"
        )
    samples = frame.select(*keys, "branch_tokens").unique(keys, maintain_order=True)
    samples = samples.with_columns(
        first=pl.col("branch_tokens").cast(pl.Int64).cum_sum() - pl.col("branch_tokens")
    )
    sample = frame.select(pl.struct(keys).rle_id()).to_series()
    if frame.height and sample[-1] + 1 != samples.height:
        # The tokens of a sample do not stand together, as they do after reading.
        frame = frame.join(samples.select(*keys, "first"), on=keys, maintain_order="left")
        first = frame["first"].to_numpy()
    else:
        first = samples["first"].gather(sample).to_numpy()
    present = frame["value"].is_not_null()
    values = frame["value"].filter(present).to_numpy()
    if fill is None:
        fill = {"b": False, "f": np.nan}.get(values.dtype.kind, np.iinfo(np.int32).min)
    flat = np.full(int(samples["branch_tokens"].sum()), fill, values.dtype)
    flat[(first + frame["position"].to_numpy())[present.to_numpy()]] = values
    return {
        (trace_id, branch): flat[start : start + length]
        for trace_id, branch, length, start in samples.iter_rows()
    }


def to_torch(
    tokens: pl.DataFrame | pl.LazyFrame, column: str | pl.Expr, fill: float | bool | None = None
) -> dict[tuple[str, int], torch.Tensor]:
    """As `to_numpy`, with torch tensors that share its memory; torch is imported here alone."""
    import torch

    return {key: torch.from_numpy(array) for key, array in to_numpy(tokens, column, fill).items()}
