"""Files of lines -> blocks: each file cut into parts that worker processes read on their own.

A part is read from the first line that begins in it to the last newline in it. The two ends go
back to the reader, which joins the end of one part to the beginning of the next, so nothing is
read or decompressed twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from traceage.formats import platform
from traceage.formats.content import (
    DamagedFile,
    compression_of,
    open_or_sealed,
    read_into,
    seek_table,
    stream_content,
)
from traceage.formats.records import Block, RecordReader, What

PART_BYTES = 24 << 20
"""Content a worker is given at a time."""


@dataclass(frozen=True)
class Part:
    """A stretch of one file's content: what one worker reads at a time."""

    path: str
    what: What
    start: int = 0
    end: int = 0
    """Content bytes `[start, end)`, for a file that can be entered anywhere."""
    data: bytes | None = None
    """The content itself, where the file can only be read from its start."""
    goes_on: bool = False
    """With `data`: it goes on from the part before."""
    whole: bool = False
    """Read the whole file, whatever its compression."""
    line: int | None = None
    """Where the part begins at the start of a line and does not go on from the part before: the
    number of lines before it in its file."""
    stored: int = 0
    """Bytes it takes on disk, roughly; for progress."""
    damaged: str | None = None
    """What is wrong with the compressed data from here on."""
    row_group: int | None = None
    """Read the episodes of this row group of a platform's Parquet file."""

    @property
    def begins_line(self) -> bool:
        """Whether its first byte is the first of a line, whatever came before."""
        return self.line is not None or (self.start == 0 and not self.goes_on)


@dataclass
class PartRead:
    """The lines that lie wholly in a part, and the pieces of lines at its ends."""

    head: bytes | None
    """Up to the first newline of the part; all of it where there is none. None where the part
    begins with a line."""
    tail: bytes | None
    """From the last newline of the part on; None where the part holds no newline."""
    block: Block
    damaged: str | None = None
    """Why the part, and with it the rest of its file, cannot be read."""


def read_part(part: Part) -> PartRead:
    """Read one part; runs in a worker process."""
    if part.damaged is not None:
        return PartRead(None, None, Block(), part.damaged)
    if part.row_group is not None:
        return _read_row_group(part, part.row_group)
    data: bytes | bytearray
    try:
        if part.data is not None:
            data = part.data
            end = len(data)
        elif part.whole:
            data = b"".join(stream_content(part.path))
            end = len(data)
        else:
            data = _buffer
            data.extend(bytes(max(0, part.end - part.start - len(data))))
            end = read_into(data, part.path, part.start, part.end)
    except DamagedFile as error:
        return PartRead(None, None, Block(), error.found)
    reader = RecordReader(part.what)
    first = data.find(b"\n", 0, end)
    if first < 0:
        return PartRead(bytes(data[:end]), None, reader.finish())
    last = data.rfind(b"\n", 0, end) + 1
    at, head = 0, None
    if part.begins_line:
        at = len(_BOM) if part.start == 0 and data.startswith(_BOM) else 0
    else:
        at, head = first + 1, bytes(data[:first])
    while at < last:
        newline = data.find(b"\n", at, end)
        reader.read(data, at, newline)
        at = newline + 1
    return PartRead(head, bytes(data[last:end]), reader.finish())


_buffer = bytearray()
"""Where a process reads parts into, one after the other."""

_BOM = b"\xef\xbb\xbf"


def _read_row_group(part: Part, row_group: int) -> PartRead:
    reader = RecordReader(part.what)
    block = reader.block
    for record, step in platform.records(part.path, row_group):
        before = len(block.units)
        if record is None:
            block.lines += 1
            block.without_record += 1
            continue
        reader.read(record, 0, len(record))
        block.units[before:] = [unit._replace(ship_step=step) for unit in block.units[before:]]
    return PartRead(None, b"", reader.finish())


def platform_parts(path: str, what: What) -> Iterator[Part]:
    """The parts of a platform's Parquet file, in order; its rows count as lines."""
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(path)
    rows = 0
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).total_byte_size
        yield Part(path, what, row_group=group, line=rows, stored=size)
        rows += metadata.row_group(group).num_rows


def parts_of(path: str, what: What, first_bytes: int = PART_BYTES) -> Iterator[Part]:
    """The parts of a file of lines, in order. A plain file is taken as long as it is now.

    The first part is of about `first_bytes`, and each one of twice as many as that before it, up to
    `PART_BYTES`.
    """
    most = min(first_bytes, PART_BYTES)
    with open_or_sealed(path) as file:
        compression = compression_of(file)
        frames = seek_table(file) if compression == "zstd" else None
        size = file.seek(0, os.SEEK_END)
    if frames is not None:
        start, stored = 0, 0
        for frame in frames:
            end, stored = frame.start + frame.size, stored + frame.stored_size
            if end - start >= most or frame is frames[-1]:
                yield Part(path, what, start, end, stored=stored)
                start, stored = end, 0
                most = min(2 * most, PART_BYTES)
    elif compression == "plain":
        start = 0
        while start < size:
            end = min(size, start + most)
            yield Part(path, what, start, end, stored=end - start)
            start = end
            most = min(2 * most, PART_BYTES)
    elif size <= PART_BYTES // 2:
        yield Part(path, what, whole=True, stored=size)
    else:
        try:
            for number, data in enumerate(stream_content(path)):
                yield Part(path, what, data=data, goes_on=number > 0, stored=len(data) // 4)
        except DamagedFile as error:
            yield Part(path, what, damaged=error.found)
