"""A file appears whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_target(path: str | os.PathLike[str]) -> Path:
    """Where a file `path` would be written, links followed.

    Raises `FileNotFoundError` when its folder is not there, `IsADirectoryError` when it is one.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write to {path}: no directory {target.parent}")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write to {path}: it is a directory")
    return target


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path`, to write to; it takes the place of `path` at the end.

    When the block fails, or is interrupted, the temporary file goes and an older `path` stays. A
    link keeps pointing where it did. Raises as `check_target`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(f"{folder}/result.txt") as part:
    ...         written = part.write_text("whole")
    ...     os.listdir(folder)
    ['result.txt']
    """
    target = check_target(path)
    part = target.with_name(f".traceage-{secrets.token_hex(8)}.tmp")
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
