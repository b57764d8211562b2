"""The labels and spans of one completion -> rows that tile its sampled tokens.

An engine labels stretches of a completion with the policy version that sampled them. Here those
stretches become runs that cover every sampled token exactly once: neighbours with one label are
joined, and what the engine did not label becomes a run whose label is null. So the lengths of the
runs always add up to the number of sampled tokens, and a missing label stays visible.

Nothing here imports polars: worker processes and live orchestrators use it on bare values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

DEFAULT_LABEL = "default"
"""What an engine reports before its weights were ever labelled: a label, but no version."""

INT32_MAX = 2**31 - 1

Run = tuple[int, int, "str | None"]
"""`(start, end, label)`: completion tokens `[start, end)`; no label is None."""


class SpanError(ValueError):
    """Spans that cannot describe the completion they stand on."""


def tile(spans: Iterable[tuple[str, int, int]], tokens: int) -> list[Run]:
    """The runs of a completion of `tokens` sampled tokens, in order and without gaps.

    `spans` are `(label, start, end)` as stored. A completion of no tokens is one empty run, so
    that it can still be counted.

    Raises `SpanError` when a span runs backwards, overlaps the one before or leaves the completion.

    >>> tile([("4", 0, 3), ("5", 3, 4)], tokens=6)
    [(0, 3, '4'), (3, 4, '5'), (4, 6, None)]
    >>> tile([], tokens=0)
    [(0, 0, None)]
    """
    runs: list[Run] = []
    covered = 0
    for label, start, end in spans:
        if end < start:
            raise SpanError(f"span {start}-{end} runs backwards")
        if start < covered:
            raise SpanError(
                f"span {start}-{end} starts before 0"
                if start < 0
                else f"span {start}-{end} overlaps the one before, which ends at {covered}"
            )
        if end > tokens:
            raise SpanError(f"span {start}-{end} passes the {tokens} sampled tokens of its node")
        if start == end:
            continue
        if start > covered:
            runs.append((covered, start, None))
        if runs and start == covered and runs[-1][2] == label:
            runs[-1] = (runs[-1][0], end, label)
        else:
            runs.append((start, end, label))
        covered = end
    if covered < tokens or not runs:
        runs.append((covered, tokens, None))
    return runs


class LabelReader:
    """Labels -> policy versions, each distinct label read once.

    >>> read = LabelReader()
    >>> read("12"), read("default"), read(None)
    (12, None, None)
    >>> LabelReader(r"step_(\\d+)")("step_7")
    7
    """

    def __init__(self, version_pattern: str | None = None) -> None:
        """`version_pattern`: a regular expression with one group, which holds the version.

        Raises `ValueError` when it is not one.
        """
        self.pattern: re.Pattern[str] | None = None
        if version_pattern is not None:
            try:
                self.pattern = re.compile(version_pattern)
            except re.error as error:
                raise ValueError(f"version pattern {version_pattern!r}: {error}") from None
            if self.pattern.groups != 1:
                raise ValueError(
                    f"version pattern {version_pattern!r} has {self.pattern.groups} groups; "
                    "it needs exactly one, around the version"
                )
        self._known: dict[str, int | None] = {DEFAULT_LABEL: None}

    def __call__(self, label: str | None) -> int | None:
        """The version that `label` names; None for `default` and for no label.

        Raises `ValueError` for a label that is neither, or whose version does not fit 32 bits.
        """
        if label is None:
            return None
        try:
            return self._known[label]
        except KeyError:
            version = self._known[label] = self._read(label)
            return version

    def _read(self, label: str) -> int:
        text = label
        if self.pattern is not None and (match := self.pattern.search(label)) is not None:
            text = match.group(1) or ""
        if re.fullmatch(r"-?[0-9]+", text) is None:
            raise ValueError(f"label {label!r} is neither {DEFAULT_LABEL!r} nor an integer")
        version = int(text)
        if not -INT32_MAX <= version <= INT32_MAX:
            raise ValueError(f"label {label!r} does not fit a 32-bit version")
        return version
