"""A trainer's token exports: training sequences without a name -> the branches they were made of.

A line of an export is one sequence of a batch: its token ids, and streams of one value a token. It
does not say which trace it comes of, but its ids do: within a step, a sequence belongs to the
branch that has the very same `token_ids`. So the sequences are kept by the bytes of their ids,
where a branch finds its own by one look into a dictionary. A sequence that was packed or truncated
is found by none; that share is counted and reported.

Layout, beside the `rollouts/step_<N>/` of the same step:

    token_exports/step_<N>/rank_<R>.jsonl[.gz|.zst]
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from traceage.errors import ExportsRead, Problem
from traceage.formats.annotations import Value, decode_line
from traceage.formats.content import FIX_DAMAGED, DamagedFile, compression_of
from traceage.formats.trace_store import lines_of

EXPORTED = {
    "trainer_logprobs": "trainer_logprobs",
    "entropies": "entropy",
    "mismatch_kl": "mismatch_kl",
}
"""Key of a node -> column of an export, for the streams that are taken from exports."""

_PLACE = re.compile(r"(.*[\\/])rollouts[\\/](step_\d+)[\\/].+")
_RANK = re.compile(r"(rank_\d+\.jsonl)(\.gz|\.zst)?")
_FIX_LINE = "correct or remove the line, or go on without it with on_error='skip' (--on-error skip)"


class ExportFile(NamedTuple):
    """One rank's export of a step, as long as it was when the reading began."""

    path: str
    size: int


def export_files(traces: str) -> tuple[ExportFile, ...]:
    """The exports of the step whose `rollouts/step_<N>/` holds the file `traces`, one a rank.

    Whether the step has its STABLE marker is not asked: one that is still being exported lacks
    only lines, and those count as branches that found no sequence.
    """
    place = _PLACE.fullmatch(os.path.abspath(traces))
    folder = os.path.join(place[1], "token_exports", place[2]) if place else ""
    ranks: dict[str, str] = {}
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        # While an export stands there plain and compressed, it is the same; the latter is whole.
        if match := _RANK.fullmatch(name):
            ranks[match[1]] = os.path.join(folder, name)
    return tuple(ExportFile(path, os.path.getsize(path)) for path in ranks.values())


class SameIds:
    """All the training sequences of a step that have the same token ids."""

    def __init__(self) -> None:
        self.places: set[tuple[str, int]] = set()
        """File and line of each."""
        self.streams: dict[str, NDArray[np.float32]] = {}
        """Node key -> a value a token; NaN where none of the sequences was trained on it."""

    def add(self, place: tuple[str, int], streams: dict[str, NDArray[np.float32]]) -> None:
        # They are interchangeable, so the first that has a value speaks for all: the answer is
        # then the same however the traces are cut into parts.
        self.places.add(place)
        for key, values in streams.items():
            known = self.streams.get(key)
            self.streams[key] = (
                values if known is None else np.where(np.isnan(known), values, known)
            )


class Exports:
    """The sequences of one step's exports; faults are kept for whoever reads, not raised."""

    def __init__(self, files: tuple[ExportFile, ...], wanted: frozenset[str]) -> None:
        self._wanted = wanted
        self._by_ids: dict[bytes, SameIds] = {}
        self._folder = os.path.dirname(files[0].path)
        self._sequences = 0
        self._problems: set[Problem] = set()
        self._torn: set[str] = set()
        for file in files:
            self._add_file(file)

    def of(self, path: Iterable[Any]) -> SameIds | None:
        """The sequences of a branch, given the `token_ids` of its nodes from root to leaf."""
        try:
            ids = b"".join([_bytes_of(token_ids or ()) for token_ids in path])
        except (TypeError, OverflowError):
            return None  # no ids at all; whoever asks for them is told
        return self._by_ids.get(ids)

    def read(self, looked_up: Sequence[SameIds | None]) -> ExportsRead:
        """What was read, and what the branches that looked here found."""
        found = [sequences for sequences in looked_up if sequences is not None]
        return ExportsRead(
            self._folder,
            self._sequences,
            self._problems,
            self._torn,
            matched={place for sequences in found for place in sequences.places},
            branches=len(looked_up),
            branches_matched=len(found),
        )

    def _add_file(self, file: ExportFile) -> None:
        with open(file.path, "rb") as opened:
            plain = compression_of(opened) == "plain"
        try:
            for number, line, torn in lines_of(file.path, file.size if plain else None):
                try:
                    self._add_line(file, number, line)
                except (ValueError, OverflowError, RecursionError) as error:
                    if torn and isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                        self._torn.add(f"{file.path}:{number}")
                    else:
                        self._problem("bad token export", file, number, str(error), _FIX_LINE)
        except DamagedFile as error:
            self._problem("damaged file", file, None, error.found, FIX_DAMAGED)

    def _add_line(self, file: ExportFile, number: int, line: bytes) -> None:
        sequence = decode_line(_line, line)
        # A place outside the loss mask holds zeros or whatever the trainer computed there; before
        # the first token there is nothing that it could have been predicted from.
        trained = np.array(sequence.loss_mask, np.bool_)
        trained[:1] = False
        tokens = len(sequence.token_ids)
        _check_length("loss_mask", len(trained), tokens)
        streams = {}
        for key in sorted(self._wanted):
            column = EXPORTED[key]
            values = _values.decode(getattr(sequence, column))
            if values is not None:
                _check_length(column, len(values), tokens)
                with np.errstate(over="ignore"):
                    streams[key] = np.where(trained, np.array(values, np.float32), np.nan)
        known = self._by_ids.setdefault(_bytes_of(sequence.token_ids), SameIds())
        known.add((file.path, number), streams)
        self._sequences += 1

    def _problem(
        self, reason: str, file: ExportFile, line: int | None, found: str, advice: str
    ) -> None:
        self._problems.add(Problem(reason, file.path, line, None, None, found, advice))


@lru_cache(maxsize=2)
def exports_of(files: tuple[ExportFile, ...], wanted: frozenset[str]) -> Exports:
    """The exports of a step, read once a process while its traces are read."""
    return Exports(files, wanted)


class _Line(msgspec.Struct):
    """What is needed of an export's line; a stream is decoded when it is wanted."""

    token_ids: list[int]
    loss_mask: list[bool]
    trainer_logprobs: msgspec.Raw = msgspec.Raw(b"null")
    entropy: msgspec.Raw = msgspec.Raw(b"null")
    mismatch_kl: msgspec.Raw = msgspec.Raw(b"null")


_line = msgspec.json.Decoder(_Line)
_values = msgspec.json.Decoder(list[Value] | None)


def _bytes_of(token_ids: Iterable[Any]) -> bytes:
    return array("q", token_ids).tobytes()


def _check_length(column: str, length: int, tokens: int) -> None:
    if length != tokens:
        raise ValueError(f"{column} has {length} entries for {tokens} token_ids")
