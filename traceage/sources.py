"""What a user points at (files, directories, globs) -> the files that hold traces, in order.

A directory is walked. A trace store or a `rollouts/` folder in it is what a training run wrote:
then the traces are what lies there, and every other file is a side file. A directory without
either (an evaluation's output, say) is read for every JSONL file in it. Of two copies of one step,
what arrived (`all`) and what trained (`effective`), one is read.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from traceage.errors import TraceError
from traceage.formats.dump import dump_metadata
from traceage.formats.exports import ExportFile, export_files
from traceage.formats.platform import is_platform
from traceage.formats.trace_store import TraceStore
from traceage.workers import available_cores

Subset = Literal["effective", "all"]
Format = Literal["lines", "platform", "dump", "unknown"]
"""Lines of JSON; platform samples; our own dump; a Parquet file that is neither."""

WORTH_WORKERS = 150_000_000
"""Bytes of content below which starting workers takes longer than reading."""

_TRACES = re.compile(r".*\.(jsonl(\.gz|\.zst)?|parquet)")
_LINES = re.compile(r".*\.jsonl(\.gz|\.zst)?")
_SIDE_FILE = re.compile(r"metrics\.jsonl(\.gz|\.zst)?|.*\.index\.jsonl")
_SIDE_FOLDERS = {"token_exports", "live", "annotations"}
_STEP = re.compile(r"step[_=](\d+)")


@dataclass(frozen=True)
class SourceFile:
    """One file of traces and what its place tells about them."""

    path: str
    size: int
    step: int | None = None
    kind: str | None = None
    subset: str | None = None
    store: TraceStore | None = None
    chunk: int | None = None
    format: Format = "lines"
    cohort: str | None = None
    """What the file's run is known by, where its place does not tell."""
    named: bool = False
    """The user named this very file: it has to hold traces."""

    def exports(self) -> tuple[ExportFile, ...]:
        """The trainer's token exports of its step; what was evaluated was not trained on."""
        return () if self.kind == "eval" else export_files(self.path)


def find_files(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    subset: Subset | Literal["both"] | None = None,
) -> list[SourceFile]:
    """The files that hold traces in `sources`, each once, in order of step and name.

    Of two copies of a step the one of `subset` is taken, or, with `"both"`, both.

    Raises `TraceError` when a source does not exist, or holds no file of traces.
    """
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    found: dict[str, SourceFile] = {}
    for source in sources:
        for path in _expand(os.fspath(source)):
            files = list(_files_at(path))
            if not files:
                raise TraceError(
                    f"{path}: no file of traces in this directory; give a run directory, a folder "
                    "with .jsonl, .jsonl.gz or .jsonl.zst files, or a file"
                )
            for file in files:
                found.setdefault(os.path.realpath(file.path), file)
    if not found:
        raise TraceError("no source given; name a run directory, a file or a glob")
    return _choose_subset(list(found.values()), subset)


def workers_worth(files: Sequence[SourceFile]) -> int:
    """How many processes to read files of records with; 1 where starting more takes longer."""
    lines = [file for file in files if file.format in ("lines", "platform")]
    content = sum(f.size * (1 if f.path.endswith(".jsonl") else 6) for f in lines)
    return available_cores() if content >= WORTH_WORKERS else 1


def _expand(source: str) -> list[str]:
    if os.path.exists(source):
        return [source]
    matches = sorted(glob.glob(source, recursive=True), key=_natural)
    if not matches:
        what = "nothing matches this pattern" if glob.has_magic(source) else "no such file"
        raise TraceError(f"{source}: {what}; check the path")
    return matches


