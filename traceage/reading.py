"""Files -> blocks, in order: parts are read side by side and joined where lines cross them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from traceage.errors import ExportsRead, OnError, Problem, ReadSummary, TraceError, TraceWarning
from traceage.formats.content import FIX_DAMAGED
from traceage.formats.parts import Part, PartRead, read_part
from traceage.formats.records import Block, RecordReader, What
from traceage.plan import Plan
from traceage.sources import SourceFile, Subset, workers_worth
from traceage.spans import LabelReader
from traceage.workers import ordered_map

if TYPE_CHECKING:
    from traceage.ages import TrainingVersion

Kind = Literal["train", "eval", "any"]


@dataclass
class Reader:
    """How a source is to be read (see `scan_spans`), and what is wrong with it."""

    sources: list[str]
    step: int | None
    training_version: TrainingVersion
    kind: Kind
    subset: Subset | Literal["both"] | None
    include_frozen: bool
    labels: LabelReader
    on_error: OnError
    workers: int | None
    quiet: bool
    summary: ReadSummary

    def refuse(self, problem: Problem) -> None:
        """Raise a fault, or count it and go on."""
        if self.on_error == "raise":
            raise TraceError(str(problem))
        self.summary.add(problem)

    def warn(self) -> None:
        """Tell what a person should know about the reading that has just ended."""
        if not self.quiet:
            for line in self.summary.lines():
                warnings.warn(line, TraceWarning, stacklevel=3)

    def blocks(
        self, files: Sequence[SourceFile], plan: Plan
    ) -> Iterator[tuple[SourceFile, int, Block]]:
        """The blocks of all files in order, each with its file and the lines before it there."""
        by_path = {file.path: file for file in files}
        workers = workers_worth(files) if self.workers is None else self.workers
        stitcher: Stitcher | None = None
        with self._progress(files) as progress:
            for part, read in ordered_map(read_part, plan.parts(files), workers):
                if stitcher is None or stitcher.file.path != part.path:
                    if stitcher is not None:
                        yield from stitcher.finish()
                    stitcher = Stitcher(self, by_path[part.path])
                yield from stitcher.add(part, read)
                if progress is not None:
                    progress.update(part.stored)
            if stitcher is not None:
                yield from stitcher.finish()

    def _progress(self, files: Sequence[SourceFile]) -> Any:
        # Shown on a terminal's stderr alone, and not for what takes no time.
        if self.quiet or not sys.stderr.isatty():
            return nullcontext()
        from tqdm import tqdm

        return tqdm(
            total=sum(file.size for file in files),
            unit="B",
            unit_scale=True,
            desc="reading traces",
            delay=1.0,
            leave=False,
        )

    def nothing(self, files: Sequence[SourceFile]) -> str:
        """Why there is nothing to count."""
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


class Stitcher:
    """Joins the parts of one file: the line that crosses from one into the next is read here."""

    def __init__(self, reader: Reader, file: SourceFile) -> None:
        self.reader = reader
        self.file = file
        self.what = What()
        self.carry: list[bytes] = []
        self.lines = 0
        self.passed_over = False

    def add(self, part: Part, read: PartRead) -> Iterator[tuple[SourceFile, int, Block]]:
        if part.row_group is not None:
            yield from self._emit(read.block)
            return
        self.what = part.what
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
        if read.head is not None:
            self.carry.append(read.head)
        if read.tail is None:
            return
        if read.head is not None:
            yield from self._emit(self._crossing())
        yield from self._emit(read.block)
        self.carry = [read.tail]

    def finish(self) -> Iterator[tuple[SourceFile, int, Block]]:
        """What is left after the last newline: a whole line that lacks it, or a torn one."""
        if not b"".join(self.carry).strip():
            self.carry = []
            return
        block = self._crossing()
        self.carry = []
        if any(problem.reason == "not JSON" for problem in block.problems):
            self.reader.summary.torn.append(f"{self.file.path}:{self.lines + 1}")
        else:
            yield from self._emit(block)

    def _crossing(self) -> Block:
        line = b"".join(self.carry)
        if not self.lines:
            line = line.removeprefix(b"\xef\xbb\xbf")
        one = RecordReader(self.what)
        one.read(line, 0, len(line))
        return one.finish()

    def _emit(self, block: Block) -> Iterator[tuple[SourceFile, int, Block]]:
        summary = self.reader.summary
        before, self.lines = self.lines, self.lines + block.lines
        loose = (
            self.file.format == "lines"
            and not self.file.named
            and self.file.step is None
            and self.file.store is None
        )
        first = [problem for problem in block.problems if problem.line == 0]
        if not before and loose and any(p.reason.startswith("not ") for p in first):
            # A side file of a directory: what its first line is, all of it is.
            self.passed_over = True
            summary.files_without_traces.append(self.file.path)
        if self.passed_over:
            return
        if block.exports is not None:
            self._take_exports(block.exports)
        for problem in block.problems:
            assert problem.line is not None
            line = before + problem.line + 1
            self.reader.refuse(problem._replace(file=self.file.path, line=line))
        summary.lines_read += block.lines
        summary.without_record += block.without_record
        yield self.file, before, block

    def _take_exports(self, read: ExportsRead) -> None:
        """Add up what the blocks found in a step's exports; each of its faults is told once."""
        summary = self.reader.summary
        known = summary.exports.setdefault(read.folder, ExportsRead(read.folder))
        summary.torn += sorted(read.torn - known.torn)
        new = read.problems - known.problems
        known.add(read)
        for problem in sorted(new, key=lambda problem: (problem.file, problem.line or 0)):
            self.reader.refuse(problem)
