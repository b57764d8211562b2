"""A file appears whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path`, to write to; it takes the place of `path` at the end.

    When the block fails, or is interrupted, the temporary file goes and an older `path` stays. A
    link keeps pointing where it did. Raises `IsADirectoryError` when `path` is a directory.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/result.txt") as part:
    ...         written = part.write_text("whole")
    ...     os.listdir(folder)
    ['result.txt']
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"cannot write to {path}: it is a directory")
    part = target.with_name(f".traceage-{secrets.token_hex(8)}.tmp")
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
