"""The per-step answer as others would compute it from the same files, each the fastest we could.

    python benchmarks/rivals.py duckdb|duckdb-lines|polars|polars-lines|loop|loop-tokens|floor DIR
    python benchmarks/rivals.py decompress DIR

DIR holds rollouts/step_N/train/effective/traces.jsonl. The answer goes to stdout as JSON: for each
step the sampled tokens of trainable agents, those with an integer label, and the mean and maximum
age of the latter, where step N trained on policy N - 1. Time and peak memory go to stderr.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import re
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    import polars as pl

THREADS = 2
SEALED = "monitors/file/traces/stream/*.jsonl.zst"
FILES = "rollouts/step_*/train/effective/traces.jsonl"


@dataclass
class Row:
    """The answer for one step."""

    step: int
    sampled_tokens: int
    labelled_tokens: int
    mean: float | None
    max: int | None


def duckdb_struct(folder: Path) -> list[Row]:
    """DuckDB's JSON reader with a schema of the keys that matter."""
    span = 'STRUCT("version" VARCHAR, "start" BIGINT, "end" BIGINT)'
    node = f"STRUCT(sampled BOOLEAN, mask BOOLEAN[], weight_versions {span}[])"
    trace = f"STRUCT(agent STRUCT(trainable BOOLEAN), nodes {node}[])"
    return _duckdb(
        f"""SELECT filename, traces FROM read_json('{folder / FILES}', filename = true,
            format = 'newline_delimited', maximum_object_size = {1 << 25},
            columns = {{traces: '{trace}[]'}})"""
    )


def duckdb_lines(folder: Path) -> list[Row]:
    """DuckDB with its CSV reader for the lines and its JSON functions for the keys.

    U+0001 cannot stand in JSON text, so each line is one field. This is several times as fast as
    `read_json`.
    """
    span = {"version": "VARCHAR", "start": "BIGINT", "end": "BIGINT"}
    node = {"sampled": "BOOLEAN", "mask": ["BOOLEAN"], "weight_versions": [span]}
    shape = json.dumps({"traces": [{"agent": {"trainable": "BOOLEAN"}, "nodes": [node]}]})
    return _duckdb(
        f"""SELECT filename, from_json(line, '{shape}').traces AS traces
            FROM read_csv('{folder / FILES}', filename = true, columns = {{line: 'VARCHAR'}},
            delim = '\x01', quote = '', escape = '', comment = '', header = false,
            auto_detect = false, max_line_size = {1 << 25})"""
    )


def _duckdb(records: str) -> list[Row]:
    import duckdb

    query = f"""
        WITH records AS ({records}),
        traces AS (
            SELECT regexp_extract(filename, 'step_(\\d+)', 1)::INT AS step, unnest(traces) AS trace
            FROM records),
        nodes AS (
            SELECT step, unnest(trace.nodes) AS node FROM traces WHERE trace.agent.trainable),
        sampled AS (
            SELECT step, list_aggregate(node.mask, 'sum') AS tokens,
                list_transform(
                    list_filter(node.weight_versions, lambda s: s.version <> 'default'),
                    lambda s: {{size: s."end" - s."start", age: step - 1 - s.version::INT}}
                ) AS spans
            FROM nodes WHERE node.sampled)
        SELECT step,
            sum(tokens)::BIGINT,
            sum(list_sum(list_transform(spans, lambda s: s.size)))::BIGINT AS labelled,
            sum(list_sum(list_transform(spans, lambda s: s.size * s.age)))::DOUBLE / labelled,
            max(list_max(list_transform(spans, lambda s: s.age)))
        FROM sampled GROUP BY step ORDER BY step"""
    connection = duckdb.connect(config={"threads": THREADS})
    return [Row(*row) for row in connection.execute(query).fetchall()]


def polars_struct(folder: Path) -> list[Row]:
    """Polars' lazy NDJSON reader with a schema of the keys that matter."""
    import polars as pl

    files = pl.scan_ndjson(
        folder / FILES, schema={"traces": _polars_traces()}, include_file_paths="path"
    )
    return _polars(files)


def polars_lines(folder: Path) -> list[Row]:
    """Polars' line reader and JSON decoder: a little faster, in more memory."""
    import polars as pl

    record = pl.col("line").str.json_decode(pl.Struct({"traces": _polars_traces()}))
    lines = pl.scan_lines(folder / FILES, name="line", include_file_paths="path")
    return _polars(lines.select("path", record.struct.field("traces")))


def _polars_traces() -> pl.List:
    import polars as pl

    span = pl.Struct({"version": pl.String, "start": pl.Int64, "end": pl.Int64})
    node = pl.Struct(
        {"sampled": pl.Boolean, "mask": pl.List(pl.Boolean), "weight_versions": pl.List(span)}
    )
    agent = pl.Struct({"trainable": pl.Boolean})
    return pl.List(pl.Struct({"agent": agent, "nodes": pl.List(node)}))


