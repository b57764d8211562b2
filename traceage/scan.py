"""Sources -> the spans table and the tokens table, lazily.

`scan_spans` and `scan_tokens` are polars IO sources: nothing is read until the frame is collected,
and then what the query asks for reaches the reader. Columns that are not asked for are not
decoded; files (and, in a trace store with its index, single lines) that a filter on step, kind, env
or group rules out are not read; `head` stops the reading. Parts of files are read side by side by
worker processes and put together here in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, TypedDict, Unpack

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from traceage.counts import Weighting, check_weighting
from traceage.dumps import read_dump
from traceage.errors import OnError, ReadSummary, TraceError
from traceage.formats.dump import LEDGER, UNFINISHED
from traceage.formats.records import What
from traceage.formats.streams import STREAMS
from traceage.plan import Plan, conjuncts_of
from traceage.reading import Kind, Reader
from traceage.rows import Rows
from traceage.schema import SPANS, TOKENS
from traceage.sources import Subset, find_files
from traceage.spans import LabelReader
from traceage.tokens import explode

if TYPE_CHECKING:
    from traceage.ages import TrainingVersion

ROWS_PER_BATCH = 16_384
TOKENS_PER_BATCH = 1 << 20


def scan_spans(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    step: int | None = None,
    training_version: TrainingVersion = "step-1",
    kind: Kind = "train",
    subset: Subset | None = None,
    include_frozen: bool = False,
    version_pattern: str | None = None,
    on_error: OnError = "raise",
    workers: int | None = None,
    quiet: bool = False,
    summary: ReadSummary | None = None,
) -> pl.LazyFrame:
    """One row a run of sampled tokens of one label, read when the frame is collected.

    Args:
        source: a file, a directory or a glob, or several: a training run's directory (trace store
            or `rollouts/step_<N>/`) or any folder in it, a `verifiers` output directory, `.jsonl`,
            `.jsonl.gz`, `.jsonl.zst` (the lines are episodes or bare traces), a Parquet dump, the
            platform's sample Parquet.
        step: the step of files that have none in their path.
        training_version: the policy version that each batch trained: `"step-1"`, `"step"`, the
            name of a column, a mapping from step to version, or one version for all.
        kind: which episodes; those that do not say their kind are always among them.
        subset: `"effective"` for what trained, `"all"` for what arrived. By default what trained,
            where a run tells the two apart.
        include_frozen: also agents that are not trained.
        version_pattern: a regular expression with one group that reads versions out of labels.
        on_error: `"skip"` goes on after a fault; what is skipped is counted in `summary`.
        workers: processes to read with; by default as many as there are cores, none for little.
        quiet: no progress bar and no warnings.
        summary: filled by each reading of the frame.

    Returns:
        A LazyFrame with the columns of `traceage.schema.SPANS`.

    Raises:
        TraceError: at once for a source that is not there; when the frame is collected, for an
            input that cannot be counted as it stands.

    >>> import polars as pl
    >>> spans = scan_spans("data/real-dump")
    >>> spans.filter(pl.col("step") == 2).select("env", "label", "length").head(2).collect()
    shape: (2, 3)
    ┌──────────┬───────┬────────┐
    │ env      ┆ label ┆ length │
    │ ---      ┆ ---   ┆ ---    │
    │ str      ┆ str   ┆ i32    │
    ╞══════════╪═══════╪════════╡
    │ toy-long ┆ 0     ┆ 230    │
    │ toy-long ┆ 0     ┆ 164    │
    └──────────┴───────┴────────┘
    """
    reader = reader_of(
        source,
        step=step,
        training_version=training_version,
        kind=kind,
        subset=subset,
        include_frozen=include_frozen,
        version_pattern=version_pattern,
        on_error=on_error,
        workers=workers,
        quiet=quiet,
        summary=summary,
    )
    return register_io_source(partial(span_batches, reader), schema=SPANS, is_pure=False)


class ReadingOptions(TypedDict, total=False):
    """The options of `scan_spans`, which every function that reads traces takes."""

    step: int | None
    training_version: TrainingVersion
    kind: Kind
    subset: Subset | None
    include_frozen: bool
    version_pattern: str | None
    on_error: OnError
    workers: int | None
    quiet: bool
    summary: ReadSummary | None


def scan_tokens(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    columns: Sequence[str] | None = None,
    *,
    labelled_only: bool = False,
    weighting: Weighting = "nodes",
    **reading: Unpack[ReadingOptions],
) -> pl.LazyFrame:
    """One row a sampled token, read when the frame is collected.

    Args:
        source: see `scan_spans`.
        columns: columns of `traceage.schema.TOKENS`; all by default. Only what a query comes to
            need of them is decoded.
        labelled_only: leave out tokens labelled `default` and tokens without a label.
        weighting: `"branches"` gives a token once for every training sample (trainable branch)
            that holds it, sample after sample, as `to_numpy` and `to_torch` need it.
        **reading: see `scan_spans`.

    Returns:
        A LazyFrame. `age` is null for a token without a version, `context_age` where no sampled
        token before it has one, and a stream is null where it was not stamped. What a trace store
        holds as annotations is folded in as if it had been stamped; the newest word on a node wins.
        So are the token exports beside a `rollouts/` folder, where nothing was stamped: a sequence
        belongs to the branch of its step that has the same token ids, and `summary` counts those
        that belong to none.

    Raises:
        TraceError: as `scan_spans`; also, when the frame is collected, for a stream that is not as
            long as the sampled tokens are many, and a line of an export that is no sequence.

    >>> tokens = scan_tokens("data/real-dump", ["step", "age", "logprob", "trainer_logprob"])
    >>> tokens.head(2).collect()
    shape: (2, 4)
    ┌──────┬─────┬─────────┬─────────────────┐
    │ step ┆ age ┆ logprob ┆ trainer_logprob │
    │ ---  ┆ --- ┆ ---     ┆ ---             │
    │ i32  ┆ i32 ┆ f32     ┆ f32             │
    ╞══════╪═════╪═════════╪═════════════════╡
    │ 1    ┆ 0   ┆ -6.2967 ┆ -6.2922         │
    │ 1    ┆ 0   ┆ -6.6939 ┆ -6.6915         │
    └──────┴─────┴─────────┴─────────────────┘
    """
    check_weighting(weighting)
    reader = reader_of(source, **reading)
    batches = partial(token_batches, reader, per_branch=weighting == "branches")
    tokens = register_io_source(batches, schema=TOKENS, is_pure=False)
    if labelled_only:
        tokens = tokens.filter(pl.col("version").is_not_null())
    return tokens if columns is None else tokens.select(columns)


def reader_of(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    step: int | None = None,
    training_version: TrainingVersion = "step-1",
    kind: Kind = "train",
    subset: Subset | None = None,
    include_frozen: bool = False,
    version_pattern: str | None = None,
    on_error: OnError = "raise",
    workers: int | None = None,
    quiet: bool = False,
    summary: ReadSummary | None = None,
) -> Reader:
    """A reader of `source`; raises `TraceError` where there is none."""
    if isinstance(source, (str, os.PathLike)):
        source = [source]
    reader = Reader(
        sources=[os.fspath(one) for one in source],
        step=step,
        training_version=training_version,
        kind=kind,
        subset=subset,
        include_frozen=include_frozen,
        labels=LabelReader(version_pattern),
        on_error=on_error,
        workers=workers,
        quiet=quiet,
        summary=ReadSummary() if summary is None else summary,
    )
    find_files(reader.sources, subset)
    return reader


def span_batches(
    reader: Reader,
    with_columns: list[str] | None = None,
    predicate: pl.Expr | None = None,
    n_rows: int | None = None,
    batch_size: int | None = None,
) -> Iterator[pl.DataFrame]:
    """One reading: frames of `with_columns` (all where None) whose rows fulfil `predicate`."""
    columns = list(SPANS) if with_columns is None else with_columns
    needed = _needed(columns, predicate)
    plan = Plan(conjuncts_of(predicate), What(include_frozen=reader.include_frozen))
    batch_rows = min(batch_size or ROWS_PER_BATCH, ROWS_PER_BATCH, n_rows or ROWS_PER_BATCH)
    frames = (
        spans if predicate is None else spans.filter(predicate)
        for spans, _ in _frames(reader, plan, needed, batch_rows, TOKENS_PER_BATCH * 1024)
    )
    yield from _limited((frame.select(columns) for frame in frames), n_rows)


def token_batches(
    reader: Reader,
    with_columns: list[str] | None = None,
    predicate: pl.Expr | None = None,
    n_rows: int | None = None,
    batch_size: int | None = None,
    *,
    per_branch: bool = False,
) -> Iterator[pl.DataFrame]:
    """One reading: frames of `with_columns` (all where None) whose rows fulfil `predicate`."""
    columns = list(TOKENS) if with_columns is None else with_columns
    needed = _needed(columns, predicate)
    streams = needed.intersection(STREAMS)
    if needed.intersection(("branch", "branch_tokens")):
        streams.add("position")  # the length of a branch needs what its positions need
    what = What(reader.include_frozen, frozenset(streams), per_branch)
    conjuncts = conjuncts_of(predicate)
    plan = Plan(conjuncts, what)
    of_spans = [c for c in conjuncts if (r := set(c.meta.root_names())) and r <= set(SPANS)]
    spread = (needed - streams) | {"start", "length", "training_version", "version"}
    if "context_age" in needed:
        spread.add("context_version")
    batch_tokens = min(TOKENS_PER_BATCH, n_rows or TOKENS_PER_BATCH)

    def frames() -> Iterator[pl.DataFrame]:
        read = _frames(reader, plan, spread, ROWS_PER_BATCH, batch_tokens)
        for spans, stamped in (piece for frame in read for piece in _in_pieces(*frame)):
            if of_spans:
                # What is known of a whole run is decided before there is a row a token.
                keep = spans.select(pl.all_horizontal(of_spans).fill_null(False)).to_series()
                tokens = keep.gather(np.repeat(np.arange(spans.height), spans["length"]))
                spans = spans.filter(keep)
                stamped = {name: values.filter(tokens) for name, values in stamped.items()}
            plain = [name for name in TOKENS if name in needed and name not in STREAMS]
            frame = explode(spans, plain).with_columns(
                values for name, values in stamped.items() if name in needed
            )
            yield (frame if predicate is None else frame.filter(predicate)).select(columns)

    yield from _limited(frames(), n_rows)


def _needed(columns: Sequence[str], predicate: pl.Expr | None) -> set[str]:
    return set(columns) | set(predicate.meta.root_names() if predicate is not None else ())


def _frames(
    reader: Reader, plan: Plan, needed: set[str], batch_rows: int, batch_tokens: int
) -> Iterator[tuple[pl.DataFrame, dict[str, pl.Series]]]:
    """All that counts, from all files, in order: runs, and the streams of their tokens."""
    reader.summary.clear()
    files = find_files(reader.sources, reader.subset)
    rows = Rows(reader, needed)
    for form, group in groupby(files, key=lambda file: file.format):
        if form == "unknown":
            reader.summary.files_without_traces += [file.path for file in group]
        elif form == "dump":
            dumps = list(group)
            for root in sorted({os.path.dirname(os.path.dirname(f.path)) for f in dumps}):
                if os.path.exists(os.path.join(root, LEDGER, UNFINISHED)):
                    reader.summary.unfinished_dumps.append(root or ".")
            chosen = [file for file in dumps if plan.may_hold(file)]
            plan.left_out |= len(chosen) < len(dumps)
            yield from read_dump(reader, rows, chosen, needed, plan.what)
        else:
            for file, before, block in reader.blocks(list(group), plan):
                rows.add(file, before, block)
                if rows.count >= batch_rows or rows.tokens >= batch_tokens:
                    yield rows.take()
            if rows.count:
                yield rows.take()
    if not rows.anything and not plan.left_out and not reader.summary.torn:
        raise TraceError(reader.nothing(files))
    reader.warn()


def _in_pieces(
    spans: pl.DataFrame, stamped: dict[str, pl.Series]
) -> Iterator[tuple[pl.DataFrame, dict[str, pl.Series]]]:
    """Runs and their streams in pieces of about `TOKENS_PER_BATCH` tokens."""
    ends = spans["length"].cast(pl.Int64).cum_sum().to_numpy()
    first = start = 0
    while first < spans.height:
        last = max(int(np.searchsorted(ends, start + TOKENS_PER_BATCH, "right")), first + 1)
        end = int(ends[last - 1])
        piece = {name: values.slice(start, end - start) for name, values in stamped.items()}
        yield spans.slice(first, last - first), piece
        first, start = last, end


def _limited(frames: Iterator[pl.DataFrame], n_rows: int | None) -> Iterator[pl.DataFrame]:
    """The frames that are not empty, up to `n_rows` rows in all."""
    left = n_rows
    for frame in frames:
        if left is not None:
            frame = frame.head(left)
            left -= frame.height
        if frame.height:
            yield frame
        if left == 0:
            return
