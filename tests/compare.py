"""Puts the library's tables and the reference's rows side by side."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import zstandard
from polars.testing import assert_frame_equal
from reference import PER_SAMPLED, Metrics, Record, Stored, TokenRow
from strategies import PLAIN, Style, encode

IDENTITY = ("step", "env", "group_id", "episode_id", "trace_id", "agent", "node", "turn", "index")
CONTEXT = ("training_version", "shipped", "has_run", "policy_start", "policy_end", "reward")
OF_A_NODE = ("timestamp", "branches", "mixed", "completion_tokens")
OF_A_TOKEN = ("label", "version")

Row = dict[str, Any]


def library_tokens(spans: pl.DataFrame) -> list[Row]:
    """The spans exploded: one dict a token, or one with index None for a row of length 0."""
    rows = []
    for span in spans.iter_rows(named=True):
        assert span["length"] == (0 if span["node"] is None else span["end"] - span["start"])
        assert (span["completion_tokens"] is None) == (span["node"] is None)
        indices: Iterable[int | None] = [None]
        if span["length"]:
            indices = range(span["start"], span["end"])
        for index in indices:
            rows.append(comparable({**span, "index": index}))
    return in_order(rows)


def reference_tokens(rows: Iterable[TokenRow]) -> list[Row]:
    return in_order([comparable(vars(row)) for row in rows])


def comparable(row: Mapping[str, Any]) -> Row:
    """The columns that both sides define, for the kind of row it is."""
    columns = [*IDENTITY, *CONTEXT]
    if row["node"] is not None:
        columns += OF_A_NODE
    if row["index"] is not None:
        columns += OF_A_TOKEN
    out = {column: row[column] for column in columns}
    if row["trainable"] is False:
        # A frozen agent yields no training samples; how many paths hold its node is moot.
        out.pop("branches", None)
    return out


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: repr([row[column] for column in IDENTITY]))


def assert_tiled(spans: pl.DataFrame) -> None:
    """The rows of a node cover [0, n) without gap or overlap; an empty node has one row."""
    ends: dict[tuple[Any, ...], int] = {}
    of_nodes = spans.filter(pl.col("node").is_not_null())
    keys = ["step", "episode_id", "trace_id", "node"]
    for row in of_nodes.sort([*keys, "start", "end"]).iter_rows(named=True):
        key = tuple(row[column] for column in keys)
        if row["length"] == 0:
            assert key not in ends, row
            assert (row["start"], row["end"]) == (0, 0), row
        assert row["start"] == ends.get(key, 0), row
        ends[key] = row["end"]


def assert_same_tokens(spans: pl.DataFrame, rows: Iterable[TokenRow]) -> None:
    """The spans table says exactly what the reference's token rows say."""
    rows = list(rows)
    assert_tiled(spans)
    assert library_tokens(spans) == reference_tokens(rows)
    assert spans["length"].sum() == sum(1 for row in rows if row.index is not None)


def assert_same_metrics(
    found: pl.DataFrame,
    expected: Sequence[Metrics],
    by: Sequence[str] = ("step",),
    *,
    without: Sequence[str] = (),
) -> None:
    """Row for row: keys and their order, integers exactly, means to 1e-12."""

    def key(row: Mapping[str, Any]) -> str:
        return repr([row[column] for column in by])

    rows = found.to_dicts()
    for ours, theirs in zip(sorted(rows, key=key), sorted(expected, key=key), strict=True):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            if name not in without:
                assert same_number(ours[name], value), (name, ours[name], value, key(theirs))


def same_number(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-12)
    return type(one) is type(other) and bool(one == other)


def library_counts(counts: pl.DataFrame, by: Sequence[str]) -> dict[tuple[Any, ...], int]:
    """An age count table as a dict; rows of no tokens say nothing and are left out."""
    rows = counts.select([*by, "age", "tokens"]).rows()
    table = {tuple(row[:-1]): row[-1] for row in rows if row[-1]}
    assert len(table) == sum(1 for row in rows if row[-1]), "a group stands there twice"
    return table


# --- tables of tokens, and tables of one another --------------------------------------------------

STREAMS = ("position", "token_id", "is_content", *PER_SAMPLED)
TOKEN_COLUMNS = (
    *IDENTITY, *CONTEXT, *OF_A_NODE, *OF_A_TOKEN, "trainable", "age", "context_age", "branch",
    "branch_tokens", *STREAMS,
)  # fmt: skip


def assert_same_streams(tokens: pl.DataFrame, rows: Iterable[TokenRow]) -> None:
    """The tokens table says of every token what the reference says of it, stream by stream."""

    def key(row: Row) -> str:
        return repr([row[column] for column in (*IDENTITY, "branch")])

    ours = tokens.select(TOKEN_COLUMNS).to_dicts()
    theirs = [{c: getattr(row, c) for c in TOKEN_COLUMNS} for row in rows if row.index is not None]
    assert len(ours) == len(theirs)
    for one, other in zip(sorted(ours, key=key), sorted(theirs, key=key), strict=True):
        if one["trainable"] is False:
            one["branches"] = other["branches"]
        for name in TOKEN_COLUMNS:
            assert one[name] == other[name], (name, one[name], other[name], key(other))


def assert_same_frame(one: pl.DataFrame, other: pl.DataFrame) -> None:
    """The same rows and dtypes; the order of files is the reader's own affair."""
    if one.schema == other.schema and one.hash_rows().sort().equals(other.hash_rows().sort()):
        return
    assert_frame_equal(one, other, check_row_order=False, check_exact=True)


# --- records -> files -----------------------------------------------------------------------------


def write_lines(path: Path, records: Iterable[Record], style: Style = PLAIN) -> None:
    """A JSONL file, compressed as its name says."""
    data = b"".join(encode(record, style) for record in records)
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = zstandard.ZstdCompressor().compress(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_steps(
    root: Path,
    stored: Iterable[Stored],
    *,
    suffix: str = "",
    style: Style = PLAIN,
    kind: str = "train",
    subset: str = "effective",
) -> None:
    """The per-step layout: a folder a step, one file of records in it."""
    by_step: dict[int, list[Record]] = {}
    for record, step, _ in stored:
        assert step is not None
        by_step.setdefault(step, []).append(record)
    for step, records in by_step.items():
        folder = root / "rollouts" / f"step_{step}" / kind / subset
        write_lines(folder / f"traces.jsonl{suffix}", records, style)
