"""A Parquet dump -> frames of runs and their streams, a row group at a time.

What `rows` decides trace by trace for records, this decides for whole columns: which traces count,
and at which step. Of the nodes only what is asked for is read: streams, or which one follows which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from traceage.ages import training_versions
from traceage.context import completion_tokens, lowest_before, runs_before, sampled_ancestors
from traceage.errors import Problem
from traceage.formats.dump import SPAN_FIELDS, TRACE_COLUMNS
from traceage.formats.streams import FLOATS, PLACED, STREAMS
from traceage.rows import as_series
from traceage.schema import RUN_COLUMNS, SPANS, TOKENS
from traceage.sources import SourceFile

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from traceage.formats.records import What
    from traceage.reading import Reader
    from traceage.rows import Rows

_SELECTION = (
    "kind", "shipped", "episode_shipped", "trainable", "episode_id", "trace_id", "file", "line"
)  # fmt: skip


BATCH_BYTES = 1 << 28
"""Bytes of files whose runs are decoded together: 50 million tokens or so, as many as fit."""


class _Piece(NamedTuple):
    """Some rows of one file: how many, and how many rows of it come before them."""

    file: SourceFile
    before: int
    rows: int


class _Batch(NamedTuple):
    """Rows of one file or of several, one after the other."""

    pieces: list[_Piece]
    traces: pl.DataFrame
    spans: pl.Series
    table: pa.Table | None
    """The nodes and branches, where they are needed."""


def read_dump(
    reader: Reader, rows: Rows, files: Sequence[SourceFile], needed: set[str], what: What
) -> Iterator[tuple[pl.DataFrame, dict[str, pl.Series]]]:
    """The runs of the files of a dump, in order, and the streams of their tokens.

    With anything of the nodes, a row group is a batch; without, a few hundred files are: runs are
    few, and a batch has its price.
    """
    of_trace = [name for name in TRACE_COLUMNS if name in needed or name in _SELECTION]
    how = reader.training_version
    if isinstance(how, str) and how in TRACE_COLUMNS and how not in of_trace:
        of_trace.append(how)
    if _node_fields(needed, what) or what.per_branch:
        batches = _row_groups(files, of_trace, needed, what)
    else:
        batches = _whole_files(files, of_trace)
    for batch in batches:
        yield from _runs_of(reader, rows, batch, needed, what)


def _whole_files(files: Sequence[SourceFile], of_trace: Sequence[str]) -> Iterator[_Batch]:
    # Of many small files the nested columns alone, polars is several times as fast as pyarrow.
    first = 0
    size = BATCH_BYTES >> 5  # the first batch is small, for those who want only a few rows
    while first < len(files):
        last, held = first, 0
        while last < len(files) and (held < size or last == first):
            held += files[last].size
            last += 1
        paths = [file.path for file in files[first:last]]
        frame = (
            pl.scan_parquet(paths, include_file_paths=":path", hive_partitioning=False, glob=False)
            .select(*of_trace, "spans", ":path")
            .collect()
        )
        counts = dict(frame[":path"].rle().struct.unnest().select("value", "len").iter_rows())
        pieces = [_Piece(file, 0, counts.get(file.path, 0)) for file in files[first:last]]
        yield _Batch(pieces, frame.select(of_trace), frame["spans"], None)
        first, size = last, min(2 * size, BATCH_BYTES)


def _row_groups(
    files: Sequence[SourceFile], of_trace: Sequence[str], needed: set[str], what: What
) -> Iterator[_Batch]:
    import pyarrow.parquet as pq

    columns = [
        *of_trace,
        *(f"spans.list.element.{name}" for name in _span_fields(needed, what)),
        *(f"nodes.list.element.{name}" for name in _node_fields(needed, what)),
        *(["branches"] if what.per_branch else []),
    ]
    for file in files:
        with pq.ParquetFile(file.path) as opened:
            before = 0
            for group in range(opened.num_row_groups):
                table = opened.read_row_group(group, columns=columns).combine_chunks()
                traces = pl.DataFrame(pl.from_arrow(table.select(of_trace)))
                spans = pl.Series(pl.from_arrow(table["spans"]))
                yield _Batch([_Piece(file, before, table.num_rows)], traces, spans, table)
                before += table.num_rows


def _span_fields(needed: set[str], what: What) -> list[str]:
    fields = {name for name in SPAN_FIELDS if name in needed} | {"start", "end"}
    if "version" in needed:
        fields.add("label")
    if what.per_branch or needed.intersection(("completion_tokens", "context_version")):
        fields.add("node")
    return [name for name in SPAN_FIELDS if name in fields]


def _node_fields(needed: set[str], what: What) -> list[str]:
    fields = ["parent", "sampled"] if "context_version" in needed else []
    if not what.streams:
        return fields
    fields.append("sampled_tokens")
    if what.streams.intersection(PLACED):
        fields.append("mask")
    fields += ["token_ids"] if "token_id" in what.streams else []
    fields += ["offset"] if "position" in what.streams else []
    fields += ["is_content"] if "is_content" in what.streams else []
    return fields + [FLOATS[name] for name in STREAMS if name in FLOATS and name in what.streams]


def _runs_of(
    reader: Reader, rows: Rows, batch: _Batch, needed: set[str], what: What
) -> Iterator[tuple[pl.DataFrame, dict[str, pl.Series]]]:
    pieces, traces, spans, table = batch
    piece_of = np.repeat(np.arange(len(pieces)), [piece.rows for piece in pieces])
    steps = [p.file.step if p.file.step is not None else reader.step for p in pieces]
    traces = traces.with_columns(
        pl.Series("piece", piece_of, pl.UInt32),
        pl.Series("step", steps, pl.Int32).gather(piece_of),
    )
    if "subset" not in traces.columns and reader.subset == "both":
        subsets = pl.Series("subset", [piece.file.subset for piece in pieces], pl.String)
        traces = traces.with_columns(subsets.gather(piece_of))
    full, bare = _select(reader, rows, pieces, traces)
    reader.summary.lines_read += traces.height
    if not len(full) and not len(bare):
        return
    rows.anything = True
    counts = spans.list.len().fill_null(0)
    of_run = np.repeat(np.arange(len(spans)), counts)
    runs = spans.filter(counts > 0).explode().struct.unnest().to_dict()
    lengths = (runs["end"] - runs["start"]).to_numpy()
    streams = _streams(table, what) if table is not None and what.streams else {}
    order: NDArray[np.int64] | None = None
    branch: dict[str, NDArray[np.int32]] = {}
    if table is not None and what.per_branch:
        order, branch = _by_branch(table["branches"].combine_chunks(), of_run, runs["node"])
        of_run, lengths = of_run[order], lengths[order]
    if len(full) < len(spans):
        kept = np.isin(of_run, full)
        at = np.flatnonzero(kept)
        order = at if order is None else order[at]
        branch = {name: values[at] for name, values in branch.items()}
        of_run, lengths = of_run[at], lengths[at]
    if order is not None:
        if streams:
            first = np.concatenate([[0], np.cumsum((runs["end"] - runs["start"]).to_numpy())])
            tokens = _ranges(first[order], lengths)
            streams = {name: values.gather(tokens) for name, values in streams.items()}
        runs = {name: values.gather(order) for name, values in runs.items()}
    made = dict(runs)
    made["length"] = pl.Series(lengths, dtype=SPANS["length"])
    if "version" in needed:
        made["version"] = rows.versions_of(made["label"])
        rows.check_labels(_first_unreadable(reader, pieces, piece_of[of_run], made["label"]))
    for name in needed.intersection(("branch", "branch_tokens")):
        empty = np.full(len(of_run), -1, np.int32)
        numbers = pl.Series(branch.get(name, empty))
        made[name] = numbers.set(numbers < 0, None)
    if "completion_tokens" in needed:
        made["completion_tokens"] = completion_tokens(*_integers(runs, "node", "start", "end"))
    if "context_version" in needed:
        assert table is not None
        node, start = _integers(runs, "node", "start")
        ancestor = _ancestors(table, of_run, node)
        index = branch.get("branch", np.zeros_like(node))
        before = runs_before(of_run, index, node, ancestor, start)
        made["context_version"] = lowest_before(before, made["version"])
    if "training_version" in needed:
        traces = traces.with_columns(_training_versions(reader, traces))
    wanted = [name for name in RUN_COLUMNS if name in needed]
    shared = {name: traces[name].gather(of_run) for name in wanted if name in traces.columns}
    frame = pl.DataFrame({**shared, **{name: made[name] for name in wanted if name in made}})
    if len(bare):
        frame = pl.concat([frame, _bare(traces[bare], frame.columns)], how="vertical_relaxed")
        if len(pieces) > 1:
            # They follow the runs of their own file.
            place = np.concatenate([piece_of[of_run], piece_of[bare]])
            frame = frame[np.argsort(place, kind="stable")]
    yield frame.select(pl.col(name).cast(RUN_COLUMNS[name]) for name in wanted), streams


def _first_unreadable(
    reader: Reader, pieces: Sequence[_Piece], piece_of: NDArray[np.int64], labels: pl.Series
) -> str:
    """The file of the first label that cannot be read, where there is one."""
    unreadable = list(reader.summary.unreadable_labels)
    bad = labels.is_in(unreadable).fill_null(False).arg_true().head(1).to_list()
    return pieces[int(piece_of[bad[0]]) if bad else -1].file.path


_EPISODE = ("piece", "episode_id")


def _select(
    reader: Reader, rows: Rows, pieces: Sequence[_Piece], traces: pl.DataFrame
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which rows count with their runs, and which stand for an episode that has none in scope."""
    summary = reader.summary
    at = traces.with_row_index("at")
    episodes = _episodes(at)
    summary.episodes += episodes
    if reader.kind != "any":
        mine = at.filter(pl.col("kind").is_null() | (pl.col("kind") == reader.kind))
        if mine.height < at.height:
            summary.other_kind += episodes - _episodes(mine)
        at = mine
    # What no batch took may have no step either, and needs none.
    without = pl.col("step").is_null() & pl.col("shipped").is_null()
    lost = at.filter(without)
    if lost.height and not isinstance(reader.training_version, int):
        for row in lost.unique(_EPISODE, keep="first", maintain_order=True).iter_rows(named=True):
            found = "neither the dump nor the caller tells which batch trained on this trace"
            advice = "give it with step=N (--step N), or one training version for all"
            piece = pieces[row["piece"]]
            before = sum(other.rows for other in pieces[: row["piece"]])
            line = piece.before + row["at"] - before + 1
            where = piece.file.path, line, row["trace_id"], None
            reader.refuse(Problem("no step known", *where, found, advice))
        at = at.filter(~without)
    in_scope = at if reader.include_frozen else at.filter("trainable")
    gone = at.clear()
    if in_scope.height < at.height:
        # An episode of frozen agents alone is still an episode.
        gone = at.join(in_scope, on=_EPISODE, how="anti").unique(_EPISODE, keep="first")
    untaken = pl.col("episode_shipped").not_().fill_null(False)
    if reader.subset in ("all", "both"):
        summary.not_shipped += _episodes(at.filter(untaken))
    elif not in_scope["shipped"].all(ignore_nulls=True) or gone.height:
        waiting = in_scope.filter(untaken).unique(_EPISODE, keep="first")
        summary.not_shipped += waiting.height + gone.filter(untaken).height
        in_scope = in_scope.filter(~untaken)
        left = pl.col("shipped").not_().fill_null(False)
        summary.traces_not_shipped += in_scope.filter(left).height
        in_scope = in_scope.filter(~left)
        gone = pl.concat([gone, waiting])
    keep = _first_times(rows, in_scope)
    return keep, np.sort(gone["at"].to_numpy().astype(np.int64))


