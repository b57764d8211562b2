"""Sources -> the spans table, lazily.

`scan_spans` is a polars IO source: nothing is read until the frame is collected, and then what the
query asks for reaches the reader. Columns that are not asked for are not built; files (and, in a
trace store with its index, single lines) that a filter on step, kind, env or group rules out are
not read; `head` stops the reading. Parts of files are read side by side by worker processes and
put together here in order, where the layout adds what the records do not know: the step, whether
a batch took the trace, the place in the file.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import polars as pl
from polars.io.plugins import register_io_source

from traceage.ages import training_versions
from traceage.errors import (
    OnError,
    Problem,
    ReadSummary,
    TraceError,
    TraceWarning,
    list_labels,
)
from traceage.formats.content import FIX_DAMAGED, PART_BYTES, Part, PartRead, parts_of, read_part
from traceage.formats.records import RUN_FIELDS, Block, RecordReader, Unit
from traceage.schema import SPANS
from traceage.sources import SourceFile, Subset, find_files
from traceage.spans import LabelReader
from traceage.workers import available_cores, ordered_map

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traceage.ages import TrainingVersion

Kind = Literal["train", "eval", "any"]

ROWS_PER_BATCH = 16_384
WORTH_WORKERS = 150_000_000
"""Bytes of content below which starting workers takes longer than reading."""

_INDEXED = {"step", "kind", "env", "group_id", "episode_id"}
"""Columns that a trace store's index can tell before the stream is read."""


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
            `.jsonl.gz`, `.jsonl.zst`; the lines are episodes or bare traces.
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
    │ toy-long ┆ 0     ┆ 333    │
    │ toy-long ┆ 1     ┆ 86     │
    └──────────┴───────┴────────┘
    """
    if isinstance(source, (str, os.PathLike)):
        source = [source]
    reader = SpanReader(
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
    return register_io_source(reader.batches, schema=SPANS, is_pure=False)


class _Row(NamedTuple):
    """A trace with all that its place adds to it; the columns that its runs share."""

    unit: Unit
    file: str
    line: int
    step: int | None
    kind: str | None
    subset: str | None
    shipped: bool | None


@dataclass
class SpanReader:
    """What `scan_spans` was asked for; each call of `batches` is one reading."""

    sources: list[str]
    step: int | None
    training_version: TrainingVersion
    kind: Kind
    subset: Subset | None
    include_frozen: bool
    labels: LabelReader
    on_error: OnError
    workers: int | None
    quiet: bool
    summary: ReadSummary

    def batches(
        self,
        with_columns: list[str] | None = None,
        predicate: pl.Expr | None = None,
        n_rows: int | None = None,
        batch_size: int | None = None,
    ) -> Iterator[pl.DataFrame]:
        """Frames of `with_columns` (all where None) whose rows fulfil `predicate`."""
        self.summary.clear()
        files = find_files(self.sources, self.subset)
        plan = _Plan(self, _conjuncts(predicate))
        columns = list(SPANS) if with_columns is None else with_columns
        needed = set(columns) | set(predicate.meta.root_names() if predicate is not None else ())
        rows = _Rows(self, needed)
        batch_rows = min(batch_size or ROWS_PER_BATCH, ROWS_PER_BATCH, n_rows or ROWS_PER_BATCH)
        left = n_rows

        def frames() -> Iterator[pl.DataFrame]:
            for file, before, block in self._blocks(files, plan):
                rows.add(file, before, block)
                if rows.count >= batch_rows:
                    yield rows.take()
            if rows.count:
                yield rows.take()

        for frame in frames():
            if predicate is not None:
                frame = frame.filter(predicate)
            frame = frame.select(columns)
            if left is not None:
                frame = frame.head(left)
                left -= frame.height
            if frame.height:
                yield frame
            if left == 0:
                return
        if not rows.anything and not plan.left_out and not self.summary.torn:
            raise TraceError(self._nothing(files))
        if not self.quiet:
            for line in self.summary.lines():
                warnings.warn(line, TraceWarning, stacklevel=2)

    def refuse(self, problem: Problem) -> None:
        """Raise a fault, or count it and go on."""
        if self.on_error == "raise":
            raise TraceError(str(problem))
        self.summary.add(problem)

    def _blocks(
        self, files: Sequence[SourceFile], plan: _Plan
    ) -> Iterator[tuple[SourceFile, int, Block]]:
        """The blocks of all files in order, each with its file and the lines before it there."""
        by_path = {file.path: file for file in files}
        workers = self.workers
        if workers is None:
            content = sum(f.size * (1 if f.path.endswith(".jsonl") else 6) for f in files)
            workers = available_cores() if content >= WORTH_WORKERS else 1
        stitcher: _Stitcher | None = None
        with self._progress(files) as progress:
            reads = ordered_map(read_part, plan.parts(files), workers)
            while True:
                try:
                    part, read = next(reads)
                except StopIteration:
                    break
                if stitcher is None or stitcher.file.path != part.path:
                    if stitcher is not None:
                        yield from stitcher.finish()
                    stitcher = _Stitcher(self, by_path[part.path])
                yield from stitcher.add(part, read)
                progress.update(part.stored)
            if stitcher is not None:
                yield from stitcher.finish()

    def _progress(self, files: Sequence[SourceFile]) -> Any:
        from tqdm.auto import tqdm

        # Shown on a terminal's stderr alone, and not for what takes no time.
        return tqdm(
            total=sum(file.size for file in files),
            unit="B",
            unit_scale=True,
            desc="reading traces",
            delay=1.0,
            leave=False,
            disable=True if self.quiet else None,
        )

    def _nothing(self, files: Sequence[SourceFile]) -> str:
        where = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
        told = self.summary
        if not told.episodes:
            return f"{where}: no episodes and no traces in it; is this the right source?"
        what = [f"{told.episodes:,} episodes read"]
        advice = "correct the source"
        if told.other_kind:
            what.append(f"{told.other_kind:,} of another kind than {self.kind!r}")
            advice = "ask for the other kind (kind='any', --kind any)"
        if told.skipped:
            what.append(f"{told.skipped:,} faults skipped, first: {told.lines()[0]}")
        return f"{where}: nothing left to count: {', '.join(what)}; {advice}"


class _Stitcher:
    """Joins the parts of one file: the line that crosses from one into the next is read here."""

    def __init__(self, reader: SpanReader, file: SourceFile) -> None:
        self.reader = reader
        self.file = file
        self.carry: list[bytes] = []
        self.lines = 0
        self.passed_over = False

    def add(self, part: Part, read: PartRead) -> Iterator[tuple[SourceFile, int, Block]]:
        if part.line is not None:
            yield from self.finish()
            self.lines = part.line
        if read.damaged is not None and not self.passed_over:
            self.passed_over = True
            self.reader.refuse(
                Problem("damaged file", part.path, None, None, None, read.damaged, FIX_DAMAGED)
            )
        if self.passed_over:
            self.carry = []
            return
        self.carry.append(read.head)
        if read.tail is None:
            return
        yield from self._emit(self._crossing().block)
        yield from self._emit(read.block)
        self.carry = [read.tail]

    def finish(self) -> Iterator[tuple[SourceFile, int, Block]]:
        """What is left after the last newline: a whole line that lacks it, or a torn one."""
        if not b"".join(self.carry).strip():
            self.carry = []
            return
        block = self._crossing().block
        self.carry = []
        if any(problem.reason == "not JSON" for problem in block.problems):
            self.reader.summary.torn.append(f"{self.file.path}:{self.lines + 1}")
        else:
            yield from self._emit(block)

    def _crossing(self) -> RecordReader:
        line = b"".join(self.carry)
        if not self.lines:
            line = line.removeprefix(b"\xef\xbb\xbf")
        one = RecordReader(self.reader.include_frozen)
        one.read(line, 0, len(line))
        return one

    def _emit(self, block: Block) -> Iterator[tuple[SourceFile, int, Block]]:
        summary = self.reader.summary
        before, self.lines = self.lines, self.lines + block.lines
        loose = not self.file.named and self.file.step is None and self.file.store is None
        if not before and loose and any(p.reason.startswith("not ") for p in block.problems):
            # A side file of a directory: what its first line is, all of it is.
            self.passed_over = True
            summary.files_without_traces.append(self.file.path)
        if self.passed_over:
            return
        for problem in block.problems:
            assert problem.line is not None
            line = before + problem.line + 1
            self.reader.refuse(problem._replace(file=self.file.path, line=line))
        summary.lines_read += block.lines
        yield self.file, before, block


class _Rows:
    """Gathers blocks, decides which of their traces count and at which step, makes frames."""

    def __init__(self, reader: SpanReader, needed: set[str]) -> None:
        self.reader = reader
        self.needed = needed
        if "training_version" in needed and isinstance(reader.training_version, str):
            self.needed = needed | {reader.training_version} & set(SPANS)
        self.anything = False
        self.labels: dict[str, int] = {}
        self.versions: list[int | None] = []
        self.seen: dict[tuple[int | None, int], tuple[str, int]] = {}
        self._reset()

    def _reset(self) -> None:
        self.count = 0
        self.rows: list[_Row] = []
        self.runs: list[NDArray[np.int32]] = []
        self.stamps: list[NDArray[np.float64]] = []

    def add(self, file: SourceFile, before: int, block: Block) -> None:
        width = len(RUN_FIELDS)
        runs = np.frombuffer(block.runs, np.int32).reshape(-1, width)
        stamps = np.frombuffer(block.timestamps, np.float64)
        place = np.full(len(block.units), -1, np.int32)
        bare: list[int] = []
        for episode in _episodes(block.units):
            self.reader.summary.episodes += 1
            if any(unit.episode_id is None or unit.trace_id == "" for _, unit in episode):
                episode = _name_unnamed(file, before, episode)
            for index, row, with_runs in self._select(file, before, episode):
                if with_runs:
                    place[index] = len(self.rows)
                else:
                    bare.append(len(self.rows))
                self.rows.append(row)
        kept = place[runs[:, 0]] >= 0
        runs = runs[kept]
        runs[:, 0] = place[runs[:, 0]]
        runs[:, 5] = self._global_labels(block, runs[:, 5])
        self.runs.append(runs)
        self.stamps.append(stamps[kept])
        if bare:
            empty = np.full((len(bare), width), -1, np.int32)
            empty[:, 0] = bare
            empty[:, [3, 4, 6, 7]] = 0
            self.runs.append(empty)
            self.stamps.append(np.full(len(bare), np.nan))
        self.count += len(runs) + len(bare)
        self.anything |= self.count > 0

    def _select(
        self, file: SourceFile, before: int, episode: Sequence[tuple[int, Unit]]
    ) -> Iterator[tuple[int, _Row, bool]]:
        """The traces of one episode that count: index, row, and whether with their runs."""
        reader, summary = self.reader, self.reader.summary
        first = episode[0][1]
        line = before + first.line + 1
        kind = file.kind or first.kind
        if reader.kind != "any" and kind not in (None, reader.kind):
            summary.other_kind += 1
            return
        if file.store is not None and kind != "eval":
            yield from self._select_shipped(file, line, kind, episode)
            return
        for index, unit in episode:
            shipped = True if unit.ship_step is not None else None
            if file.store is not None:
                step: int | None = unit.arrival_step
            else:
                step = next(
                    (s for s in (unit.ship_step, file.step, reader.step) if s is not None), None
                )
            if step is None and not isinstance(reader.training_version, int):
                reader.refuse(
                    Problem(
                        "no step known",
                        file.path,
                        line,
                        unit.trace_id,
                        None,
                        "neither the path nor the record tells which batch trained on this trace",
                        "give it with step=N (--step N), or one training version for all",
                    )
                )
                continue
            row = _Row(unit, file.path, line, step, kind, file.subset, shipped)
            if self._first_time(row):
                yield index, row, True

    def _select_shipped(
        self,
        file: SourceFile,
        line: int,
        kind: str | None,
        episode: Sequence[tuple[int, Unit]],
    ) -> Iterator[tuple[int, _Row, bool]]:
        assert file.store is not None
        reader, annotated = self.reader, file.store.ship_steps
        steps = [
            annotated.get(unit.trace_id or "", unit.ship_step) if unit.trainable else None
            for _, unit in episode
        ]
        taken = [step for step in steps if step is not None]
        everything = reader.subset == "all"
        if not taken:
            reader.summary.not_shipped += 1
            if not everything:
                index, unit = episode[0]
                unit = unit._replace(trace_id=None, agent=None, trainable=True, reward=None)
                yield (
                    index,
                    _Row(unit, file.path, line, unit.arrival_step, kind, "all", False),
                    False,
                )
                return
        for (index, unit), step in zip(episode, steps, strict=True):
            if step is None and taken and not unit.trainable:
                step = min(taken)
            if step is not None:
                row = _Row(unit, file.path, line, step, kind, "effective", True)
            elif everything:
                row = _Row(unit, file.path, line, unit.arrival_step, kind, "all", False)
            else:
                reader.summary.traces_not_shipped += 1
                continue
            if self._first_time(row):
                yield index, row, True

    def _first_time(self, row: _Row) -> bool:
        """Whether this trace was not read before for this step; a second copy is refused."""
        if row.unit.trace_id is None:
            return True
        key = (row.step, hash(row.unit.trace_id))
        file, line = self.seen.setdefault(key, (row.file, row.line))
        if (file, line) == (row.file, row.line):
            return True
        self.reader.refuse(
            Problem(
                "trace read twice",
                row.file,
                row.line,
                row.unit.trace_id,
                None,
                f"step {row.step} already holds it, from {file}:{line}",
                "give each trace once (two layouts or copies of one run count everything twice)",
            )
        )
        return False

    def _global_labels(self, block: Block, local: NDArray[np.int32]) -> NDArray[np.int32]:
        """The labels of a block's runs as indices into `self.labels`; -1 stays for no label."""
        mapped = np.full(len(block.labels) + 1, -1, np.int32)
        unreadable: dict[int, str] = {}
        for index, label in enumerate(block.labels):
            if label not in self.labels:
                self.labels[label] = len(self.labels)
                try:
                    self.versions.append(self.reader.labels(label))
                except ValueError:
                    self.versions.append(None)
                    self.reader.summary.unreadable_labels[label] = 0
            mapped[index] = self.labels[label]
            if label in self.reader.summary.unreadable_labels:
                unreadable[index] = label
        if unreadable:
            counts = np.bincount(local[local >= 0], minlength=len(block.labels))
            for index, label in unreadable.items():
                self.reader.summary.unreadable_labels[label] += int(counts[index])
        return mapped[local]

    def _check_labels(self) -> None:
        reader, counts = self.reader, self.reader.summary.unreadable_labels
        if not sum(counts.values()):
            return
        pattern = reader.labels.pattern
        found = f"labels that are neither 'default' nor an integer: {list_labels(counts)}"
        advice = (
            "read versions out of them with version_pattern (--version-pattern), a regular "
            "expression with one group"
            if pattern is None
            else f"the version pattern {pattern.pattern!r} does not read them"
        )
        row = self.rows[0]
        problem = Problem("unreadable labels", row.file, None, None, None, found, advice)
        if reader.on_error == "raise":
            read = f" (in the first {reader.summary.lines_read:,} lines read)"
            raise TraceError(str(problem._replace(found=found + read)))
        reader.summary.problems[problem.reason] = sum(counts.values())
        reader.summary.examples[problem.reason] = [str(problem)]

    def take(self) -> pl.DataFrame:
        """What was gathered, as a frame of the needed columns; starts afresh."""
        self._check_labels()
        runs = np.concatenate(self.runs)
        stamps = np.concatenate(self.stamps)
        labels = pl.Series([*self.labels, None], dtype=pl.String)
        versions = pl.Series([*self.versions, None], dtype=pl.Int32)
        label_at = np.where(runs[:, 5] < 0, len(self.labels), runs[:, 5])
        at = pl.Series(runs[:, 0])

        def null_below_zero(column: int) -> pl.Series:
            values = pl.Series(runs[:, column], dtype=pl.Int32)
            return values.set(values < 0, None)

        made: dict[str, pl.Series] = {}
        for name, dtype in SPANS.items():
            if name not in self.needed or name == "training_version":
                continue
            if name in ("node", "turn"):
                made[name] = null_below_zero(RUN_FIELDS.index(name))
            elif name in ("start", "end", "branches"):
                made[name] = pl.Series(runs[:, RUN_FIELDS.index(name)], dtype=dtype)
            elif name == "length":
                made[name] = pl.Series(runs[:, 4] - runs[:, 3], dtype=dtype)
            elif name == "label":
                made[name] = labels.gather(label_at)
            elif name == "version":
                made[name] = versions.gather(label_at)
            elif name == "mixed":
                made[name] = pl.Series(runs[:, 6] > 0)
            elif name == "timestamp":
                made[name] = pl.Series(stamps).fill_nan(None)
            elif name in _Row._fields:
                field_at = _Row._fields.index(name)
                made[name] = pl.Series([row[field_at] for row in self.rows], dtype=dtype).gather(at)
            else:
                field_at = Unit._fields.index(name)
                values = [row.unit[field_at] for row in self.rows]
                made[name] = pl.Series(values, dtype=dtype).gather(at)
        if "training_version" in self.needed:
            made["training_version"] = self._training_versions(at)
        self._reset()
        return pl.DataFrame({name: series.alias(name) for name, series in made.items()})

    def _training_versions(self, at: pl.Series) -> pl.Series:
        how = self.reader.training_version
        columns = {"step": [row.step for row in self.rows]}
        if isinstance(how, str) and how in Unit._fields:
            columns[how] = [getattr(row.unit, how) for row in self.rows]
        trained = pl.Series([row.shipped is not False for row in self.rows], dtype=pl.Boolean)
        frame = pl.DataFrame({name: pl.Series(v, dtype=SPANS[name]) for name, v in columns.items()})
        versions = training_versions(frame.filter(trained), how)
        # Nothing trained on a trace that no batch took: it has no training version, and no age.
        where = np.cumsum(trained.to_numpy()) - 1
        gathered = versions.extend_constant(None, 1).gather(
            np.where(trained.to_numpy(), where, len(versions))
        )
        return gathered.gather(at)