def _polars(records: pl.LazyFrame) -> list[Row]:
    import polars as pl

    span = pl.element().struct
    size = span.field("end") - span.field("start")
    version = span.field("version").cast(pl.Int64, strict=False)  # null for "default"
    spans = pl.col("weight_versions").list
    training_version = pl.col("step") - 1
    sampled = (
        records.select(
            pl.col("path").str.extract(r"step_(\d+)", 1).cast(pl.Int64).alias("step"), "traces"
        )
        .explode("traces")
        .unnest("traces")
        .filter(pl.col("agent").struct.field("trainable"))
        .select("step", "nodes")
        .explode("nodes")
        .unnest("nodes")
        .filter("sampled")
        .select(
            "step",
            tokens=pl.col("mask").list.sum(),
            labelled=spans.eval(size * version.is_not_null()).list.sum(),
            weighted=spans.eval(size * version).list.sum(),
            oldest=spans.eval(version).list.min(),
        )
    )
    rows = sampled.group_by("step").agg(
        pl.col("tokens", "labelled").sum(),
        mean=(training_version * pl.col("labelled") - pl.col("weighted")).sum()
        / pl.col("labelled").sum(),
        max=(training_version - pl.col("oldest")).max(),
    )
    return [Row(*row) for row in rows.sort("step").collect(engine="streaming").iter_rows()]


def loop_tokens(folder: Path) -> list[Row]:
    """The plain loop over json.loads, with a list of the ages of all tokens of a batch.

    What an orchestrator writes that also wants a quantile, or a histogram, of them.
    """
    rows = []
    for step, path in _files(folder):
        sampled = 0
        ages: list[int] = []
        with open(path, encoding="utf-8", newline="\n") as lines:
            for line in lines:
                for trace in json.loads(line)["traces"]:
                    if not trace["agent"]["trainable"]:
                        continue
                    for node in trace["nodes"]:
                        if not node["sampled"]:
                            continue
                        sampled += sum(node["mask"])
                        for span in node.get("weight_versions") or []:
                            if span["version"] == "default":
                                continue
                            age = step - 1 - int(span["version"])
                            ages.extend(age for _ in range(span["start"], span["end"]))
        mean = sum(ages) / len(ages) if ages else None
        rows.append(Row(step, sampled, len(ages), mean, max(ages, default=None)))
    return rows


def loop(folder: Path) -> list[Row]:
    """The plain loop over json.loads and the spans."""
    rows = []
    for step, path in _files(folder):
        sampled = labelled = total = 0
        oldest: int | None = None
        with open(path, encoding="utf-8", newline="\n") as lines:
            for line in lines:
                for trace in json.loads(line)["traces"]:
                    if not trace["agent"]["trainable"]:
                        continue
                    for node in trace["nodes"]:
                        if not node["sampled"]:
                            continue
                        sampled += sum(node["mask"])
                        for span in node.get("weight_versions") or []:
                            if span["version"] == "default":
                                continue
                            size, age = span["end"] - span["start"], step - 1 - int(span["version"])
                            labelled += size
                            total += size * age
                            oldest = age if oldest is None else max(oldest, age)
        rows.append(Row(step, sampled, labelled, total / labelled if labelled else None, oldest))
    return rows


class Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class Node(msgspec.Struct, gc=False):
    mask: msgspec.Raw = msgspec.Raw(b"[]")
    sampled: bool = False
    weight_versions: list[Span] | None = None


class Agent(msgspec.Struct, gc=False):
    trainable: bool


class Trace(msgspec.Struct, gc=False):
    agent: Agent
    nodes: list[Node]


class Episode(msgspec.Struct, gc=False):
    traces: list[Trace]


DECODER = msgspec.json.Decoder(Episode)


def floor(folder: Path) -> list[Row]:
    """Two processes that map the files and decode only the keys that matter.

    The mask is never built: the `t` of its text are counted. This is about the least that a reader
    in Python can do, with none of the checks.
    """
    parts = _halves([(step, path, path.stat().st_size) for step, path in _files(folder)])
    with multiprocessing.get_context("fork").Pool(len(parts)) as pool:
        results = pool.map(_count, parts, chunksize=1)
    sums: dict[int, list[int]] = {}
    for part in results:
        for step, (sampled, labelled, total, oldest) in part.items():
            old = sums.get(step, [0, 0, 0, oldest])
            sums[step] = [
                old[0] + sampled,
                old[1] + labelled,
                old[2] + total,
                max(old[3], oldest),
            ]
    return [
        Row(step, sampled, labelled, total / labelled if labelled else None, oldest)
        for step, (sampled, labelled, total, oldest) in sorted(sums.items())
    ]


