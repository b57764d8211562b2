"""Writes prime-rl's trace store: a stream of episodes, and annotations of what is learned later.

    monitors/file/traces/stream/NNNNN.jsonl[.zst]                    stream.index.jsonl
    monitors/file/traces/annotations/<producer>/NNNNN.jsonl[.zst]    <producer>.index.jsonl
    monitors/file/metrics.jsonl

Everything is a log that only grows. A line is written before its index row, so a crash leaves at
most a torn last line and a line without a row; opening the store again cuts off the one and writes
the other. A line that cannot be written (a full disk) is not there at all. A chunk that is full is
sealed: compressed beside itself into independent zstd frames with a seek table, renamed when whole,
and only then removed in its plain form.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import pyarrow as pa

from traceage.formats.content import SEEKABLE_MAGIC, SKIPPABLE_MAGIC, stream_content

Record = dict[str, Any]

CHUNK_BYTES = 5 << 30
FRAME_BYTES = 4 << 20
DECIMALS = 4
KL_DECIMALS = 6


class TraceStoreWriter:
    """The trace store of a run directory; opening one that stands goes on with it.

    Use it as a context manager: leaving it seals the newest chunks, as a finished run does.
    """

    def __init__(
        self, run_dir: Path, *, chunk_bytes: int = CHUNK_BYTES, frame_bytes: int = FRAME_BYTES
    ) -> None:
        self.root = run_dir / "monitors" / "file" / "traces"
        self._sizes = chunk_bytes, frame_bytes
        self._sealer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="seal")
        self._stream = _Log(self.root / "stream", self._sizes, self._sealer, _stream_row)
        self._producers: dict[str, _Log] = {}
        for folder in (self.root / "annotations").glob("*/"):
            self._producer(folder.name)

    def append(
        self,
        episode: Mapping[str, Any],
        *,
        dispatch_step: int,
        arrival_step: int,
        dispatch_time: float,
        arrival_time: float,
        kind: str = "train",
    ) -> None:
        """An episode arrived: its traces are stamped with when, and it goes to the stream."""
        stamps = {
            "kind": kind,
            "dispatch": {"step": dispatch_step, "time": dispatch_time},
            "arrival": {"step": arrival_step, "time": arrival_time},
        }
        traces = [
            {
                **trace,
                "info": {**(trace.get("info") or {}), **stamps},
                "nodes": [_rounded(node) for node in trace["nodes"]],
            }
            for trace in episode["traces"]
        ]
        self._stream.append({**episode, "traces": traces})

    def annotate(
        self,
        producer: str,
        trace_id: str,
        info: Mapping[str, Any],
        branches: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """A producer (`orch`, `trainer`) learned something about a trace.

        `info` is merged onto what is known of the trace. Each branch has its `index` and streams as
        long as its token ids, None where a token has no value.
        """
        self._producer(producer).append(
            {
                "version": 1,
                "trace_id": trace_id,
                "info": dict(info),
                "branches": [_rounded(branch) for branch in branches],
            }
        )

    def _producer(self, name: str) -> _Log:
        if name not in self._producers:
            folder = self.root / "annotations" / name
            self._producers[name] = _Log(folder, self._sizes, self._sealer, _annotation_row)
        return self._producers[name]

    def close(self) -> None:
        """Seal every chunk, and wait until that is done; a store that is closed stays so."""
        for log in (self._stream, *self._producers.values()):
            log.close()
        self._sealer.shutdown(wait=True)
        for log in (self._stream, *self._producers.values()):
            log.raise_failure()

    def __enter__(self) -> TraceStoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsLog:
    """A run's `monitors/file/metrics.jsonl`: a row a log call.

    A run that was resumed may have logged a step twice; the later row is the one that counts.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "monitors" / "file" / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)

    def log(self, step: int | None, metrics: Mapping[str, Any], producer: str = "orch") -> None:
        """Append one row."""
        row = {"step": step, "time": time.time(), "producer": producer, "metrics": dict(metrics)}
        with self.path.open("ab", buffering=0) as file:
            _append_whole(file, _line(row))


