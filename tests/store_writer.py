"""Writes a trace store the way a training run does, one move at a time.

Records and annotations go to chunked logs; each move leaves the directory as a reader could find
it at that moment, the awkward ones included: a chunk both plain and sealed, a line half written,
an index behind its log, a run that went on after a restart.

    monitors/file/traces/stream/NNNNN.jsonl[.zst]      stream.index.jsonl
    monitors/file/traces/annotations/<producer>/NNNNN.jsonl[.zst]      <producer>.index.jsonl
    monitors/file/traces/live/...
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Literal, NamedTuple

import zstandard
from reference import Record

SKIPPABLE_MAGIC = 0x184D2A5E
SEEKABLE_MAGIC = 0x8F92EAB1


def seekable_zstd(data: bytes, frame_size: int) -> bytes:
    """`data` as independent zstd frames of `frame_size` bytes of content, then a seek table.

    The table is a skippable frame: one (compressed size, content size) pair a frame, the number
    of frames, a descriptor byte (0: no checksums) and a magic number.
    """
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=False)
    out = b""
    entries = b""
    count = 0
    for start in range(0, len(data), frame_size):
        content = data[start : start + frame_size]
        frame = compressor.compress(content)
        out += frame
        entries += struct.pack("<II", len(frame), len(content))
        count += 1
    table = entries + struct.pack("<IBI", count, 0, SEEKABLE_MAGIC)
    return out + struct.pack("<II", SKIPPABLE_MAGIC, len(table)) + table


class SeekTable(NamedTuple):
    """What the end of a seekable zstd file says: the sizes of its frames."""

    compressed: list[int]
    content: list[int]


def read_seek_table(data: bytes) -> SeekTable:
    """The seek table at the end of a seekable zstd file, checked against the file's size."""
    count, descriptor, magic = struct.unpack("<IBI", data[-9:])
    assert (descriptor, magic) == (0, SEEKABLE_MAGIC)
    size = 8 * count + 9
    skippable, length = struct.unpack("<II", data[-size - 8 : -size])
    assert (skippable, length) == (SKIPPABLE_MAGIC, size)
    pairs = list(struct.iter_unpack("<II", data[-size:-9]))
    table = SeekTable([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    assert sum(table.compressed) + size + 8 == len(data)
    return table


def to_line(row: Record) -> bytes:
    """One compact line. Text stays raw, so lines hold U+2028 and the like unescaped."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


class Log:
    """A chunked log and its index; `one_file` is the older layout without chunks."""

    def __init__(self, folder: Path, *, one_file: bool = False, frame_size: int = 700) -> None:
        self.folder = folder
        self.one_file = one_file
        self.frame_size = frame_size
        self.index = folder.with_name(f"{folder.name}.index.jsonl")
        self.chunk = 0
        if one_file:
            folder.parent.mkdir(parents=True, exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            # A relaunched run goes on in the chunk that is still plain, or opens the next one.
            numbers = [int(path.name[:5]) for path in folder.glob("?????.jsonl*")]
            self.chunk = max(numbers, default=0)
            if self.sealed().exists():
                self.chunk += 1
        # A half line that a dead run left is cut off, or the next one would be glued to it.
        for path in (self.plain(), self.index):
            if path.exists():
                data = path.read_bytes()
                path.write_bytes(data[: data.rfind(b"\n") + 1])

    def plain(self, chunk: int | None = None) -> Path:
        """The path of a chunk (the newest unless told) while it is not compressed."""
        if self.one_file:
            return self.folder.with_name(f"{self.folder.name}.jsonl")
        return self.folder / f"{self.chunk if chunk is None else chunk:05d}.jsonl"

    def sealed(self, chunk: int | None = None) -> Path:
        """The path of a chunk once it is sealed."""
        plain = self.plain(chunk)
        return plain.with_name(plain.name + ".zst")

    def append(self, row: Record) -> Record:
        """Write a line; returns where it stands, as an index row says it."""
        path = self.plain()
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            file.write(to_line(row))
        return {"chunk": self.chunk, "offset": offset}

    def append_index(self, row: Record) -> None:
        with self.index.open("ab") as file:
            file.write(to_line(row))

    def roll(self) -> None:
        """Leave the newest chunk behind; the next line opens another."""
        assert not self.one_file
        if self.plain().exists():
            self.chunk += 1

    def seal(self, *chunks: int, stop_at: Literal["written", "renamed", "done"] = "done") -> None:
        """Compress chunks: write a .tmp, rename it, remove the plain file; or stop before."""
        for chunk in chunks:
            plain, sealed = self.plain(chunk), self.sealed(chunk)
            unfinished = sealed.with_name(sealed.name + ".tmp")
            unfinished.write_bytes(seekable_zstd(plain.read_bytes(), self.frame_size))
            if stop_at != "written":
                unfinished.rename(sealed)
            if stop_at == "done":
                plain.unlink()


def tear(path: Path, drop: int) -> None:
    """Cut a file inside its last line, as a reader finds it while that line is being written."""
    data = path.read_bytes()
    last = data[:-1].rfind(b"\n") + 1
    assert 1 <= drop < len(data) - last, "the cut has to fall inside the last line"
    path.write_bytes(data[:-drop])


class StoreWriter:
    """The trace store of one run directory.

    Opening a directory that holds a store already is a relaunch: the writer goes on where the
    last one stopped.
    """

    def __init__(
        self, run_dir: Path, *, one_file: bool = False, indexed: bool = True, frame_size: int = 700
    ) -> None:
        self.run_dir = run_dir
        self.root = run_dir / "monitors" / "file" / "traces"
        self.one_file = one_file
        self.indexed = indexed
        self.frame_size = frame_size
        self.stream = Log(self.root / "stream", one_file=one_file, frame_size=frame_size)
        self.producers: dict[str, Log] = {}
        index = self.stream.index
        self.lines = index.read_bytes().count(b"\n") if index.exists() else 0

    def producer(self, name: str) -> Log:
        """The log of an annotation producer."""
        if name not in self.producers:
            self.producers[name] = Log(
                self.root / "annotations" / name,
                one_file=self.one_file,
                frame_size=self.frame_size,
            )
        return self.producers[name]

    def append(self, *episodes: Record, arrival: int, kind: str = "train") -> None:
        """Episodes arrive: their traces are stamped, the stream and its index grow."""
        for episode in episodes:
            self._append(json.loads(json.dumps(episode)), arrival, kind)

    def _append(self, episode: Record, arrival: int, kind: str) -> None:
        traces = episode.get("traces", [episode])
        for trace in traces:
            info = trace.get("info") or {}
            trace["info"] = {
                **info,
                "kind": kind,
                "dispatch": {"step": max(0, arrival - 1), "time": 1.0},
                "arrival": {"step": arrival, "time": 2.0},
            }
        where = self.stream.append(episode)
        self.lines += 1
        if self.indexed:
            self.stream.append_index(
                {
                    "line": self.lines,
                    "id": episode["id"],
                    "kind": kind,
                    "trace_ids": [trace["id"] for trace in traces],
                    "env": (episode.get("env") or {}).get("name"),
                    "group": (episode.get("group") or {}).get("id"),
                    "ok": True,
                    **where,
                }
            )

    def annotate(
        self,
        trace_id: str,
        info: Record,
        *,
        producer: str = "orch",
        branches: list[Record] | None = None,
    ) -> None:
        """A producer says what it learned about a trace."""
        log = self.producer(producer)
        word: dict[str, Any] = {"version": 1, "trace_id": trace_id, "info": info}
        word["branches"] = branches or []
        where = log.append(word)
        if self.indexed:
            log.append_index({"trace_id": trace_id, "info": info, **where})

    def ship(self, step: int, *trace_ids: str, producer: str = "orch") -> None:
        """A batch takes the traces."""
        for trace_id in trace_ids:
            self.annotate(
                trace_id,
                {"effective": True, "ship": {"step": step, "time": 3.0}, "advantage": 0.5},
                producer=producer,
                branches=[{"index": 0, "advantages": [0.5, 0.5]}],
            )

    def write_live(self, trace: Record) -> None:
        """A rollout in flight, which is no finished trace yet."""
        live = self.root / "live"
        live.mkdir(parents=True, exist_ok=True)
        with (live / "00000.jsonl").open("ab") as file:
            file.write(to_line({"id": f"{trace['id']}-live", "traces": [trace]}))
            file.write(to_line(trace))
        (live / f"{trace['id']}.json").write_bytes(to_line(trace))

    def write_metrics(self, step: int | None, metrics: Record) -> None:
        """A side file of the run: what was logged."""
        path = self.run_dir / "monitors" / "file" / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(to_line({"step": step, "time": 4.0, "producer": "orch", "metrics": metrics}))

    def relaunch(self) -> StoreWriter:
        """The run dies and comes back: a new writer over what stands on disk."""
        return StoreWriter(
            self.run_dir,
            one_file=self.one_file,
            indexed=self.indexed,
            frame_size=self.frame_size,
        )
