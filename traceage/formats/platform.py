"""The platform's sample Parquet: a row an episode, whose record stands as JSON in `info`.

`step` is the batch that trained on the episode. `info.native_wrapper` holds the complete episode
record; the platform drops it from an episode over its size limit, whose tokens can then not be
recovered. Such rows are counted and reported.
"""

from __future__ import annotations

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
        try:
            record = bytes(_decode(info).native_wrapper) if info else b"null"
        except msgspec.DecodeError:
            record = info.encode()  # whoever reads it as a record will say what is wrong
        yield (None if record == b"null" else record), step