def _files_at(path: str) -> Iterator[SourceFile]:
    if not os.path.isdir(path):
        if (store := TraceStore.holding(path)) is not None:
            chunk = next((n for n, p in store.chunks() if _same(p, path)), None)
            yield _describe(path, store=store, chunk=chunk, named=True)
        else:
            yield _describe(path, named=True)
        return
    store = TraceStore.holding(path) or TraceStore.at(path)
    if store is not None:
        yield from _store_files(store)
        return
    loose: list[SourceFile] = []
    run: list[SourceFile] = []
    for folder, folders, names in os.walk(path):
        if folder != path and (store := TraceStore.at(folder)) is not None:
            run += _store_files(store)
            folders.clear()
            continue
        folders[:] = sorted(
            (f for f in folders if f not in _SIDE_FOLDERS and not f.startswith(".")), key=_natural
        )
        for name in sorted(names, key=_natural):
            if _TRACES.fullmatch(name) and not _SIDE_FILE.fullmatch(name):
                file = _describe(os.path.join(folder, name))
                in_rollouts = "rollouts" in os.path.abspath(file.path).split(os.sep)
                mine = file.format == "dump" or (file.step is not None and in_rollouts)
                (run if mine else loose).append(file)
    yield from run or loose


def _store_files(store: TraceStore) -> Iterator[SourceFile]:
    for chunk, path in store.chunks():
        yield _describe(path, store=store, chunk=chunk)


def _describe(
    path: str, store: TraceStore | None = None, chunk: int | None = None, named: bool = False
) -> SourceFile:
    try:
        size = os.path.getsize(path)
    except FileNotFoundError:
        path += ".zst"  # sealed since the directory was listed
        size = os.path.getsize(path)
    if store is not None:
        return SourceFile(path, size, store=store, chunk=chunk, named=named)
    step = kind = subset = None
    for part in os.path.abspath(path).split(os.sep)[:-1]:
        if match := _STEP.fullmatch(part):
            step, kind, subset = int(match[1]), None, None
        elif step is not None and part in ("train", "eval"):
            kind = part
        elif step is not None and part in ("effective", "all"):
            subset = part
    file = SourceFile(path, size, step, kind, subset, named=named)
    if _LINES.fullmatch(os.path.basename(path)):
        return file
    with open(path, "rb") as opened:
        return _describe_parquet(file) if opened.read(4) == b"PAR1" else file


def _describe_parquet(file: SourceFile) -> SourceFile:
    import polars as pl

    try:
        metadata = pl.read_parquet_metadata(file.path)
    except pl.exceptions.PolarsError as error:
        raise TraceError(f"{file.path}: damaged Parquet file: {error}; restore it") from None
    try:
        kept = dump_metadata(metadata)
    except ValueError as error:
        raise TraceError(f"{file.path}: {error}") from None
    if kept is not None:
        return replace(
            file,
            step=kept.step,
            kind=kept.kind,
            subset=kept.subset,
            cohort=kept.cohort,
            format="dump",
        )
    import pyarrow.parquet as pq

    schema = pq.read_schema(file.path)
    if is_platform(schema):
        return replace(file, step=None, kind=None, subset=None, format="platform")
    if file.named:
        raise TraceError(
            f"{file.path}: neither a dump of traceage nor platform samples, but a Parquet file "
            f"with the columns {', '.join(schema.names[:8])}; give a file of traces"
        )
    return replace(file, format="unknown")


def _choose_subset(
    files: Sequence[SourceFile], subset: Subset | Literal["both"] | None
) -> list[SourceFile]:
    """One copy of each run's steps: the one asked for, else `effective` where a run has both."""
    if subset == "both":
        return list(files)
    if subset is not None:
        chosen = [file for file in files if file.subset in (None, subset)]
        if not chosen:
            raise TraceError(
                f"{files[0].path}: none of the {len(files)} files is of the subset {subset!r}; "
                "ask for the other"
            )
        return chosen
    # By run and not by step: the newest step may have arrivals and no batch yet.
    trained = {(cohort_of(file), file.kind) for file in files if file.subset == "effective"}
    return [f for f in files if f.subset != "all" or (cohort_of(f), f.kind) not in trained]


def cohort_of(file: SourceFile) -> str:
    """What the run of a file is known by: where its steps lie."""
    if file.cohort is not None:
        return file.cohort
    return re.split(r"[\\/]step[_=]\d+(?=[\\/])", os.path.abspath(file.path))[0]


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which step_9 comes before step_10."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]
