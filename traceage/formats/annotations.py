"""A trace store's annotations: what was learned of a trace's tokens after it was written.

Once a batch has taken a trace, producers (the orchestrator, the trainer, ...) append what they know
of its tokens: for each branch, streams of one value a token. `AnnotationReader` finds the
annotations of one trace; `fold` puts their streams onto the trace's nodes, as if they had been
stamped there when the trace was recorded.

Layout, below the root of the store, a set of files a producer:

    annotations/<producer>/NNNNN.jsonl[.zst]   or, in early runs, annotations/<producer>.jsonl[.zst]
    annotations/<producer>.index.jsonl         which chunk holds a trace's line, at which byte
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from traceage.errors import TraceError
from traceage.formats.content import read_content, seek_table, stream_content
from traceage.formats.trace_store import chunks_of

_BLOCK = 4 << 20
"""Content bytes read at a time. The frames of a sealed chunk hold as many, so that reading a block
decompresses one frame."""
_KEPT = 16
"""Blocks that stay in memory: the traces of a batch are annotated in another order than they
arrived in."""
_ONE_FILE = -1
"""Stands for a chunk's number where the producer wrote one file."""
_MAY_LACK_VALUES = frozenset({"is_masked"})
"""Streams that say nothing of some sampled tokens by design."""
_FILE = re.compile(r"(.+?)(\.index)?\.jsonl(\.zst)?")

T = TypeVar("T")
Value = float | bool | None
_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Row(msgspec.Struct):
    trace_id: str
    offset: _Natural
    chunk: _Natural | None = None


class _Line(msgspec.Struct):
    trace_id: str
    branches: list[dict[str, msgspec.Raw]] | None = None


_row = msgspec.json.Decoder(_Row)
_line = msgspec.json.Decoder(_Line)
_index = msgspec.json.Decoder(int)
_values = msgspec.json.Decoder(list[Value] | None)


@dataclass(frozen=True)
class Branch:
    """The wanted streams of one branch."""

    index: int
    """Which leaf the branch ends in, counted in node order."""
    streams: Mapping[str, list[Value] | NDArray[np.float32]]
    """One value a token of the branch; None, or NaN, where the producer had none."""


@dataclass(frozen=True)
class Annotation:
    """What a producer learned of one trace at one time."""

    producer: str
    branches: list[Branch]


class _Places(NamedTuple):
    """Where a producer's annotations stand: sorted by trace, each trace's in write order."""

    traces: NDArray[np.uint64]
    chunks: NDArray[np.int64]
    offsets: NDArray[np.int64]


class AnnotationReader:
    """The annotations of the trace store at `root`, read when a trace asks for them.

    `wanted` names the streams to decode. The indexes are read at once and hold 24 bytes an
    annotation; what a run appends later is not seen. The reader can be pickled.

    Raises `TraceError` when an index, or a chunk that has none, holds a line that is no annotation.

    >>> import tempfile, pathlib
    >>> root = pathlib.Path(tempfile.mkdtemp())
    >>> (root / "annotations/trainer").mkdir(parents=True)
    >>> _ = (root / "annotations/trainer/00000.jsonl").write_text(
    ...     '{"trace_id": "t1", "branches": [{"index": 0, "entropies": [null, 0.5]}]}\\n')
    >>> AnnotationReader(str(root), frozenset({"entropies"})).of("t1")
    [Annotation(producer='trainer', branches=[Branch(index=0, streams={'entropies': [None, 0.5]})])]
    """

    def __init__(self, root: str, wanted: frozenset[str]) -> None:
        self._directory = os.path.join(root, "annotations")
        self._wanted = wanted
        self._content = _Content()
        names = _producers(self._directory) if wanted else []
        self._places = {name: _places(self._directory, name) for name in names}

    def of(self, trace_id: str) -> list[Annotation]:
        """The annotations of a trace that carry branches, producers by name, each in write order.

        Of a branch, only the wanted streams are there. A line that is still being written is left
        out. Raises `TraceError` for a line that is no annotation or a chunk that is gone.
        """
        found = []
        key = np.uint64(_hash(trace_id))
        for producer, places in self._places.items():
            start = np.searchsorted(places.traces, key, "left")
            end = np.searchsorted(places.traces, key, "right")
            for at in range(start, end):
                path = self._path(producer, int(places.chunks[at]))
                branches = self._branches(path, int(places.offsets[at]), trace_id)
                if branches:
                    found.append(Annotation(producer, branches))
        return found

    def _path(self, producer: str, chunk: int) -> str:
        one_file = os.path.join(self._directory, f"{producer}.jsonl")
        path = os.path.join(self._directory, producer, f"{chunk:05d}.jsonl")
        # Early runs numbered no chunks, or wrote 0 for their only file.
        for there in (one_file,) if chunk == _ONE_FILE else (path, one_file):
            if os.path.exists(there) or os.path.exists(there + ".zst"):
                return there
        missing = one_file if chunk == _ONE_FILE else path
        raise TraceError(f"{missing}: the index names it, but it is not there; restore it")

    def _branches(self, path: str, offset: int, trace_id: str) -> list[Branch]:
        line, torn = self._content.line(path, offset)
        try:
            record = decode_line(_line, line)
            # Two ids can share a hash.
            if record.trace_id != trace_id:
                return []
            return [self._branch(streams) for streams in record.branches or ()]
        except (ValueError, RecursionError) as error:
            if torn:
                return []
            raise _not_an_annotation(path, offset, error) from None

    def _branch(self, streams: dict[str, msgspec.Raw]) -> Branch:
        index = _index.decode(streams.pop("index", msgspec.Raw(b"null")))
        decoded = {}
        for name, raw in streams.items():
            if name in self._wanted and (values := _values.decode(raw)) is not None:
                decoded[name] = values
        return Branch(index, decoded)


