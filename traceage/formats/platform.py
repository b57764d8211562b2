"""The platform's sample Parquet: a row an episode, whose record stands as JSON in `info`.

`step` is the batch that trained on the episode. `info.native_wrapper` holds the complete episode
record; the platform drops it from an episode over its size limit, whose tokens can then not be
recovered. Such rows are counted and reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = frozenset({"step", "info", "env_name", "trajectory"})
"""Columns by which such a file is known."""


class _Info(msgspec.Struct):
    native_wrapper: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Info).decode


def is_platform(schema: pa.Schema) -> bool:
    """Whether a Parquet file of this schema holds platform samples."""
    return set(schema.names) >= COLUMNS


def records(path: str, row_group: int) -> Iterator[tuple[bytes | None, int | None]]:
    """The record of each row, None where the platform dropped it, and the step of its batch."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        table = file.read_row_group(row_group, columns=["step", "info"])
    steps = table["step"].to_pylist()
    for step, info in zip(steps, table["info"].to_pylist(), strict=True):
        yield _record(info), step


def _record(info: str | None) -> bytes | None:
    """The episode record in a row's `info`; None where the platform dropped it."""
    if not info:
        return None
    try:
        record = bytes(_decode(info).native_wrapper)
    except msgspec.DecodeError:
        # A bare NaN, say: the reader of records can make something of it, or say what is wrong.
        try:
            found = json.loads(info)
        except ValueError:
            return info.encode("utf-8", "replace")
        wrapper = found.get("native_wrapper") if isinstance(found, dict) else None
        record = json.dumps(wrapper).encode()
    return None if record == b"null" else record