def _episodes(units: Sequence[Unit]) -> Iterator[list[tuple[int, Unit]]]:
    """The units of one line together, each with its index."""
    episode: list[tuple[int, Unit]] = []
    for index, unit in enumerate(units):
        if episode and episode[0][1].line != unit.line:
            yield episode
            episode = []
        episode.append((index, unit))
    if episode:
        yield episode


def _name_unnamed(
    file: SourceFile, before: int, episode: Sequence[tuple[int, Unit]]
) -> list[tuple[int, Unit]]:
    """Ids for an episode or traces that were stored without, from their place in the file."""
    named = []
    for number, (index, unit) in enumerate(episode):
        name = unit.episode_id or f"{file.path}:{before + unit.line + 1}"
        trace = f"{name}/{number}" if unit.trace_id == "" else unit.trace_id
        named.append((index, unit._replace(episode_id=name, trace_id=trace)))
    return named


@dataclass
class _Plan:
    """Which parts of which files a query has to read."""

    reader: SpanReader
    conjuncts: list[pl.Expr]
    left_out: bool = field(default=False)
    """Whether the query made it leave out anything."""

    def parts(self, files: Sequence[SourceFile]) -> Iterator[Part]:
        for file in files:
            if file.store is not None:
                yield from self._store_parts(file)
            elif self._may_hold(file):
                yield from parts_of(file.path, self.reader.include_frozen)
            else:
                self.left_out = True

    def _conjuncts_on(self, known: set[str]) -> list[pl.Expr]:
        return [c for c in self.conjuncts if (r := set(c.meta.root_names())) and r <= known]

    def _may_hold(self, file: SourceFile) -> bool:
        if file.step is None:
            return True
        known = {"step": file.step, "subset": file.subset}
        if file.kind is not None:
            known["kind"] = file.kind
        conjuncts = self._conjuncts_on(set(known))
        if not conjuncts:
            return True
        frame = pl.DataFrame({k: [v] for k, v in known.items()}, {k: SPANS[k] for k in known})
        return frame.filter(conjuncts).height > 0

    def _store_parts(self, file: SourceFile) -> Iterator[Part]:
        conjuncts = self._conjuncts_on(_INDEXED)
        wanted = self._wanted_lines(file, conjuncts) if conjuncts else None
        if wanted is None:
            yield from parts_of(file.path, self.reader.include_frozen)
            return
        offsets, keep = wanted
        self.left_out |= not keep.all()
        at = 0
        while at < len(offsets):
            if not keep[at]:
                at += 1
                continue
            first, start = at, offsets[at]
            while at < len(offsets) and keep[at] and offsets[at] - start < PART_BYTES:
                at += 1
            # Lines that the index does not know yet follow the last one that it knows.
            end = offsets[at] if at < len(offsets) else start + PART_BYTES
            yield Part(
                file.path, self.reader.include_frozen, start, end, line=first, stored=end - start
            )
            if at == len(offsets):
                yield from self._tail(file, end)

    def _tail(self, file: SourceFile, start: int) -> Iterator[Part]:
        for part in parts_of(file.path, self.reader.include_frozen):
            if part.end > start:
                yield Part(part.path, part.include_frozen, max(start, part.start), part.end)

    def _wanted_lines(
        self, file: SourceFile, conjuncts: list[pl.Expr]
    ) -> tuple[list[int], NDArray[np.bool_]] | None:
        """Where each line of a chunk begins and whether the query may want it.

        None where the index does not tell.
        """
        store = file.store
        assert store is not None
        rows = [row for row in store.index_rows or () if row.chunk == file.chunk]
        offsets = [row.offset for row in rows]
        if not rows or offsets[0] != 0 or any(b <= a for a, b in pairwise(offsets)):
            return None
        cells = []
        for at, row in enumerate(rows):
            steps: set[int | None] = {
                store.ship_steps[trace] for trace in row.trace_ids if trace in store.ship_steps
            }
            for step in steps or {None}:
                cells.append((at, row.kind, row.env, row.group, row.id, step))
        names = ("kind", "env", "group_id", "episode_id", "step")
        schema = {"at": pl.Int64(), **{name: SPANS[name] for name in names}}
        frame = pl.DataFrame(cells, schema, orient="row")
        # The step of what no batch took is that of its arrival, which only the record tells.
        by_step = [c for c in conjuncts if "step" in c.meta.root_names()]
        others = [c for c in conjuncts if "step" not in c.meta.root_names()]
        if others:
            frame = frame.filter(others)
        if by_step:
            arrived = pl.col("step").is_null()
            frame = frame.filter(arrived | pl.all_horizontal(by_step))
        keep = np.zeros(len(rows), np.bool_)
        keep[frame["at"].to_numpy()] = True
        keep[-1] = True  # what follows it may not be in the index yet
        return offsets, keep


def _conjuncts(predicate: pl.Expr | None) -> list[pl.Expr]:
    """The expressions that all have to hold for `predicate` to hold."""
    if predicate is None:
        return []
    try:
        tree = json.loads(predicate.meta.serialize(format="json"))
        return [
            pl.Expr.deserialize(io.StringIO(json.dumps(part)), format="json")
            for part in _split_and(tree)
        ]
    except (pl.exceptions.PolarsError, ValueError, TypeError):
        return [predicate]


def _split_and(tree: Any) -> Iterator[Any]:
    binary = tree.get("BinaryExpr") if isinstance(tree, dict) else None
    if binary is not None and binary.get("op") in ("And", "LogicalAnd"):
        yield from _split_and(binary["left"])
        yield from _split_and(binary["right"])
    else:
        yield tree
