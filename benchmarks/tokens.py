"""Time what traceage does once traces are Parquet: tokens, metrics and sizes.

    python benchmarks/tokens.py explode
    python benchmarks/tokens.py metrics --dir /big/disk --tokens 100e6
    python benchmarks/tokens.py tokens --dir /big/disk --tokens 1e9
    python benchmarks/tokens.py sizes --dir /big/disk

`explode` gives every token of spans in memory a row, `metrics` computes the metrics of a dump,
`tokens` writes a row a token of a dump, and `sizes` compares a dump with the JSONL it was made of.
Each has its rivals and its floor; every run is a fresh process, the runs are interleaved, and the
median is shown. What is compared has to be equal. Large dumps are copies of a converted one, with
other ids, other steps and other versions; they are kept below `--dir`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    import pyarrow as pa
    from numpy.typing import NDArray
    from run import Run

THREADS = 2
TIMES = 3
SPANS = 200_000
COLUMNS = ("index", "version", "age", "node", "training_version")
TRACE_COLUMNS = (
    "kind", "shipped", "episode_shipped", "episode_id", "trace_id", "trainable", "has_run",
    "policy_start", "policy_end", "file", "line",
)  # fmt: skip
SPAN_FIELDS = ("node", "start", "end", "label", "mixed")
READ = [*TRACE_COLUMNS, *(f"spans.list.element.{name}" for name in SPAN_FIELDS)]
"""The columns of a dump that its metrics need."""

Figures = list[dict[str, Any]]
Table = Any
"""Five named columns, as the tool has them."""


# Each run imports what it needs and no more: starting the interpreter is part of it.

# A row a token, in memory


def made_spans(tokens: int) -> pl.DataFrame:
    """Spans of a length that varies, `tokens` tokens in all."""
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(0)
    ends = np.sort(rng.choice(tokens - 1, SPANS - 1, replace=False)) + 1
    lengths = np.diff(ends, prepend=0, append=tokens)
    version = rng.integers(0, 100, SPANS)
    columns = {
        "start": rng.integers(0, 1000, SPANS),
        "length": lengths,
        "training_version": version + rng.integers(0, 8, SPANS),
        "version": version,
        "node": rng.integers(0, 16, SPANS),
    }
    return pl.DataFrame(columns).cast(pl.Int32)


def explode_traceage(spans: pl.DataFrame) -> Table:
    import traceage as ta

    return ta.explode(spans, COLUMNS)


def explode_polars(spans: pl.DataFrame) -> Table:
    import polars as pl

    return (
        spans.with_columns(
            index=pl.int_ranges("start", pl.col("start") + pl.col("length"), dtype=pl.Int32),
            age=pl.col("training_version") - pl.col("version"),
        )
        .select(COLUMNS)
        .explode("index")
    )


def explode_duckdb(spans: pl.DataFrame) -> Table:
    import duckdb

    connection = duckdb.connect(config={"threads": THREADS})
    connection.register("spans", spans.to_arrow())
    made: Table = connection.execute(
        """SELECT unnest(range(start, start + length))::INT AS index, version,
            training_version - version AS age, node, training_version FROM spans"""
    ).to_arrow_table()
    return made


def repeats(spans: pl.DataFrame) -> Table:
    import numpy as np

    lengths = spans["length"].to_numpy()
    return _five(lambda: np.repeat(spans["version"].to_numpy(), lengths))


def fills(spans: pl.DataFrame) -> Table:
    import numpy as np

    total = int(spans["length"].sum())
    return _five(lambda: np.full(total, 7, np.int32))


def _five(make: Callable[[], NDArray[np.int32]]) -> Table:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(THREADS) as threads:
        made = threads.map(lambda _: make(), COLUMNS)
        return dict(zip(COLUMNS, made, strict=True))


EXPLODERS: dict[str, Callable[[pl.DataFrame], Table]] = {
    "traceage": explode_traceage,
    "polars": explode_polars,
    "duckdb": explode_duckdb,
    "numpy.repeat": repeats,
    "numpy.full": fills,
}


def child_explode(tool: str, tokens: str) -> dict[str, Any]:
    import numpy as np

    spans = made_spans(int(tokens))
    runs = []
    for _ in range(TIMES + 1):
        begin, cpu = time.perf_counter(), time.process_time()
        table = EXPLODERS[tool](spans)
        runs.append((time.perf_counter() - begin, time.process_time() - cpu))
        sums = [_sum(np.asarray(table[name])) for name in COLUMNS]
        del table
    # The first one is for what is set up once, and for the machine to find the memory.
    first, *rest = (seconds for seconds, _ in runs)
    cpu = median(cpu for _, cpu in runs[1:])
    return {"seconds": median(rest), "fastest": min(rest), "first": first, "cpu": cpu, "sums": sums}


def _sum(values: NDArray[np.int32]) -> int:
    """A checksum that depends on the order of the values."""
    import numpy as np

    total, block = 0, 1 << 20
    weights = np.arange(block, dtype=np.int64) % 1009
    for at in range(0, len(values), block):
        part = values[at : at + block]
        total += (at // block + 1) * int(part.astype(np.int64) @ weights[: len(part)])
    return total


def explode(options: argparse.Namespace) -> None:
    from run import interleave

    tokens = int(options.tokens or 100e6)
    runs = interleave(
        {name: _child("explode", name, tokens) for name in EXPLODERS}, options.repeats
    )
    sums = {name: runs[name][0].output["sums"] for name in ("traceage", "polars", "duckdb")}
    assert len({tuple(each) for each in sums.values()}) == 1, sums
    print(f"### explode: {tokens:,} tokens in {SPANS:,} spans to five int32 columns\n")
    print("| tool | seconds | fastest | first | million tokens/s | times traceage | CPU s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    own = _median(runs["traceage"], "seconds")
    for name, each in runs.items():
        seconds, cpu = _median(each, "seconds"), _median(each, "cpu")
        fastest, first = min(run.output["fastest"] for run in each), _median(each, "first")
        print(
            f"| {name} | {seconds:.2f} | {fastest:.2f} | {first:.2f} "
            f"| {tokens / seconds / 1e6:.0f} | {seconds / own:.2f} | {cpu:.2f} |"
        )
    print("\nThe columns of traceage, polars and duckdb are equal.\n")


# Metrics of a dump


def metrics_traceage(path: Path) -> Figures:
    import traceage as ta

    return ta.off_policy_metrics(ta.scan_spans(path, quiet=True)).to_dicts()


def read_columns(path: Path) -> Figures:
    """Only read what the metrics need, and let go of it."""
    import pyarrow.parquet as pq

    for file in _files(path):
        with pq.ParquetFile(file) as opened:
            opened.read(columns=READ)
    return []


def duckdb_tokens(path: Path) -> Figures:
    """The same figures from a row a token, as one would write them."""
    tokens = """SELECT step, label, step - 1 - try_cast(label AS INT) AS age,
        unnest(range("end" - start)) FROM spans"""
    figures = """SELECT step, count(*) AS sampled, count(age) AS labelled,
        count(*) FILTER (label = 'default') AS defaults, avg(age) AS mean, max(age) AS max,
        min(age) AS min, quantile_disc(age, 0.5) AS p50, quantile_disc(age, 0.95) AS p95,
        quantile_disc(age, 0.99) AS p99 FROM tokens GROUP BY step"""
    return _duckdb(path, tokens, figures)


def duckdb_spans(path: Path) -> Figures:
    """The same figures from the spans, added up by age: what somebody writes who knows how."""
    tokens = """SELECT step, label, step - 1 - try_cast(label AS INT) AS age,
        sum("end" - start)::BIGINT AS tokens FROM spans GROUP BY ALL"""
    figures = """SELECT step, sum(tokens)::BIGINT AS sampled,
        sum(tokens) FILTER (age IS NOT NULL)::BIGINT AS labelled,
        coalesce(sum(tokens) FILTER (label = 'default'), 0)::BIGINT AS defaults,
        sum(age * tokens) / sum(tokens) FILTER (age IS NOT NULL) AS mean, max(age) AS max,
        min(age) AS min, min(age) FILTER (below * 100 >= aged * 50) AS p50,
        min(age) FILTER (below * 100 >= aged * 95) AS p95,
        min(age) FILTER (below * 100 >= aged * 99) AS p99
        FROM (SELECT *, sum(tokens) FILTER (age IS NOT NULL) OVER (PARTITION BY step) AS aged,
            sum(tokens) FILTER (age IS NOT NULL) OVER (PARTITION BY step ORDER BY age) AS below
            FROM tokens) GROUP BY step"""
    return _duckdb(path, tokens, figures)


def _duckdb(path: Path, tokens: str, figures: str) -> Figures:
    import duckdb

    connection = duckdb.connect(config={"threads": THREADS})
    rows = connection.execute(
        f"""
        WITH traces AS (SELECT * FROM
            read_parquet('{path}/step=*/*.parquet', hive_partitioning = true)
            WHERE coalesce(kind, 'train') = 'train' AND trainable AND shipped IS NOT FALSE),
        spans AS (SELECT step, trace_id, unnest(spans, recursive := true) FROM traces),
        tokens AS ({tokens}),
        of_tokens AS ({figures}),
        nodes AS (SELECT step, trace_id, node, count(DISTINCT label) AS labels FROM spans
            WHERE node IS NOT NULL GROUP BY ALL),
        of_nodes AS (SELECT step, count(*) FILTER (labels > 1) AS mixed, count(*) AS nodes
            FROM nodes GROUP BY step),
        episodes AS (SELECT step, episode_id, count(trace_id) AS traces,
            max(CASE WHEN has_run THEN coalesce(greatest(step - 1 - policy_start, 0), 0) END)
                AS total,
            max(CASE WHEN has_run THEN coalesce(greatest(policy_end - policy_start, 0), 0) END)
                AS flight
            FROM traces GROUP BY step, episode_id),
        of_episodes AS (SELECT step, count(*) AS episodes, sum(traces)::BIGINT AS traces,
            avg(total) AS stale, max(total) AS stalest, avg(least(total, flight)) AS flight,
            avg(total - least(total, flight)) AS queue FROM episodes GROUP BY step)
        SELECT step, episodes, traces, sampled, labelled, defaults, mixed, nodes, mean, max, min,
            p50, p95, p99, stale, stalest, flight, queue
        FROM of_tokens LEFT JOIN of_nodes USING (step) LEFT JOIN of_episodes USING (step)
        ORDER BY step"""
    ).fetchall()
    names = [
        "step", "episodes", "traces", "sampled_tokens", "labelled_tokens", "default_tokens",
        "mixed_nodes", "sampled_nodes",
        *(f"off_policy/token/{figure}" for figure in ("mean", "max", "min", "p50", "p95", "p99")),
        "off_policy/mean", "off_policy/max", "off_policy/in_flight/mean",
        "off_policy/in_queue/mean",
    ]  # fmt: skip
    return [dict(zip(names, row, strict=True)) for row in rows]


READERS: dict[str, Callable[[Path], Figures]] = {
    "traceage": metrics_traceage,
    "columns": read_columns,
    "duckdb-spans": duckdb_spans,
    "duckdb-tokens": duckdb_tokens,
}


def child_metrics(name: str, path: str, times: str) -> dict[str, Any]:
    """Do it `times` times; the seconds are those of the last."""
    seconds, figures = 0.0, []
    for _ in range(int(times)):
        begin = time.perf_counter()
        figures = READERS[name](Path(path))
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "figures": figures}


def metrics(options: argparse.Namespace) -> None:
    from run import interleave

    path, tokens, files = copies(options.dir, options.base, options.tokens or 100e6)
    whole = [sys.executable, "-m", "traceage", "metrics", str(path), "--format", "json", "--quiet"]
    commands = {"`traceage metrics`": whole}
    commands |= {name: _child("metrics", name, path, 1) for name in READERS if name != "traceage"}
    warm = ("traceage", "columns", "duckdb-tokens")
    commands |= {f"{name}, in process": _child("metrics", name, path, 3) for name in warm}
    runs = interleave(commands, options.repeats)
    ours = runs["`traceage metrics`"][0].output
    for name in ("traceage, in process", "duckdb-spans", "duckdb-tokens"):
        _compare(name, ours, runs[name][0].output["figures"])
    print(f"### metrics: a dump of {tokens:,} sampled tokens in {files:,} files\n")
    print("| tool | seconds | fastest | million tokens/s | times columns | CPU s | peak RSS, MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, each in runs.items():
        inside = name.endswith("in process")
        times = [run.output["seconds"] if inside else run.seconds for run in each]
        base = runs["columns, in process" if inside else "columns"]
        floor = median(run.output["seconds"] if inside else run.seconds for run in base)
        cpu = median(run.cpu for run in each)
        print(
            f"| {name} | {median(times):.2f} | {min(times):.2f} "
            f"| {tokens / median(times) / 1e6:.0f} | {median(times) / floor:.2f} "
            f"| {'' if inside else f'{cpu:.2f}'} | {max(run.peak for run in each) / 2**20:.0f} |"
        )
    print("\nThe figures of traceage and duckdb are equal.\n")


def _compare(name: str, ours: Figures, theirs: Figures) -> None:
    assert len(ours) == len(theirs), f"{name}: {len(ours)} steps against {len(theirs)}"
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            same = mine[key] == value or math.isclose(mine[key], value, rel_tol=1e-9)
            assert same, f"{name}, step {mine['step']}: {key} {mine[key]} against {value}"


# A row a token, on disk


def child_tokens(path: str, output: str) -> dict[str, Any]:
    from traceage.cli import main

    assert main(["tokens", path, "-o", output, "--quiet"]) == 0
    return {}


def child_write(source: str, output: str, dictionaries: str) -> dict[str, Any]:
    """Write again what was written, and time that alone: each batch is in memory before."""
    import pyarrow.parquet as pq

    texts = ["env", "trace_id"] if dictionaries == "dictionaries" else None
    seconds = cpu = 0.0
    with pq.ParquetFile(source, read_dictionary=texts) as opened:
        writer = pq.ParquetWriter(output, opened.schema_arrow, compression="zstd")
        for group in range(opened.num_row_groups):
            table = opened.read_row_group(group)
            begin, before = time.perf_counter(), time.process_time()
            writer.write_table(table, row_group_size=table.num_rows)
            seconds += time.perf_counter() - begin
            cpu += time.process_time() - before
        begin = time.perf_counter()
        writer.close()
        seconds += time.perf_counter() - begin
        return {"seconds": seconds, "cpu": cpu, "rows": opened.metadata.num_rows}


def tokens(options: argparse.Namespace) -> None:
    from run import interleave

    path, held, files = copies(options.dir, options.base, options.tokens or 1e9)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        ours = str(Path(folder) / "tokens.parquet")
        again = str(Path(folder) / "again.parquet")
        commands = {
            "`traceage tokens`": _child("tokens", path, ours),
            "pyarrow writes": _child("write", ours, again, "strings"),
            "pyarrow writes, strings as dictionaries": _child("write", ours, again, "dictionaries"),
        }
        runs = interleave(commands, options.repeats)
        size = Path(ours).stat().st_size
    rows = runs["pyarrow writes"][0].output["rows"]
    print(f"### tokens: a dump of {held:,} sampled tokens in {files:,} files\n")
    print(f"{rows:,} rows of 7 columns, {size / 1e6:.0f} MB\n")
    print("| tool | seconds | fastest | million tokens/s | share | CPU s | peak RSS, MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    rates: dict[str, float] = {}
    for name, each in runs.items():
        times = [run.output.get("seconds", run.seconds) for run in each]
        rates[name] = rows / median(times)
        cpu = median(run.output.get("cpu", run.cpu) for run in each)
        share = rates["`traceage tokens`"] / rates[name]
        print(
            f"| {name} | {median(times):.1f} | {min(times):.1f} | {rates[name] / 1e6:.1f} "
            f"| {share:.2f} | {cpu:.1f} | {max(run.peak for run in each) / 2**20:.0f} |"
        )
    print("\nThe share is what `traceage tokens` reaches of the row's speed.\n")


# Size on disk


def sizes(options: argparse.Namespace) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import zstandard
    from run import dump

    import traceage as ta

    source, _ = dump(options.dir, "steps", options.bytes)
    paths = sorted(source.rglob("*.jsonl"))
    plain = sum(path.stat().st_size for path in paths)
    found = {"JSONL": plain}
    with ThreadPoolExecutor(THREADS) as threads:
        packers: dict[str, Callable[[bytes], bytes]] = {
            "gzip -6": lambda text: gzip.compress(text, 6),
            "zstd -3": lambda text: zstandard.ZstdCompressor(3).compress(text),
            "zstd -19": lambda text: zstandard.ZstdCompressor(19).compress(text),
        }
        for name, pack in packers.items():
            if name != "zstd -19" or options.slow:
                packed = threads.map(lambda path, pack=pack: len(pack(path.read_bytes())), paths)
                found[name] = sum(packed)
    for messages in (True, False):
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            made = ta.write_dump(source, folder, messages=messages, quiet=True)
            name = "dump, with messages" if messages else "dump"
            found[name] = sum(path.stat().st_size for path in _files(Path(folder)))
    count = made["tokens"].sum()
    print(f"### sizes: {len(paths)} files, {count:,} sampled tokens\n")
    print("| form | MB | of the JSONL | bytes a sampled token |")
    print("| --- | ---: | ---: | ---: |")
    for name, size in found.items():
        print(f"| {name} | {size / 1e6:.1f} | {size / plain:.1%} | {size / count:.1f} |")
    print()


# Dumps of any size


def copies(folder: Path, size: int, tokens: float) -> tuple[Path, int, int]:
    """A dump of at least `tokens` sampled tokens, how many it has, and its files.

    It is made of copies of one dump, converted of a generated one of `size` bytes.
    """
    from concurrent.futures import ProcessPoolExecutor

    import pyarrow.parquet as pq
    from run import dump

    import traceage as ta

    base = folder / f"dump-{size / 1e6:g}MB"
    if not base.exists():
        source, _ = dump(folder, "steps", size)
        part = base.with_name(base.name + ".part")
        ta.write_dump(source, part, quiet=True)
        os.replace(part, base)
    files = _files(base)
    held = sum(sum(pq.read_table(f, columns=["tokens"])["tokens"].to_pylist()) for f in files)
    count = math.ceil(tokens / held)
    path = folder / f"dump-{tokens / 1e6:g}M-tokens"
    if not path.exists():
        part = path.with_name(path.name + ".part")
        with ProcessPoolExecutor(THREADS) as pool:
            for _ in pool.map(_copy, files, [part] * len(files), [count] * len(files)):
                pass
        os.replace(part, path)
    for file in _files(path):  # read once, so that the disk is not measured
        file.read_bytes()
    return path, held * count, len(files) * count


def _copy(file: Path, folder: Path, count: int) -> None:
    """`count` copies of one file of a dump, each at a later step."""
    import polars as pl
    import pyarrow.parquet as pq

    from traceage.formats.dump import dump_metadata

    table = pq.ParquetFile(file).read()
    told = dump_metadata(pl.read_parquet_metadata(file))
    assert told is not None
    assert told.step is not None
    last = max(int(step.name.partition("=")[2]) for step in file.parents[1].glob("step=*"))
    for number in range(count):
        step = told.step + number * last
        target = folder / f"step={step}" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        schema = table.schema.with_metadata(told._replace(step=step).as_arrow())
        moved = _later(table, number * last, f"{number:04x}").cast(schema)
        pq.write_table(moved, target, compression="zstd", row_group_size=moved.num_rows)


def _later(table: Any, steps: int, tag: str) -> pa.Table:
    """The same traces under other ids, sampled and trained `steps` steps later."""
    import pyarrow as pa
    import pyarrow.compute as pc

    spans = table["spans"].combine_chunks()
    flat = spans.values
    labels = flat.field("label").dictionary_encode()
    texts = labels.dictionary.to_pylist()
    moved = [str(int(text) + steps) if text.isdigit() else text for text in texts]
    label = pa.array(moved, pa.string()).take(labels.indices)
    fields = list(flat.type)
    values = [label if field.name == "label" else flat.field(field.name) for field in fields]
    columns = {name: table[name] for name in table.schema.names}
    for name in ("episode_id", "trace_id"):
        columns[name] = pc.utf8_replace_slice(table[name], 0, len(tag), tag)
    for name in ("policy_start", "policy_end"):
        columns[name] = pc.add(table[name], pa.scalar(steps, pa.int32()))
    struct = pa.StructArray.from_arrays(values, fields=fields)
    columns["spans"] = pa.ListArray.from_arrays(spans.offsets, struct)
    return pa.Table.from_arrays(list(columns.values()), schema=table.schema)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("step=*/*.parquet"))


def _child(name: str, *words: object) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "child", name, *map(str, words)]


def _median(runs: Sequence[Run], key: str) -> float:
    return float(median(run.output[key] for run in runs))


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "explode": child_explode,
    "metrics": child_metrics,
    "tokens": child_tokens,
    "write": child_write,
}


def main() -> None:
    if sys.argv[1:2] == ["child"]:  # one run of one tool
        print(json.dumps(CHILDREN[sys.argv[2]](*sys.argv[3:])))
        return
    from generate import parse_bytes

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    sections = {"explode": explode, "metrics": metrics, "tokens": tokens, "sizes": sizes}
    parser.add_argument("section", choices=sections)
    parser.add_argument("--tokens", type=float, help="1e8, or 1e9 for `tokens`")
    parser.add_argument("--base", type=parse_bytes, default=parse_bytes("340MB"), metavar="SIZE")
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("340MB"), metavar="SIZE")
    parser.add_argument("--dir", type=Path, help="keep the dumps here (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow", action="store_true", help="zstd -19 too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        options.dir = options.dir or Path(temporary)
        options.dir.mkdir(parents=True, exist_ok=True)
        sections[options.section](options)


if __name__ == "__main__":
    main()