def fold(
    parents: Sequence[int],
    lengths: Sequence[int],
    sampled: Sequence[NDArray[np.bool_] | None],
    annotations: Iterable[Annotation],
    wanted: Collection[str],
) -> dict[str, dict[int, NDArray[np.float32]]]:
    """The wanted streams by node: `{stream: {node: values}}`, one value a sampled token.

    Of each node: `parents` holds its parent, which comes before it (-1 for a root), `lengths` how
    many `token_ids` it has, `sampled` which of them the model sampled (None: it sampled none).

    A node takes a stream when every sampled token has a value. `is_masked` is taken when at least
    one has (1 masked, 0 not), and is NaN elsewhere. Where several branches hold a node, the newest
    annotation wins, and within one the later branch.

    Raises `ValueError` for a branch that the trace does not have and a stream that is not as long
    as its branch.

    >>> prompt, answer = None, np.array([False, True, True])
    >>> trained = Annotation("trainer", [Branch(0, {"entropies": [None, None, None, 0.5, 0.25]})])
    >>> fold([-1, 0], [2, 3], [prompt, answer], [trained], {"entropies"})
    {'entropies': {1: array([0.5 , 0.25], dtype=float32)}}
    """
    for node, (length, mask) in enumerate(zip(lengths, sampled, strict=True)):
        if mask is not None and len(mask) != length:
            raise ValueError(f"node {node}: a mask of {len(mask)} for {length} token_ids")
    has_child = set(parents)
    leaves = [node for node in range(len(parents)) if node not in has_child]
    folded: dict[str, dict[int, NDArray[np.float32]]] = {}
    for branch in (branch for annotation in annotations for branch in annotation.branches):
        if not 0 <= branch.index < len(leaves):
            raise ValueError(f"branch {branch.index} of a trace that has {len(leaves)} branches")
        path = [leaves[branch.index]]
        while (parent := parents[path[-1]]) >= 0:
            path.append(parent)
        path.reverse()
        expected = sum(lengths[node] for node in path)
        for stream, values in branch.streams.items():
            if stream not in wanted:
                continue
            if len(values) != expected:
                raise ValueError(
                    f"{stream} of branch {branch.index} has {len(values)} values, "
                    f"its token_ids are {expected}"
                )
            with np.errstate(over="ignore"):
                row = np.array(values, np.float32)
            start = 0
            for node in path:
                mask, end = sampled[node], start + lengths[node]
                if mask is not None and mask.any():
                    taken = row[start:end][mask]
                    lacking = np.isnan(taken)
                    enough = not lacking.any()
                    if enough or (stream in _MAY_LACK_VALUES and not lacking.all()):
                        folded.setdefault(stream, {})[node] = taken
                start = end
    return folded