class _Log:
    """A chunked log and its index."""

    def __init__(
        self,
        folder: Path,
        sizes: tuple[int, int],
        sealer: ThreadPoolExecutor,
        index_row: Callable[[Record, int], Record],
    ) -> None:
        self.folder = folder
        self.index_path = folder.with_name(f"{folder.name}.index.jsonl")
        self.chunk_bytes, self.frame_bytes = sizes
        self.sealer = sealer
        self.index_row = index_row
        self.sealing: list[Future[None]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._recover()
        self.file = self._plain().open("ab", buffering=0)
        self.index = self.index_path.open("ab", buffering=0)

    def append(self, record: Record) -> None:
        line = _line(record)
        if self.file.closed:
            raise ValueError(f"{self.folder} is closed")
        if self.file.tell() and self.file.tell() + len(line) > self.chunk_bytes:
            self.file.close()
            self._seal_later(self.chunk)
            self.chunk += 1
            self.file = self._plain().open("ab", buffering=0)
        offset = self.file.tell()
        _append_whole(self.file, line)
        try:
            self._append_index(record, self.chunk, offset)
        except OSError:
            _cut(self.file, offset)
            raise

    def _append_index(self, record: Record, chunk: int, offset: int) -> None:
        row = {**self.index_row(record, self.lines + 1), "chunk": chunk, "offset": offset}
        _append_whole(self.index, _line(row))
        self.lines += 1

    def close(self) -> None:
        """Seal the newest chunk too."""
        if self.file.closed:
            return
        self.file.close()
        self.index.close()
        if self._plain().stat().st_size:
            self._seal_later(self.chunk)
        else:
            self._plain().unlink()

    def raise_failure(self) -> None:
        for future in self.sealing:
            future.result()

    def _plain(self, chunk: int | None = None) -> Path:
        return self.folder / f"{self.chunk if chunk is None else chunk:05d}.jsonl"

    def _seal_later(self, chunk: int) -> None:
        self.sealing.append(self.sealer.submit(seal, self._plain(chunk), self.frame_bytes))

    def _recover(self) -> None:
        """Put right what a dead run left: half a line, a line not in the index, half a seal."""
        for unfinished in self.folder.glob("*.tmp"):
            unfinished.unlink()
        sealed = {int(path.name[:5]) for path in self.folder.glob("?????.jsonl.zst")}
        plain = {int(path.name[:5]) for path in self.folder.glob("?????.jsonl")}
        for chunk in sealed & plain:
            self._plain(chunk).unlink()
        plain -= sealed
        self.chunk = max(max(plain, default=0), max(sealed, default=-1) + 1)
        for path in (self.index_path, *map(self._plain, plain)):
            _cut_torn_line(path)
        self.lines, known = 0, (-1, -1)
        sizes = {chunk: self._plain(chunk).stat().st_size for chunk in plain}
        if self.index_path.exists():
            keep = 0
            with self.index_path.open("rb") as rows:
                for text in rows:
                    row = json.loads(text)
                    where = row["chunk"], row["offset"]
                    # A machine that went down may have kept a row and lost its line.
                    if where[0] > self.chunk or where[1] >= sizes.get(where[0], where[1] + 1):
                        break
                    self.lines, known, keep = self.lines + 1, where, keep + len(text)
            os.truncate(self.index_path, keep)
        # Rows follow their lines, so what is missing is at the end; where no chunk follows that of
        # the last row, and it is sealed, it is read for nothing, once.
        with self.index_path.open("ab", buffering=0) as self.index:
            for chunk in sorted(plain | sealed):
                if chunk >= known[0]:
                    offset = 0
                    for line in self._lines(chunk):
                        if (chunk, offset) > known:
                            self._append_index(json.loads(line), chunk, offset)
                        offset += len(line)
        for chunk in plain - {self.chunk}:
            self._seal_later(chunk)

    def _lines(self, chunk: int) -> Iterator[bytes]:
        """The lines of a chunk, plain or sealed, with their newlines."""
        rest = b""
        plain = self._plain(chunk)
        path = plain if plain.exists() else plain.with_name(f"{plain.name}.zst")
        for data in stream_content(str(path)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line + b"\n"


def seal(plain: Path, frame_bytes: int = FRAME_BYTES) -> None:
    """Compress a chunk into independent zstd frames with a seek table, and remove the plain file.

    The table is a skippable frame at the end: a pair of compressed and content size a frame, the
    number of frames, a descriptor (0: no checksums) and a magic number, as zstd's seekable format
    has it (https://github.com/facebook/zstd/blob/dev/contrib/seekable_format).
    """
    sealed = plain.with_name(f"{plain.name}.zst")
    unfinished = sealed.with_name(f"{sealed.name}.tmp")
    codec = pa.Codec("zstd")
    table = []
    with plain.open("rb") as source, unfinished.open("wb") as target:
        while content := source.read(frame_bytes):
            frame = codec.compress(content, asbytes=True)
            target.write(frame)
            table.append(struct.pack("<II", len(frame), len(content)))
        entries = b"".join(table) + struct.pack("<IBI", len(table), 0, SEEKABLE_MAGIC)
        target.write(struct.pack("<II", SKIPPABLE_MAGIC, len(entries)) + entries)
        target.flush()
        os.fsync(target.fileno())
    unfinished.rename(sealed)
    plain.unlink()


def _stream_row(episode: Record, number: int) -> Record:
    traces = episode["traces"]
    return {
        "line": number,
        "id": episode["id"],
        "kind": traces[0]["info"]["kind"] if traces else None,
        "trace_ids": [trace["id"] for trace in traces],
        "env": (episode.get("env") or {}).get("name"),
        "group": (episode.get("group") or {}).get("id"),
        "ok": episode.get("ok"),
    }


def _annotation_row(annotation: Record, number: int) -> Record:
    return {"trace_id": annotation["trace_id"], "info": annotation["info"]}


def _rounded(streams: Mapping[str, Any]) -> Record:
    """A node or branch with its streams of floats rounded, as the format has them."""
    out = dict(streams)
    for name, values in streams.items():
        if isinstance(values, list) and any(type(value) is float for value in values):
            decimals = KL_DECIMALS if name == "mismatch_kl" else DECIMALS
            out[name] = [None if value is None else round(value, decimals) for value in values]
    return out


def _line(row: Record) -> bytes:
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def _append_whole(file: FileIO, line: bytes) -> None:
    """Write a line, or on an error leave the file as it was."""
    offset = file.tell()
    try:
        written = 0
        while written < len(line):
            written += file.write(line[written:])
    except OSError:
        _cut(file, offset)
        raise


def _cut(file: FileIO, offset: int) -> None:
    file.truncate(offset)
    file.seek(offset)


def _cut_torn_line(path: Path) -> None:
    """Cut off a last line that was not written to its end."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep, block = end, 1 << 16
        while keep:
            start = max(0, keep - block)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep != end:
            file.truncate(keep)