def _episodes(traces: pl.DataFrame) -> int:
    return int(traces.select(pl.struct(_EPISODE).n_unique()).item())


def _first_times(rows: Rows, traces: pl.DataFrame) -> NDArray[np.int64]:
    """The rows of `traces` whose trace was not read before, by their `at`."""
    subsets = traces["subset"] if "subset" in traces.columns else repeat(None, traces.height)
    columns = (traces[name] for name in ("at", "step", "trace_id", "file", "line"))
    return np.array(
        [
            at
            for at, step, trace_id, path, line, subset in zip(*columns, subsets, strict=True)
            if trace_id is None or rows.first_time(step, trace_id, subset, path, line)
        ],
        np.int64,
    )


def _bare(traces: pl.DataFrame, wanted: Sequence[str]) -> pl.DataFrame:
    """A row of no tokens for each of some episodes."""
    fixed: dict[str, Any] = {
        "trainable": True, "start": 0, "end": 0, "length": 0, "mixed": False, "branches": 0
    }  # fmt: skip
    nulled = ("trace_id", "agent", "reward")
    return traces.select(
        pl.col(name)
        if name in traces.columns and name not in nulled and name not in fixed
        else pl.lit(fixed.get(name), dtype=RUN_COLUMNS[name]).alias(name)
        for name in wanted
    )


