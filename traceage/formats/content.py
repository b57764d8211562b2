"""Files, plain or compressed -> stretches of their content.

A plain file and a seekable zstd file (independent frames and a table of them at the end) can be
entered anywhere. A gzip file, or a zstd file without a table, can only be read from its start.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import BinaryIO, Literal

from traceage.errors import TraceError

Compression = Literal["plain", "gzip", "zstd"]

SEEKABLE_MAGIC = 0x8F92EAB1
SKIPPABLE_MAGIC = 0x184D2A5E
_FOOTER = struct.Struct("<IBI")


class DamagedFile(TraceError):
    """Compressed data that end early or cannot be decompressed."""

    def __init__(self, path: str, found: str) -> None:
        super().__init__(f"{path}: {found}; {FIX_DAMAGED}")
        self.found = found


FIX_DAMAGED = "wait until the file is written, or restore it"


def compression_of(file: BinaryIO) -> Compression:
    """How a file is compressed, by its first bytes."""
    file.seek(0)
    magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return "gzip"
    if magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[:1] >= b"\x50"):
        return "zstd"
    return "plain"


def open_or_sealed(path: str) -> BufferedReader:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        return open(path + ".zst", "rb")


def read_content(path: str, start: int, end: int) -> bytes:
    """Content bytes `[start, end)` of a plain or seekable file, fewer at the end of the file.

    A plain file that has been sealed in the meantime is read from its sealed successor.
    """
    buffer = bytearray(max(0, end - start))
    return bytes(memoryview(buffer)[: read_into(buffer, path, start, end)])


def read_into(buffer: bytearray, path: str, start: int, end: int) -> int:
    """As `read_content`, into a buffer that is large enough; how many bytes were read.

    Fresh memory costs as much as reading into it, so whoever reads much reads into old memory.
    """
    with open_or_sealed(path) as file, memoryview(buffer)[: max(0, end - start)] as room:
        frames = seek_table(file)
        if frames is None:
            file.seek(start)
            return file.readinto(room)
        inside = [f for f in frames if f.start < end and f.start + f.size > start]
        if not inside:
            return 0
        file.seek(inside[0].stored_start)
        stored = file.read(inside[-1].stored_start + inside[-1].stored_size - file.tell())
        first = inside[0].start
        content = _decompress(path, stored, inside[-1].start + inside[-1].size - first)
        wanted = content[start - first : end - first]
        room[: len(wanted)] = wanted
        return len(wanted)


def _decompress(path: str, stored: bytes, size: int) -> memoryview:
    import pyarrow as pa

    try:
        return memoryview(pa.Codec("zstd").decompress(stored, size)).cast("B")
    except OSError as error:
        raise DamagedFile(path, f"damaged zstd frames: {error}") from None


@dataclass(frozen=True)
class Frame:
    """One independent zstd frame: where its content lies, and where it is stored."""

    start: int
    size: int
    stored_start: int
    stored_size: int


def seek_table(file: BinaryIO) -> list[Frame] | None:
    """The frames of a seekable zstd file, or None for any other file.

    The format: zstd/contrib/seekable_format, version 0.1.0.
    """
    size = file.seek(0, os.SEEK_END)
    if size < 8 + _FOOTER.size:
        return None
    file.seek(size - _FOOTER.size)
    count, descriptor, magic = _FOOTER.unpack(file.read(_FOOTER.size))
    entry = 12 if descriptor & 0x80 else 8
    table = 8 + count * entry + _FOOTER.size
    if magic != SEEKABLE_MAGIC or table > size:
        return None
    file.seek(size - table)
    raw = file.read(table - _FOOTER.size)
    header, length = struct.unpack_from("<II", raw)
    if header != SKIPPABLE_MAGIC or length != table - 8:
        return None
    frames, content, stored = [], 0, 0
    for at in range(8, len(raw), entry):
        stored_size, content_size = struct.unpack_from("<II", raw, at)
        frames.append(Frame(content, content_size, stored, stored_size))
        content += content_size
        stored += stored_size
    return frames if stored + table == size else None


def stream_content(path: str, block: int = 16 << 20) -> Iterator[bytes]:
    """The content of a gzip, zstd or plain file from its start, `block` bytes at a time.

    Raises `DamagedFile` when the compressed data end early or are damaged.
    """
    with open(path, "rb") as opened:
        compression = compression_of(opened)
    try:
        if compression == "zstd":
            import pyarrow as pa

            with pa.CompressedInputStream(pa.OSFile(path), "zstd") as stream:
                while data := stream.read(block):
                    yield data
        else:
            with gzip.open(path) if compression == "gzip" else open(path, "rb") as file:
                while data := file.read(block):
                    yield data
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise DamagedFile(path, f"damaged or unfinished {compression} data: {error}") from None
