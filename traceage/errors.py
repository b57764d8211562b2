"""What can be wrong with an input, and how it is told.

A reader that finds something wrong makes a `Problem`: which file, line, trace and node, what was
found, what to do. With `on_error="raise"` the first one is raised as a `TraceError`; with
`on_error="skip"` the reader goes on and a `ReadSummary` counts it, so nothing is lost in silence.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

OnError = Literal["raise", "skip"]


class TraceError(ValueError):
    """An input that cannot be counted as it stands.

    The message names the file, line, trace and node where they are known, what was found there,
    and what to do about it.
    """


class TraceWarning(UserWarning):
    """Something was read with a reservation: a torn last line, or skipped records."""


class Problem(NamedTuple):
    """One thing wrong at one place. Plain values only, so that a worker process can send it."""

    reason: str
    """What kind of fault, in a few words; the summary counts by it."""
    file: str
    line: int | None
    trace: str | None
    node: int | None
    found: str
    advice: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        if self.trace is not None:
            where += f": trace {self.trace}"
        if self.node is not None:
            where += f", node {self.node}"
        return f"{where}: {self.reason}: {self.found}; {self.advice}"


@dataclass
class ExportsRead:
    """What was read of a step's token exports, and which branches found their sequence there."""

    folder: str
    sequences: int = 0
    problems: set[Problem] = field(default_factory=set)
    torn: set[str] = field(default_factory=set)
    """Files whose last line was still being written, as `file:line`."""
    matched: set[tuple[str, int]] = field(default_factory=set)
    """File and line of the sequences whose token ids are those of a branch; one may be found by
    several branches, in several parts of a file that are read side by side."""
    branches: int = 0
    """Branches that looked for a sequence."""
    branches_matched: int = 0

    def add(self, other: ExportsRead) -> None:
        """Take in what another part of the step's traces found in the same exports."""
        # A file may have grown between two readings of it.
        self.sequences = max(self.sequences, other.sequences)
        self.problems |= other.problems
        self.torn |= other.torn
        self.matched |= other.matched
        self.branches += other.branches
        self.branches_matched += other.branches_matched


EXAMPLES_KEPT = 5
"""How many problems of one reason a summary keeps in full; the rest are only counted."""


@dataclass
class ReadSummary:
    """What one reading of a source left out or read with a reservation, counted.

    Pass an instance to `scan_spans(..., summary=...)`; it is reset when the reading starts and
    complete when it ends.

    >>> summary = ReadSummary()
    >>> summary.skipped, summary.lines()
    (0, [])
    """

    problems: Counter[str] = field(default_factory=Counter)
    """Faults that `on_error="skip"` stepped over, by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first few faults of each reason, as full messages."""
    unreadable_labels: Counter[str] = field(default_factory=Counter)
    """Labels that are neither `default` nor an integer: the spans that carry each."""
    torn: list[str] = field(default_factory=list)
    """Files whose last line was still being written, as `file:line`."""
    unfinished_dumps: list[str] = field(default_factory=list)
    """Dumps whose conversion is still running, or was cut off."""
    files_without_traces: list[str] = field(default_factory=list)
    """JSONL files met in a directory whose lines are neither episodes nor traces."""
    lines_read: int = 0
    episodes: int = 0
    """Episodes (and bare traces) that were read, before any of the selections below."""
    without_record: int = 0
    """Rows of platform Parquet files whose episode record was dropped for its size."""
    other_kind: int = 0
    """Episodes of another kind than the one asked for."""
    not_shipped: int = 0
    """Episodes that no batch took (trace stores only)."""
    traces_not_shipped: int = 0
    """Traces of trainable agents that no batch took although their episode was taken in part."""
    exports: dict[str, ExportsRead] = field(default_factory=dict)
    """The token exports that were read beside the traces, by folder."""

    @property
    def export_sequences(self) -> int:
        """Training sequences of the token exports that were read."""
        return sum(step.sequences for step in self.exports.values())

    @property
    def export_sequences_matched(self) -> int:
        """Those of them whose token ids are those of a branch."""
        return sum(len(step.matched) for step in self.exports.values())

    @property
    def exported_branches(self) -> int:
        """Branches that looked for their sequence; once for each copy of a trace that was read."""
        return sum(step.branches for step in self.exports.values())

    @property
    def exported_branches_matched(self) -> int:
        """Those of them that found one."""
        return sum(step.branches_matched for step in self.exports.values())

    @property
    def skipped(self) -> int:
        """How many faults were stepped over."""
        return sum(self.problems.values())

    def clear(self) -> None:
        """Forget everything; a reading starts."""
        fresh = ReadSummary()
        self.__dict__.update(fresh.__dict__)

    def add(self, problem: Problem) -> None:
        """Count one fault."""
        self.problems[problem.reason] += 1
        kept = self.examples.setdefault(problem.reason, [])
        if len(kept) < EXAMPLES_KEPT:
            kept.append(str(problem))

    def lines(self) -> list[str]:
        """What a person should know about this reading, a sentence each; none when all is well."""
        said = []
        for reason, count in self.problems.most_common():
            said.append(f"skipped {count:,} x {reason}; first: {self.examples[reason][0]}")
        if self.unreadable_labels:
            said.append(f"labels that are not versions: {list_labels(self.unreadable_labels)}")
        if self.torn:
            shown = ", ".join(self.torn[:3]) + (", ..." if len(self.torn) > 3 else "")
            said.append(f"last line still being written, left out: {shown}")
        for dump in self.unfinished_dumps:
            said.append(
                f"{dump}: this dump is not finished; run its conversion again to complete it"
            )
        if self.files_without_traces:
            names = self.files_without_traces
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            said.append(f"{len(names)} files hold no traces and were passed over: {shown}")
        if self.without_record:
            said.append(
                f"{self.without_record:,} platform rows hold no native_wrapper (their episodes "
                "were too large to upload whole): their tokens are not counted"
            )
        if self.traces_not_shipped:
            said.append(
                f"{self.traces_not_shipped:,} traces were not shipped although their episode was"
            )
        unmatched = self.export_sequences - self.export_sequences_matched
        if unmatched:
            said.append(
                f"{unmatched:,} of {self.export_sequences:,} training sequences of the token "
                "exports match no branch by their token ids (packed or truncated); "
                f"{self.exported_branches_matched:,} of {self.exported_branches:,} branches found "
                "theirs"
            )
        return said


def list_labels(labels: Counter[str], limit: int = 10) -> str:
    """Labels and how many spans carry each, the most frequent first."""
    shown = ", ".join(f"{label!r} ({count:,})" for label, count in labels.most_common(limit))
    more = len(labels) - limit
    return shown + (f" and {more:,} more" if more > 0 else "")