def _training_versions(reader: Reader, traces: pl.DataFrame) -> pl.Series:
    trained = pl.col("shipped").fill_null(True)
    with_version = traces.filter(trained)
    versions = training_versions(with_version, reader.training_version)
    where = traces.select(trained).to_series().to_numpy()
    at = np.where(where, np.cumsum(where) - 1, len(versions))
    return versions.extend_constant(None, 1).gather(at).alias("training_version")


def _by_branch(
    branches: pa.ListArray, of_run: NDArray[np.int64], nodes: pl.Series
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.int32]]]:
    """The runs branch after branch: their indices, and the branch and its tokens for each."""
    frame = pl.DataFrame({"row": np.arange(len(branches)), "branches": pl.from_arrow(branches)})
    paths = (
        frame.explode("branches")
        .unnest("branches")
        .explode("nodes")
        .drop_nulls("nodes")
        .rename({"nodes": "node"})
    )
    runs = pl.DataFrame({"row": of_run, "node": nodes, "at": np.arange(len(of_run))})
    joined = paths.join(runs, on=["row", "node"], how="inner", maintain_order="left_right")
    empty = runs.filter(pl.col("node").is_null()).with_columns(
        index=pl.lit(-1, pl.Int32), tokens=pl.lit(-1, pl.Int32)
    )
    both = pl.concat([joined, empty], how="diagonal_relaxed").sort("row", maintain_order=True)
    return both["at"].to_numpy().astype(np.int64), {
        "branch": both["index"].to_numpy(),
        "branch_tokens": both["tokens"].to_numpy(),
    }


