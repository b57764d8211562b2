"""A query's filter -> which parts of which files have to be read for it.

A filter is split into the conditions that all have to hold. A condition on nothing but what the
place of a file tells (its step, kind, subset), or what the index of a trace store tells of a line,
rules files and lines out before they are read. The filter itself is applied afterwards all the
same, so what is ruled out here only has to be certain, not complete.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from traceage.formats.exports import EXPORTED
from traceage.formats.parts import PART_BYTES, Part, parts_of, platform_parts
from traceage.formats.records import What
from traceage.schema import SPANS
from traceage.sources import SourceFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIRST_BYTES = 1 << 20
"""Content of the first part."""

_INDEXED = {"step", "kind", "env", "group_id", "episode_id"}
"""Columns that a trace store's index can tell before the stream is read."""


@dataclass
class Plan:
    """Which parts of which files a query has to read."""

    conjuncts: list[pl.Expr]
    what: What
    left_out: bool = field(default=False)
    """Whether the query made it leave out anything."""

    def parts(self, files: Sequence[SourceFile]) -> Iterator[Part]:
        """The parts to read, in order: the first ones small, for those who want only a few rows."""
        first = FIRST_BYTES
        for file in files:
            if file.store is not None:
                yield from self._store_parts(file, first)
            elif not self.may_hold(file):
                self.left_out = True
            elif file.format == "platform":
                yield from platform_parts(file.path, self.what)
            else:
                yield from parts_of(file.path, self._with_exports(file), first)
            first = PART_BYTES

    def _conjuncts_on(self, known: set[str]) -> list[pl.Expr]:
        return [c for c in self.conjuncts if (r := set(c.meta.root_names())) and r <= known]

    def may_hold(self, file: SourceFile) -> bool:
        """Whether the query may want anything of a file, by its place."""
        if file.step is None:
            return True
        known = {"step": file.step, "subset": file.subset}
        if file.kind is not None:
            known["kind"] = file.kind
        conjuncts = self._conjuncts_on(set(known))
        if not conjuncts:
            return True
        frame = pl.DataFrame({k: [v] for k, v in known.items()}, {k: SPANS[k] for k in known})
        return frame.filter(conjuncts).height > 0

    def _with_exports(self, file: SourceFile) -> What:
        exports = file.exports() if self.what.told_later(EXPORTED) else ()
        return self.what._replace(exports=exports)

    def _store_parts(self, file: SourceFile, first_bytes: int) -> Iterator[Part]:
        assert file.store is not None
        what = self.what._replace(annotations=(file.store.root, file.store.index_bytes()))
        conjuncts = self._conjuncts_on(_INDEXED)
        wanted = self._wanted_lines(file, conjuncts) if conjuncts else None
        if wanted is None:
            yield from parts_of(file.path, what, first_bytes)
            return
        offsets, keep = wanted
        self.left_out |= not keep.all()
        at = 0
        while at < len(offsets):
            if not keep[at]:
                at += 1
                continue
            first, start = at, offsets[at]
            while at < len(offsets) and keep[at] and offsets[at] - start < PART_BYTES:
                at += 1
            # Lines that the index does not know yet follow the last one that it knows.
            end = offsets[at] if at < len(offsets) else start + PART_BYTES
            yield Part(file.path, what, start, end, line=first, stored=end - start)
            if at == len(offsets):
                yield from self._tail(file, what, end)

    def _tail(self, file: SourceFile, what: What, start: int) -> Iterator[Part]:
        for part in parts_of(file.path, what):
            if part.end > start:
                yield Part(part.path, part.what, max(start, part.start), part.end)

    def _wanted_lines(
        self, file: SourceFile, conjuncts: list[pl.Expr]
    ) -> tuple[list[int], NDArray[np.bool_]] | None:
        """Where each line of a chunk begins and whether the query may want it.

        None where the index does not tell.
        """
        store = file.store
        assert store is not None
        rows = [row for row in store.index_rows or () if row.chunk == file.chunk]
        offsets = [row.offset for row in rows]
        if not rows or offsets[0] != 0 or any(b <= a for a, b in pairwise(offsets)):
            return None
        cells = []
        for at, row in enumerate(rows):
            steps: set[int | None] = {
                store.ship_steps[trace] for trace in row.trace_ids if trace in store.ship_steps
            }
            for step in steps or {None}:
                cells.append((at, row.kind, row.env, row.group, row.id, step))
        names = ("kind", "env", "group_id", "episode_id", "step")
        schema = {"at": pl.Int64(), **{name: SPANS[name] for name in names}}
        frame = pl.DataFrame(cells, schema, orient="row")
        # What the index does not say, the record may; the step of what no batch took, for one, is
        # that of its arrival.
        for conjunct in conjuncts:
            untold = [pl.col(name).is_null() for name in conjunct.meta.root_names()]
            frame = frame.filter(pl.any_horizontal(untold) | conjunct)
        keep = np.zeros(len(rows), np.bool_)
        keep[frame["at"].to_numpy()] = True
        keep[-1] = True  # what follows it may not be in the index yet
        return offsets, keep


def conjuncts_of(predicate: pl.Expr | None) -> list[pl.Expr]:
    """The expressions that all have to hold for `predicate` to hold."""
    if predicate is None:
        return []
    try:
        tree = json.loads(predicate.meta.serialize(format="json"))
        return [
            pl.Expr.deserialize(io.StringIO(json.dumps(part)), format="json")
            for part in _split_and(tree)
        ]
    except (pl.exceptions.PolarsError, ValueError, TypeError):
        return [predicate]


def _split_and(tree: Any) -> Iterator[Any]:
    binary = tree.get("BinaryExpr") if isinstance(tree, dict) else None
    if binary is not None and binary.get("op") in ("And", "LogicalAnd"):
        yield from _split_and(binary["left"])
        yield from _split_and(binary["right"])
    else:
        yield tree
