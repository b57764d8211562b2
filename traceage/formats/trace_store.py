"""prime-rl's trace store: one stream of episodes, and what was learned of them later.

Every episode is written once, when it arrives, to a chunk of `stream/`. Which batch trained on a
trace is learned later and annotated: the orchestrator's annotations carry `ship.step`. All that a
question about staleness needs of them stands in `annotations/orch.index.jsonl`, a small row an
annotation, so the annotation streams (as long as the tokens) are not read for it.

Layout, below a root that is usually `<run>/monitors/file/traces`:

    stream/NNNNN.jsonl[.zst]   or, in early runs, stream.jsonl
    stream.index.jsonl
    annotations/orch/NNNNN.jsonl[.zst]   or annotations/orch.jsonl
    annotations/orch.index.jsonl

A full chunk is sealed: `NNNNN.jsonl.zst` appears beside `NNNNN.jsonl`, then the plain file goes.
While both stand they hold the same lines, and one is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from traceage.errors import TraceError
from traceage.formats.content import stream_content

_CHUNK = re.compile(r"(\d+)\.jsonl(\.zst)?")


class _Annotation(msgspec.Struct):
    trace_id: str
    info: dict[str, Any] | None = None


class IndexRow(msgspec.Struct):
    """One episode of the stream, as its index tells it."""

    trace_ids: list[str]
    chunk: int
    offset: int
    """Where its line begins in the content of the chunk, in bytes."""
    id: str | None = None
    kind: str | None = None
    env: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class TraceStore:
    """A trace store by its root directory."""

    root: str

    @staticmethod
    def at(directory: str) -> TraceStore | None:
        """The store whose root is `directory`, or None."""
        has_stream = os.path.isdir(os.path.join(directory, "stream")) or any(
            os.path.exists(os.path.join(directory, "stream.jsonl" + end)) for end in ("", ".zst")
        )
        known = any(
            os.path.exists(os.path.join(directory, beside))
            for beside in ("stream.index.jsonl", "annotations")
        )
        return TraceStore(directory) if has_stream and known else None

    @staticmethod
    def holding(path: str) -> TraceStore | None:
        """The store that `path` is a chunk or the `stream` folder of, or None."""
        parent, name = os.path.split(os.path.abspath(path))
        if os.path.basename(parent) == "stream" and _CHUNK.fullmatch(name):
            return TraceStore.at(os.path.dirname(parent))
        if name == "stream" or re.fullmatch(r"stream\.jsonl(\.zst)?", name):
            return TraceStore.at(parent)
        return None

    def chunks(self) -> list[tuple[int, str]]:
        """Number and path of each chunk of the stream, in order; sealed where it stands twice."""
        return chunks_of(self.root, "stream")

    @cached_property
    def ship_steps(self) -> dict[str, int]:
        """The step of the batch that trained on each shipped trace, by trace id.

        Raises `TraceError` when an annotation cannot be read.
        """
        merged: dict[str, dict[str, Any]] = {}
        for row in self._orchestrator_rows():
            if row.info:
                _deep_merge(merged.setdefault(row.trace_id, {}), row.info)
        steps = {}
        for trace_id, info in merged.items():
            ship = info.get("ship")
            step = ship.get("step") if isinstance(ship, dict) else None
            if info.get("effective") is not False and type(step) is int:
                steps[trace_id] = step
        return steps

    def index_bytes(self) -> int:
        """The size of all annotation indexes, or streams: it grows when something is annotated."""
        folder = os.path.join(self.root, "annotations")
        total = 0
        for place, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError):  # sealed meanwhile
                    total += os.path.getsize(os.path.join(place, name))
        return total

    def _orchestrator_rows(self) -> Iterator[_Annotation]:
        annotations = os.path.join(self.root, "annotations")
        index = os.path.join(annotations, "orch.index.jsonl")
        if os.path.exists(index):
            paths = [index]
        else:
            paths = [path for _, path in chunks_of(annotations, "orch")]
        decode = msgspec.json.Decoder(_Annotation).decode
        for path in paths:
            for number, line, torn in lines_of(path):
                try:
                    yield decode(line)
                except (msgspec.DecodeError, ValueError) as error:
                    if torn:
                        break
                    raise TraceError(
                        f"{path}:{number}: not an annotation: {error}; repair or remove the line"
                    ) from None

    @cached_property
    def index_rows(self) -> list[IndexRow] | None:
        """The stream's index, in order of arrival; None where it is not there or not whole."""
        path = os.path.join(self.root, "stream.index.jsonl")
        decode = msgspec.json.Decoder(IndexRow).decode
        rows = []
        try:
            for _, line, torn in lines_of(path):
                try:
                    rows.append(decode(line))
                except (msgspec.DecodeError, ValueError):
                    if torn:
                        break
                    return None
        except FileNotFoundError:
            return None
        return rows


def lines_of(path: str, end: int | None = None) -> Iterator[tuple[int, bytes, bool]]:
    """The lines of a file that are not blank: number, text, and whether its newline is missing.

    With `end`, of its first `end` content bytes.
    """
    rest, number, at = b"", 0, 0
    for data in stream_content(path):
        data = data if end is None else data[: max(0, end - at)]
        at += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            number += 1
            if line.strip():
                yield number, line, False
    if rest.strip():
        yield number + 1, rest, True


def chunks_of(directory: str, name: str) -> list[tuple[int, str]]:
    found: dict[int, str] = {}
    folder = os.path.join(directory, name)
    if os.path.isdir(folder):
        for entry in sorted(os.listdir(folder)):
            # "00001.jsonl" sorts before "00001.jsonl.zst", which therefore wins.
            if match := _CHUNK.fullmatch(entry):
                found[int(match[1])] = os.path.join(folder, entry)
    chunks = sorted(found.items())
    for end in (".zst", ""):
        path = os.path.join(directory, f"{name}.jsonl{end}")
        if os.path.exists(path):
            return [(-1, path), *chunks]
    return chunks


def _deep_merge(into: dict[str, Any], newer: dict[str, Any]) -> None:
    for key, value in newer.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _deep_merge(old, value)
        else:
            into[key] = value