def _ancestors(
    table: pa.Table, of_run: NDArray[np.int64], node: NDArray[np.int32]
) -> NDArray[np.int64]:
    """The nearest sampled node above the node of each run; -1 where there is none."""
    lists = table["nodes"].combine_chunks()
    first = _starts(_lengths(lists))
    of_trace = np.repeat(first, _lengths(lists))
    fields = pl.Series(pl.from_arrow(lists.flatten())).struct
    parent = fields.field("parent").fill_null(-1).to_numpy()
    parent = np.where(parent < 0, -1, of_trace + parent)
    above = sampled_ancestors(parent, fields.field("sampled").to_numpy())
    above = np.where(above < 0, -1, above - of_trace)
    # A trace without completions has a run of no node, and maybe no nodes at all.
    found = np.full(len(node), -1)
    found[node >= 0] = above[(first[of_run] + node)[node >= 0]]
    return found


def _integers(runs: dict[str, pl.Series], *names: str) -> list[NDArray[np.int32]]:
    """Columns of runs as arrays; -1 where there is no value."""
    return [runs[name].fill_null(-1).to_numpy() for name in names]


def _streams(table: pa.Table, what: What) -> dict[str, pl.Series]:
    """The wanted streams, a value for each token of the runs of all rows."""
    nodes = table["nodes"].combine_chunks().flatten()
    fields = {field.name: values for field, values in zip(nodes.type, nodes.flatten(), strict=True)}
    tokens = fields["sampled_tokens"].to_numpy()
    made: dict[str, pl.Series] = {}
    for name in what.streams & FLOATS.keys():
        if FLOATS[name] not in fields:  # a dump of an earlier schema version
            made[name] = pl.Series(name, [None], TOKENS[name]).new_from_index(0, int(tokens.sum()))
            continue
        has, values = _flat(fields[FLOATS[name]])
        if has.all() or not tokens[~has].any():
            stream = values
        else:
            stream = np.full(int(tokens.sum()), np.nan, np.float32)
            stream[np.repeat(has, tokens)] = values
        made[name] = as_series(name, stream)
    if not what.streams.intersection(PLACED):
        return made
    has, mask = _flat(fields["mask"])
    per_node = _lengths(fields["mask"])
    sampled = tokens > 0
    counted = np.add.reduceat(np.append(mask, False), _starts(per_node)) * (per_node > 0)
    known = has & sampled & (counted == tokens)
    where = np.repeat(known, tokens)
    chosen = mask & np.repeat(known, per_node)
    at = np.arange(len(mask)) - np.repeat(_starts(per_node), per_node)

    def place(name: str, values: NDArray[Any]) -> None:
        stream = np.full(int(tokens.sum()), -1, np.int32)
        stream[where] = values
        made[name] = as_series(name, stream)

    if "token_id" in what.streams:
        ids = fields["token_ids"]
        first = np.repeat(_starts(_lengths(ids)), per_node)
        place("token_id", _flat(ids)[1][(first + at)[chosen]])
    if "position" in what.streams:
        offset = np.repeat(fields["offset"].to_numpy(), per_node)
        place("position", (offset + at)[chosen])
    if "is_content" in what.streams:
        lists = fields["is_content"]
        fits = _flat(lists)[0] & (_lengths(lists) == per_node)
        spread = np.full(len(mask), -1, np.int32)
        spread[np.repeat(fits, per_node)] = _flat(lists)[1][np.repeat(fits, _lengths(lists))]
        place("is_content", spread[chosen])
    return made


def _flat(lists: pa.ListArray) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Which lists are there, and the values of all, one after the other."""
    values = lists.flatten()
    return (
        lists.is_valid().to_numpy(zero_copy_only=False),
        values.to_numpy(zero_copy_only=False),
    )


def _lengths(lists: pa.ListArray) -> NDArray[np.int64]:
    lengths = lists.value_lengths().fill_null(0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = np.cumsum(lengths) - lengths
    return starts


def _ranges(starts: NDArray[np.int64], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """`start, start + 1, ...` of each range, one after the other."""
    ends = np.cumsum(lengths)
    within: NDArray[np.int64] = np.arange(int(ends[-1]) if len(ends) else 0)
    within += np.repeat(starts - (ends - lengths), lengths)
    return within
