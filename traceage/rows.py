"""Blocks -> frames: which traces count, at which step, and the columns that were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from traceage.ages import training_versions
from traceage.context import completion_tokens, lowest_before, runs_before
from traceage.errors import Problem, TraceError, list_labels
from traceage.formats.records import RUN_FIELDS, Block, Unit
from traceage.formats.streams import PLACED
from traceage.schema import RUN_COLUMNS, SPANS, TOKENS
from traceage.sources import SourceFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traceage.formats.streams import Stream
    from traceage.reading import Reader


UNIT, NODE, START, END, LABEL, MIXED, BRANCHES, BRANCH, ANCESTOR = (
    RUN_FIELDS.index(name)
    for name in (
        "unit", "node", "start", "end", "label", "mixed", "branches", "branch", "ancestor"
    )
)  # fmt: skip


class Row(NamedTuple):
    """A trace with all that its place adds to it; the columns that its runs share."""

    unit: Unit
    file: str
    line: int
    step: int | None
    kind: str | None
    subset: str | None
    shipped: bool | None


class Rows:
    """Gathers blocks, decides which of their traces count and at which step, makes frames."""

    def __init__(self, reader: Reader, needed: set[str]) -> None:
        self.reader = reader
        self.needed = needed
        if "training_version" in needed and isinstance(reader.training_version, str):
            self.needed = needed | {reader.training_version} & set(SPANS)
        self.anything = False
        self.reads_labels = "version" in needed
        self.labels: dict[str, int] = {}
        self.versions: list[int | None] = []
        self.seen: dict[tuple[int | None, int, str | None], tuple[str, int]] = {}
        self._reset()

    def _reset(self) -> None:
        self.count = 0
        self.tokens = 0
        self.streams: dict[str, list[Stream]] = {}
        self.rows: list[Row] = []
        self.runs: list[NDArray[np.int32]] = []
        self.stamps: list[NDArray[np.float64]] = []

    def add(self, file: SourceFile, before: int, block: Block) -> list[int]:
        """Gather a block; returns which of its units count, in order."""
        width = len(RUN_FIELDS)
        runs = np.frombuffer(block.runs, np.int32).reshape(-1, width)
        stamps = np.frombuffer(block.timestamps, np.float64)
        place = np.full(len(block.units), -1, np.int32)
        bare: list[int] = []
        chosen: list[int] = []
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
                chosen.append(index)
        kept = place[runs[:, UNIT]] >= 0
        for name, values in block.streams.items():
            mine = values if kept.all() else values[np.repeat(kept, runs[:, END] - runs[:, START])]
            self.streams.setdefault(name, []).append(mine)
        runs = runs[kept]
        self.tokens += int((runs[:, END] - runs[:, START]).sum())
        runs[:, UNIT] = place[runs[:, UNIT]]
        runs[:, LABEL] = self._global_labels(block, runs[:, LABEL])
        self.runs.append(runs)
        self.stamps.append(stamps[kept])
        if bare:
            empty = np.full((len(bare), width), -1, np.int32)
            empty[:, UNIT] = bare
            empty[:, [START, END, MIXED, BRANCHES]] = 0
            self.runs.append(empty)
            self.stamps.append(np.full(len(bare), np.nan))
        self.count += len(runs) + len(bare)
        self.anything |= bool(chosen)
        return chosen

    def _select(
        self, file: SourceFile, before: int, episode: Sequence[tuple[int, Unit]]
    ) -> Iterator[tuple[int, Row, bool]]:
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
                    (s for s in (file.step, unit.ship_step, reader.step) if s is not None), None
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
            row = Row(unit, file.path, line, step, kind, file.subset, shipped)
            if self._first_time(row):
                yield index, row, True

    def _select_shipped(
        self,
        file: SourceFile,
        line: int,
        kind: str | None,
        episode: Sequence[tuple[int, Unit]],
    ) -> Iterator[tuple[int, Row, bool]]:
        assert file.store is not None
        reader, annotated = self.reader, file.store.ship_steps
        steps = [
            annotated.get(unit.trace_id or "", unit.ship_step) if unit.trainable else None
            for _, unit in episode
        ]
        taken = [step for step in steps if step is not None]
        everything = reader.subset in ("all", "both")
        arrived = next((u.arrival_step for _, u in episode if u.arrival_step is not None), None)
        if not taken:
            reader.summary.not_shipped += 1
            if not everything:
                index, unit = episode[0]
                unit = unit._replace(trace_id=None, agent=None, trainable=True, reward=None)
                yield (
                    index,
                    Row(unit, file.path, line, arrived, kind, "all", False),
                    False,
                )
                return
        for (index, unit), step in zip(episode, steps, strict=True):
            if step is None and taken and not unit.trainable:
                step = min(taken)
            if step is not None:
                row = Row(unit, file.path, line, step, kind, "effective", True)
            elif everything:
                row = Row(unit, file.path, line, arrived, kind, "all", False)
            else:
                reader.summary.traces_not_shipped += 1
                continue
            if self._first_time(row):
                yield index, row, True

    def _first_time(self, row: Row) -> bool:
        """Whether this trace was not read before for this step; a second copy is refused."""
        if row.unit.trace_id is None:
            return True
        return self.first_time(row.step, row.unit.trace_id, row.subset, row.file, row.line)

    def first_time(
        self, step: int | None, trace_id: str, subset: str | None, file: str, line: int
    ) -> bool:
        """Whether a trace was not read before for this step; a second copy is refused."""
        both = subset if self.reader.subset == "both" else None
        key = (step, hash(trace_id), both)
        if key not in self.seen:
            self.seen[key] = file, line
            return True
        first_file, first_line = self.seen[key]
        self.reader.refuse(
            Problem(
                "trace read twice",
                file,
                line,
                trace_id,
                None,
                f"step {step} already holds it, from {first_file}:{first_line}",
                "give each trace once (two layouts or copies of one run count everything twice)",
            )
        )
        return False

    def _global_labels(self, block: Block, local: NDArray[np.int32]) -> NDArray[np.int32]:
        """The labels of a block's runs as indices into `self.labels`; -1 stays for no label."""
        runs = np.bincount(local[local >= 0], minlength=len(block.labels)).tolist()
        known = [self._know(label, count) for label, count in zip(block.labels, runs, strict=True)]
        return np.array([*known, -1], np.int32)[local]

    def _know(self, label: str, runs: int) -> int:
        """The index of a label that `runs` more runs carry."""
        if label not in self.labels:
            self.labels[label] = len(self.labels)
            try:
                self.versions.append(self.reader.labels(label) if self.reads_labels else None)
            except ValueError:
                self.versions.append(None)
                self.reader.summary.unreadable_labels[label] = 0
        if label in self.reader.summary.unreadable_labels:
            self.reader.summary.unreadable_labels[label] += runs
        return self.labels[label]

    def versions_of(self, labels: pl.Series) -> pl.Series:
        """The versions that a column of labels names: Int32."""
        counted = labels.drop_nulls().value_counts()
        for label, runs in counted.iter_rows():
            self._know(label, runs)
        known = pl.Series(list(self.labels), dtype=pl.String)
        versions = pl.Series(self.versions, dtype=pl.Int32)
        return labels.replace_strict(known, versions, default=None, return_dtype=pl.Int32)

    def check_labels(self, file: str) -> None:
        """Refuse the labels met so far that are no versions, with how often each occurs."""
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
        problem = Problem("unreadable labels", file, None, None, None, found, advice)
        if reader.on_error == "raise":
            read = f" (in the first {reader.summary.lines_read:,} lines read)"
            raise TraceError(str(problem._replace(found=found + read)))
        reader.summary.problems[problem.reason] = sum(counts.values())
        reader.summary.examples[problem.reason] = [str(problem)]

    def take(self, with_row: bool = False) -> tuple[pl.DataFrame, dict[str, pl.Series]]:
        """What was gathered, and starts afresh.

        A frame of the needed columns, a row a run, and the streams, a value a token of all runs.
        `with_row` adds `row`, which runs of one trace share.
        """
        self.check_labels(self.rows[0].file)
        runs = np.concatenate(self.runs)
        labels = pl.Series([*self.labels, None], dtype=pl.String)
        versions = pl.Series([*self.versions, None], dtype=pl.Int32)
        label_at = np.where(runs[:, LABEL] < 0, len(self.labels), runs[:, LABEL])
        at = pl.Series(runs[:, UNIT])
        made: dict[str, pl.Series] = {"row": at} if with_row else {}
        for name, dtype in RUN_COLUMNS.items():
            if name not in self.needed or name == "training_version":
                continue
            if name == "length":
                made[name] = pl.Series(runs[:, END] - runs[:, START], dtype=dtype)
            elif name == "label":
                made[name] = labels.gather(label_at)
            elif name == "version":
                made[name] = versions.gather(label_at)
            elif name == "completion_tokens":
                made[name] = completion_tokens(runs[:, NODE], runs[:, START], runs[:, END])
            elif name == "context_version":
                before = runs_before(*runs[:, [UNIT, BRANCH, NODE, ANCESTOR, START]].T)
                made[name] = lowest_before(before, versions.gather(label_at))
            elif name == "mixed":
                made[name] = pl.Series(runs[:, MIXED] > 0)
            elif name == "timestamp":
                made[name] = pl.Series(np.concatenate(self.stamps)).fill_nan(None)
            elif name in RUN_FIELDS:
                values = pl.Series(runs[:, RUN_FIELDS.index(name)], dtype=dtype)
                made[name] = values.set(values < 0, None)
            elif name in Row._fields:
                of_row = Row._fields.index(name)
                made[name] = pl.Series([row[of_row] for row in self.rows], dtype=dtype).gather(at)
            elif name in Unit._fields:
                of_unit = Unit._fields.index(name)
                values = pl.Series([row.unit[of_unit] for row in self.rows], dtype=dtype)
                made[name] = values.gather(at)
        if "training_version" in self.needed:
            made["training_version"] = self._training_versions(at)
        streams = {
            name: as_series(name, np.concatenate(parts)) for name, parts in self.streams.items()
        }
        self._reset()
        return pl.DataFrame({name: series.alias(name) for name, series in made.items()}), streams

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


def as_series(name: str, values: Stream) -> pl.Series:
    """A stream as a column of the tokens table: what was not stamped is null."""
    if name not in PLACED:
        return pl.Series(name, values).fill_nan(None)
    series = pl.Series(name, values, dtype=pl.Int32)
    absent = values < 0
    series = series if not absent.any() else series.set(pl.Series(absent), None)
    return series.cast(TOKENS[name])


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