class _Content:
    """Lines of chunks by their place, with the blocks read last at hand."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._passes: dict[str, tuple[int, Iterator[bytes]]] = {}

    def line(self, path: str, offset: int) -> tuple[bytes, bool]:
        """The line that begins at a byte of the content, and whether its newline is missing."""
        pieces = []
        number, start = divmod(offset, _BLOCK)
        while True:
            block = self._block(path, number)
            end = block.find(b"\n", start)
            if end >= 0 or len(block) < _BLOCK:
                pieces.append(block[start : end if end >= 0 else None])
                return b"".join(pieces), end < 0
            pieces.append(block[start:])
            number, start = number + 1, 0

    def _block(self, path: str, number: int) -> bytes:
        block = self._blocks.get((path, number))
        if block is None:
            block = self._blocks[path, number] = self._read(path, number)
            if len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end((path, number))
        return block

    def _read(self, path: str, number: int) -> bytes:
        sealed = path + ".zst"
        if os.path.exists(path) or _is_seekable(sealed):
            return read_content(path, number * _BLOCK, (number + 1) * _BLOCK)
        # Compressed by other hands, without a seek table: it can only be passed through.
        at, blocks = self._passes.pop(sealed, (0, iter(())))
        if not 0 < at <= number:
            at, blocks = 0, stream_content(sealed, _BLOCK)
        block = next(islice(blocks, number - at, None), b"")
        self._passes[sealed] = number + 1, blocks
        return block

    def __reduce__(self) -> tuple[type[_Content], tuple[()]]:
        # What was read stays behind when a reader is sent to another process.
        return _Content, ()


def _is_seekable(path: str) -> bool:
    with open(path, "rb") as file:
        return seek_table(file) is not None


def _producers(directory: str) -> list[str]:
    names = set()
    for entry in os.scandir(directory) if os.path.isdir(directory) else ():
        if entry.is_dir():
            names.add(entry.name)
        elif match := _FILE.fullmatch(entry.name):
            names.add(match[1])
    return sorted(name for name in names if chunks_of(directory, name))


def _places(directory: str, producer: str) -> _Places:
    traces, chunks, offsets = array("Q"), array("q"), array("q")
    for trace_id, chunk, offset in _rows(directory, producer):
        traces.append(_hash(trace_id))
        chunks.append(chunk)
        offsets.append(offset)
    keys = np.array(traces, np.uint64)
    order = np.argsort(keys, kind="stable")
    return _Places(
        keys[order], np.array(chunks, np.int64)[order], np.array(offsets, np.int64)[order]
    )


def _rows(directory: str, producer: str) -> Iterator[tuple[str, int, int]]:
    """Trace, chunk and offset of a producer's annotations: from its index, else from all chunks."""
    index = os.path.join(directory, f"{producer}.index.jsonl")
    if os.path.exists(index):
        for _, row in _decoded(index, _row):
            yield row.trace_id, _ONE_FILE if row.chunk is None else row.chunk, row.offset
    else:
        for number, path in chunks_of(directory, producer):
            for offset, line in _decoded(path, _line):
                yield line.trace_id, number, offset


def _decoded(path: str, decoder: msgspec.json.Decoder[T]) -> Iterator[tuple[int, T]]:
    """Every line of a file and the byte it begins at; not the last one while it is half written."""
    rest, at = b"", 0
    # A plain chunk that was listed may have been sealed since.
    for data in stream_content(path if os.path.exists(path) else path + ".zst"):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.strip():
                try:
                    yield at, decode_line(decoder, line)
                except (ValueError, RecursionError) as error:
                    raise _not_an_annotation(path, at, error) from None
            at += len(line) + 1
    try:
        yield at, decode_line(decoder, rest)
    except (ValueError, RecursionError):
        return


def decode_line(decoder: msgspec.json.Decoder[T], line: bytes) -> T:
    """One line of a side file; raises `ValueError` for what does not fit."""
    try:
        return decoder.decode(line)
    except msgspec.DecodeError:
        # A bare NaN is no JSON, but some writers leave it: no value.
        return decoder.decode(json.dumps(json.loads(line, parse_constant=lambda _: None)))


def _not_an_annotation(path: str, offset: int, error: Exception) -> TraceError:
    return TraceError(
        f"{path}: at byte {offset}: not an annotation: {error}; repair or remove the line"
    )


def _hash(trace_id: str) -> int:
    # Python's own hash differs from process to process, and a reader may be sent to another.
    digest = blake2b(trace_id.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