Part = tuple[int, Path, int, int]  # step, file and the bytes where the part's lines begin


def _halves(files: list[tuple[int, Path, int]]) -> list[list[Part]]:
    """Equal shares of the bytes, one a process; a file may be cut between two."""
    share = -(-sum(size for *_, size in files) // THREADS)
    parts: list[list[Part]] = [[]]
    room = share
    for step, path, size in files:
        at = 0
        while at < size:
            if not room:
                parts.append([])
                room = share
            end = min(size, at + room)
            parts[-1].append((step, path, at, end))
            room -= end - at
            at = end
    return parts


def _count(parts: list[Part]) -> dict[int, tuple[int, int, int, int]]:
    answer = {}
    for step, path, begin, end in parts:
        sampled = labelled = total = 0
        oldest = -(1 << 31)
        for line in _lines(path, begin, end):
            for trace in DECODER.decode(line).traces:
                if not trace.agent.trainable:
                    continue
                for node in trace.nodes:
                    if not node.sampled:
                        continue
                    text = np.frombuffer(node.mask, np.uint8)
                    sampled += int(np.count_nonzero(text == ord("t")))
                    for span in node.weight_versions or ():
                        if span.version != "default":
                            size, age = span.end - span.start, step - 1 - int(span.version)
                            labelled += size
                            total += size * age
                            oldest = max(oldest, age)
        answer[step] = sampled, labelled, total, oldest
    return answer


def _lines(path: Path, begin: int, end: int) -> Iterator[memoryview]:
    """The lines of a file that begin in [begin, end)."""
    with open(path, "rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(text)  # closed when the last line is let go
    at = text.find(b"\n", begin - 1) + 1 if begin else 0
    while at < end:
        stop = text.find(b"\n", at)
        yield view[at:stop]
        at = stop + 1


def _files(folder: Path) -> list[tuple[int, Path]]:
    steps = [(re.search(r"step_(\d+)", str(path)), path) for path in folder.glob(FILES)]
    return sorted((int(match[1]), path) for match, path in steps if match)


def decompress(folder: Path) -> dict[str, int]:
    """Two processes that decode the frames of a trace store's sealed chunks, and no more."""
    frames = [frame for path in sorted(folder.glob(SEALED)) for frame in _frames(path)]
    half = -(-len(frames) // THREADS)
    shares = [frames[i : i + half] for i in range(0, len(frames), half)]
    with multiprocessing.get_context("fork").Pool(THREADS) as pool:
        return {"bytes": sum(pool.map(_decode, shares, chunksize=1))}


Frame = tuple[Path, int, int, int]  # file, offset, bytes in it and bytes of content


def _frames(path: Path) -> Iterator[Frame]:
    """The seek table of a seekable zstd file, which has no checksums in it."""
    with open(path, "rb") as file:
        file.seek(-9, 2)
        count, _, magic = struct.unpack("<IBI", file.read())
        assert magic == 0x8F92EAB1, f"{path} has no seek table"
        file.seek(-9 - 8 * count, 2)
        table = file.read(8 * count)
    at = 0
    for size, content in struct.iter_unpack("<II", table):
        yield path, at, size, content
        at += size


def _decode(frames: list[Frame]) -> int:
    import zstandard

    decoder = zstandard.ZstdDecompressor()
    total = 0
    for path, group in groupby(frames, key=lambda frame: frame[0]):
        with open(path, "rb") as file:
            for _, at, size, content in group:
                file.seek(at)
                total += len(decoder.decompress(file.read(size), max_output_size=content))
    return total


RIVALS: dict[str, Callable[[Path], list[Row]]] = {
    "duckdb": duckdb_struct,
    "duckdb-lines": duckdb_lines,
    "polars": polars_struct,
    "polars-lines": polars_lines,
    "loop": loop,
    "loop-tokens": loop_tokens,
    "floor": floor,
}


def main() -> None:
    names = [*RIVALS, "decompress"]
    if len(sys.argv) != 3 or sys.argv[1] not in names:
        sys.exit(f"usage: python benchmarks/rivals.py {'|'.join(names)} DIR")
    name, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    begin = time.perf_counter()
    if name == "decompress":
        print(json.dumps(decompress(folder)))
    else:
        print(json.dumps([asdict(row) for row in RIVALS[name](folder)]))
    seconds = time.perf_counter() - begin
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    peak = max(resource.getrusage(each).ru_maxrss for each in who)
    print(f"{seconds:.3f} s, {peak / 1024:.0f} MiB in the largest process", file=sys.stderr)


if __name__ == "__main__":
    main()
