"""A Parquet dump answers what its source answers; so do all the ways to hold the same episodes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference as ref
import zstandard
from compare import (
    assert_same_frame,
    assert_same_metrics,
    assert_same_streams,
    assert_same_tokens,
    write_lines,
    write_steps,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from reference import Record, Stored
from store_writer import StoreWriter
from strategies import encode, stored_records

import traceage as ta
from traceage.cli import main

DATA = Path(__file__).parent.parent / "data"

few = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)

Options = dict[str, Any]
WEIGHTINGS: tuple[Literal["nodes", "branches"], ...] = ("nodes", "branches")


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of one example."""
    with TemporaryDirectory() as name:
        yield Path(name)


# --- what is asked --------------------------------------------------------------------------------

# What tells of the place on disk, and what a layout does not tell.
PLACE = {"file", "line", "kind", "subset", "shipped"}


def answers(source: Path | list[Path], options: Options) -> dict[str, pl.DataFrame]:
    """Everything that can be asked of a source."""
    spans = ta.scan_spans(source, **options).collect()
    tables = {"spans": spans}
    for weighting in WEIGHTINGS:
        tokens = ta.scan_tokens(source, weighting=weighting, **options)
        tables[f"tokens by {weighting}"] = tokens.collect()
        tables[f"ages by {weighting}"] = ta.age_counts(spans, ["step", "env"], weighting)
        tables[f"metrics by {weighting}"] = ta.off_policy_metrics(spans, weighting=weighting)
    return tables


def told(source: Path | list[Path], options: Options) -> dict[str, pl.DataFrame] | str:
    """The answers, or that there are none."""
    try:
        return answers(source, options)
    except ta.TraceError:
        return "refused"


def assert_alike(
    one: Path | list[Path],
    other: Path | list[Path],
    options: Options | None = None,
    *,
    without: set[str] | None = None,
) -> None:
    """Two sources give the same answers, or neither gives any."""
    ours, theirs = told(one, options or {}), told(other, options or {})
    if isinstance(ours, str) or isinstance(theirs, str):
        assert ours == theirs
        return
    for name, table in ours.items():
        columns = [column for column in table.columns if column not in (without or set())]
        if name.startswith("metrics"):
            # Sums of floats, in whatever order.
            assert_frame_equal(
                table.select(columns), theirs[name].select(columns), rel_tol=1e-12, abs_tol=1e-12
            )
        else:
            assert_same_frame(table.select(columns), theirs[name].select(columns))


reading: st.SearchStrategy[Options] = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["train", "eval", "any"]),
        "subset": st.sampled_from(["effective", "all"]),
        "include_frozen": st.booleans(),
        "training_version": st.sampled_from(
            ["step", "step-1", 5, "policy_start", {step: 2 * step for step in range(40)}]
        ),
    },
)


# --- the same episodes, held in every way ---------------------------------------------------------


def repack(steps: Path, target: Path, suffix: str) -> None:
    """A per-step layout whose files are compressed otherwise."""
    for path in sorted((steps / "rollouts").rglob("traces.jsonl*")):
        data = ref.read_bytes(path)
        if suffix == ".gz":
            data = gzip.compress(data, 1)
        elif suffix == ".zst":
            data = zstandard.ZstdCompressor().compress(data)
        place = target / path.relative_to(steps).with_name(f"traces.jsonl{suffix}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def write_platform(path: Path, stored: list[Stored], *, whole: Callable[[int], bool]) -> None:
    """Episodes as the platform's samples; those that are not `whole` lost their record."""
    rows = []
    for number, (record, step, _) in enumerate(stored):
        info: Record = {"native_trace_index": 0}
        if whole(number):
            info["native_wrapper"] = record
        text = dict.fromkeys(
            ["run_id", "tag", "prompt", "completion", "trajectory", "answer", "task"], ""
        )
        rows.append(
            {
                **text,
                "step": step,
                "problem_id": number,
                "sample_id": 0,
                "env_name": ref.get(record, "env", "name"),
                "info": json.dumps(info, ensure_ascii=False),
                "reward": 0.5,
                "advantage": None,
                "metrics": "{}",
                "timing": "{}",
                "num_input_tokens": 0,
                "num_output_tokens": 0,
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = {"advantage": pl.Float64, "env_name": pl.String}
    pl.DataFrame(rows, schema_overrides=schema).write_parquet(path, compression="snappy")


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The real dump in every layout, and a dump of each."""
    root = tmp_path_factory.mktemp("ways")
    sources = {
        "store": DATA / "real-dump",
        "steps": DATA / "real-dump-steps",
        "platform": DATA / "platform-dump",
    }
    for suffix in (".gz", ".zst"):
        repack(DATA / "real-dump-steps", root / f"steps{suffix}", suffix)
        sources[f"steps{suffix}"] = root / f"steps{suffix}"
    for name in ("store", "steps", "platform"):
        ta.write_dump(sources[name], root / f"dump of {name}")
        sources[f"dump of {name}"] = root / f"dump of {name}"
    return sources


REAL_OPTIONS: list[Options] = [
    {},
    {
        "kind": "any",
        "include_frozen": True,
        "training_version": "policy_end",
        "version_pattern": r"^(\d+)$",
    },
]

# The platform's samples and the per-step records were written without what the trainer said.
ANNOTATED = {
    "advantage", "trainer_logprob", "reference_logprob", "entropy", "trainer_mismatch_kl"
}  # fmt: skip


@pytest.mark.parametrize("options", REAL_OPTIONS, ids=str)
def test_the_real_dump_in_every_layout(ways: dict[str, Path], options: Options) -> None:
    for name, path in ways.items():
        if name != "store":
            assert_alike(ways["store"], path, options, without=PLACE | ANNOTATED | {"not_shipped"})
    for name in ("store", "steps", "platform"):
        assert_alike(ways[name], ways[f"dump of {name}"], options)


def test_the_real_dump_against_the_reference(ways: dict[str, Path]) -> None:
    rows = ref.token_rows(ref.fold_store(DATA / "real-dump"))
    dump = ways["dump of store"]
    assert_same_tokens(ta.scan_spans(dump).collect(), rows)
    assert_same_metrics(ta.off_policy_metrics(ta.scan_spans(dump)), ref.metrics_rows(rows))


def test_no_eval_in_the_real_dump(ways: dict[str, Path]) -> None:
    for name in ("store", "dump of store"):
        assert told(ways[name], {"kind": "eval"}) == told(ways["store"], {"kind": "eval"}), name


# --- random records -------------------------------------------------------------------------------


def relabel(record: Record, spelling: str) -> Record:
    """The same record, its integer labels spelt otherwise."""
    again: Record = json.loads(json.dumps(record))
    for one in again.get("traces", [again]):
        for own in one.get("nodes") or []:
            for span in own.get("weight_versions") or []:
                if span["version"] != "default":
                    span["version"] = spelling.format(span["version"])
    return again


def write_store(root: Path, stored: list[Stored], rng: Random) -> StoreWriter:
    """A store in which some traces trained, some did not, and some are an evaluation's."""
    store = StoreWriter(root)
    for record, step, _ in stored:
        assert step is not None
        kind = rng.choice(["train", "train", "train", "eval"])
        store.append(record, arrival=step, kind=kind)
        shipped = rng.choice(["all", "all", "some", "none"])
        for one in record.get("traces", [record]):
            if shipped == "all" or (shipped == "some" and rng.random() < 0.5):
                batch = step + rng.randrange(3)
                info = {"effective": True, "ship": {"step": batch, "time": 3.0}}
                store.annotate(one["id"], info, branches=[])
            elif rng.random() < 0.3:
                store.annotate(one["id"], {"effective": False}, branches=[])
        if rng.random() < 0.3:
            store.stream.roll()
    return store


@few
@given(stored_records(), st.integers(0, 999), reading, st.booleans())
def test_a_dump_of_a_store(stored: list[Stored], seed: int, options: Options, spelt: bool) -> None:
    if spelt:
        stored = [one._replace(record=relabel(one.record, "step_{}")) for one in stored]
        options = {**options, "version_pattern": r"^step_(\d+)$"}
    with folder() as root, no_warnings():  # of traces left behind
        write_store(root / "run", stored, Random(seed))
        ta.write_dump(root / "run", root / "dump")
        assert_alike(root / "run", root / "dump", options)
        assert_alike(root / "run", root / "dump", {"subset": "all", "kind": "any", **options})


@few
@given(stored_records(), stored_records(max_size=2, first=10), st.integers(0, 999), reading)
def test_a_dump_of_a_per_step_layout(
    stored: list[Stored], evals: list[Stored], seed: int, options: Options
) -> None:
    """What arrived and what trained stand side by side, and evaluations beside both."""
    rng = Random(seed)
    trained = [one for one in stored if rng.random() < 0.7]
    with folder() as root:
        run = root / "run"
        suffix = rng.choice(["", ".gz", ".zst"])
        write_steps(run, stored, subset="all", suffix=suffix)
        write_steps(run, trained, subset="effective", suffix=suffix)
        if rng.random() < 0.5:
            write_steps(run, evals, kind="eval", subset=rng.choice(["all", "effective"]))
        ta.write_dump(run, root / "dump")
        assert_alike(run, root / "dump", options)
        assert_alike(run, root / "dump", {"subset": "all", "kind": "any", **options})


@few
@given(stored_records(), reading)
def test_platform_samples_of_random_records(stored: list[Stored], options: Options) -> None:
    """One episode a row, told like the per-step layout of the same episodes."""
    stored = [one for one in stored if "traces" in one.record]
    if not stored:
        return
    with folder() as root:
        write_platform(root / "platform" / "samples.parquet", stored, whole=lambda _: True)
        spans = ta.scan_spans(root / "platform").collect()
        # A row there belongs to a batch.
        rows = [replace(row, shipped=True) for row in ref.token_rows(stored)]
        assert_same_tokens(spans, rows)
        for weighting in WEIGHTINGS:
            tokens = ta.scan_tokens(root / "platform", weighting=weighting).collect()
            own = ref.sample_rows(stored, rows) if weighting == "branches" else rows
            assert_same_streams(tokens, own)
        ta.write_dump(root / "platform", root / "dump")
        assert_alike(root / "platform", root / "dump", options)


@few
@given(stored_records(), st.integers(1, 9))
def test_a_dump_of_a_bare_file(stored: list[Stored], step: int) -> None:
    """The step that the caller gives is the dump's."""
    with folder() as root:
        path = root / "traces.jsonl"
        write_lines(path, [one.record for one in stored])
        ta.write_dump(path, root / "dump", step=step)
        rows = ref.token_rows([Stored(one.record, step, {}) for one in stored])
        assert_same_tokens(ta.scan_spans(root / "dump").collect(), rows)
        assert_same_streams(ta.scan_tokens(root / "dump").collect(), rows)
        by_branch = ta.scan_tokens(root / "dump", weighting="branches").collect()
        assert_same_streams(by_branch, ref.sample_rows(stored, rows))


@few
@given(stored_records(), st.data())
def test_pushdown_changes_nothing(stored: list[Stored], data: st.DataObject) -> None:
    with folder() as root:
        write_steps(root / "run", stored)
        ta.write_dump(root / "run", root / "dump")
        lazy = ta.scan_tokens(root / "dump")
        whole = lazy.collect()
        columns = data.draw(st.lists(st.sampled_from(whole.columns), min_size=1, unique=True))
        predicate = data.draw(
            st.sampled_from(
                [
                    pl.col("step") == stored[0].step,
                    pl.col("age") > 3,
                    pl.col("context_age") >= 2,
                    pl.col("logprob") < -1.0,
                    (pl.col("env") == "math") & (pl.col("index") > 0),
                    pl.lit(False),
                ]
            )
        )
        picked = lazy.filter(predicate).select(columns).collect()
        started = lazy.head(3).collect()
    assert_same_frame(picked, whole.filter(predicate).select(columns))
    assert started.equals(whole.head(3))


def test_any_one_column_alone(ways: dict[str, Path]) -> None:
    spans = ta.scan_spans(ways["dump of store"])
    whole = spans.collect()
    for column in whole.columns:
        assert_frame_equal(spans.select(column).collect(), whole.select(column))


def test_a_step_that_nobody_knows(tmp_path: Path) -> None:
    """A trace has to belong to some step before it can be kept."""
    path = tmp_path / "traces.jsonl"
    write_lines(path, [simple(1)])
    with pytest.raises(ta.TraceError, match="step"):
        ta.write_dump(path, tmp_path / "dump")
    assert not files_of(tmp_path / "dump")


# --- records by hand ------------------------------------------------------------------------------


def simple(number: int, tokens: int = 4) -> Record:
    """An episode of a solver's trace, `t<number>`, and a frozen judge's."""
    node = {
        "sampled": True,
        "token_ids": list(range(tokens + 1)),
        "mask": [False] + [True] * tokens,
        "logprobs": [-0.5] * tokens,
        "weight_versions": [{"version": str(number % 5), "start": 0, "end": tokens}],
        "message": {"role": "assistant", "content": f"reply {number} \u2028"},
    }
    judge = {"id": f"j{number}", "agent": {"name": "judge", "trainable": False}, "nodes": [node]}
    solver = {"id": f"t{number}", "agent": {"name": "solver"}, "nodes": [node]}
    return {"id": f"e{number}", "env": {"id": "toy"}, "traces": [solver, judge]}


def files_of(dump: Path) -> list[Path]:
    return sorted(dump.glob("step=*/*.parquet"))


def converted(done: pl.DataFrame) -> list[str]:
    """The names of the source files that were converted this time."""
    return [Path(path).name for path in done.filter("written")["source"]]


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ta.TraceWarning)
        yield


FEW_ROWS: dict[str, Record] = {
    "no traces": {"id": "e", "traces": []},
    "no nodes": {"id": "e", "traces": [{"id": "t", "nodes": []}]},
    "frozen alone": {"id": "e", "traces": simple(1)["traces"][1:]},
    "no token ids": {"id": "t", "nodes": [{"sampled": True, "mask": [True, True]}]},
    "an attempt alone": {
        "id": "t",
        "nodes": [
            {
                "sampled": True,
                "mask": [True],
                "token_ids": [1],
                "semantic_parents": [{"node": 0, "type": "compaction_attempt"}],
            }
        ],
    },
}


@pytest.mark.parametrize("name", FEW_ROWS)
def test_a_dump_of_hardly_anything(tmp_path: Path, name: str) -> None:
    """A row group of one trace, or of none: there is an answer, of few rows."""
    write_steps(tmp_path / "steps", [Stored(FEW_ROWS[name], 3, {})])
    store = StoreWriter(tmp_path / "store")
    store.append(FEW_ROWS[name], arrival=3)
    for layout in ("steps", "store"):
        ta.write_dump(tmp_path / layout, tmp_path / f"dump of {layout}")
        for options in ({}, {"include_frozen": True, "subset": "all"}):
            if layout == "steps" and options:
                options = {"include_frozen": True}
            assert told(tmp_path / layout, options) != "refused", (layout, options)
            assert_alike(tmp_path / layout, tmp_path / f"dump of {layout}", options)


def test_platform_samples_may_hold_nan(tmp_path: Path) -> None:
    """As lines of JSON may: a logprob that is a bare NaN."""
    record = simple(1)
    record["traces"][0]["nodes"][0]["logprobs"] = [-1.0, float("nan"), None, -2.0]
    path = tmp_path / "samples.parquet"
    write_platform(path, [Stored(record, 3, {})], whole=lambda _: True)
    tokens = ta.scan_tokens(path, ["logprob"]).collect()
    assert tokens["logprob"].to_list() == [-1.0, None, None, -2.0]


def test_rows_without_a_record_are_reported(tmp_path: Path) -> None:
    stored = [Stored(simple(number), 3, {}) for number in range(4)]
    path = tmp_path / "samples.parquet"
    write_platform(path, stored, whole=lambda number: number != 2)
    summary = ta.ReadSummary()
    with no_warnings():
        spans = ta.scan_spans(path, summary=summary).collect()
    assert summary.without_record == 1
    assert any("1 platform rows" in line for line in summary.lines())
    assert set(spans["episode_id"]) == {"e0", "e1", "e3"}

    # With a warning, so that nobody has to look at a summary to hear of it.
    with pytest.warns(ta.TraceWarning, match="native_wrapper"):
        ta.scan_tokens(path, ["age"]).collect()
    summary = ta.ReadSummary()
    with no_warnings():
        done = ta.write_dump(path, tmp_path / "dump", summary=summary)
    assert summary.without_record == 1
    assert done["traces"].to_list() == [6]


# --- as other tools read it -----------------------------------------------------------------------


def test_other_tools_count_the_same_tokens(tmp_path: Path) -> None:
    stored = [Stored(simple(number, 3 + number), 1 + number % 12, {}) for number in range(15)]
    write_steps(tmp_path / "run", stored)
    dump = tmp_path / "dump"
    ta.write_dump(tmp_path / "run", dump)
    wanted: dict[int, int] = {}
    for row in ref.token_rows(stored):
        assert row.step is not None
        wanted[row.step] = wanted.get(row.step, 0) + (row.index is not None)

    traces = pl.scan_parquet(dump / "**/*.parquet", hive_partitioning=True).filter("trainable")
    by_step = traces.group_by("step").agg(pl.col("tokens").sum()).collect()
    assert dict(by_step.rows()) == wanted
    span = pl.col("spans").struct
    by_step = (
        traces.select("step", "spans")
        .explode("spans")
        .group_by("step")
        .agg((span.field("end") - span.field("start")).sum().alias("tokens"))
        .collect()
    )
    assert dict(by_step.rows()) == wanted

    files = f"read_parquet('{dump}/**/*.parquet', hive_partitioning = true)"
    assert by_sql(f"SELECT step, sum(tokens) FROM {files} WHERE trainable GROUP BY step") == wanted
    unnested = f"SELECT step, unnest(spans) AS span FROM {files} WHERE trainable"
    query = f'SELECT step, sum(span."end" - span.start) FROM ({unnested}) GROUP BY step'
    assert by_sql(query) == wanted


def by_sql(query: str) -> dict[int, int]:
    return dict(duckdb.connect().execute(query).fetchall())


def test_other_tools_read_the_real_dump(ways: dict[str, Path]) -> None:
    wanted = dict(
        ta.off_policy_metrics(ta.scan_spans(DATA / "real-dump"))
        .select("step", "sampled_tokens")
        .rows()
    )
    for name in ("store", "steps", "platform"):
        files = f"read_parquet('{ways[f'dump of {name}']}/**/*.parquet', hive_partitioning = true)"
        counted = "WHERE trainable AND shipped IS NOT false GROUP BY step"
        assert by_sql(f"SELECT step, sum(tokens) FROM {files} {counted}") == wanted, name


@pytest.mark.parametrize("messages", [False, True])
def test_the_schema_is_that_of_the_files(tmp_path: Path, messages: bool) -> None:
    write_steps(tmp_path / "run", [Stored(simple(1), 3, {})])
    ta.write_dump(tmp_path / "run", tmp_path / "dump", messages=messages)
    schema = ta.read_dump_schema(messages)
    names = ["step"]
    for field in pq.read_schema(files_of(tmp_path / "dump")[0]):
        names.append(field.name)
        if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type):
            names += [f"{field.name}.{inner.name}" for inner in field.type.value_type]
    assert schema["column"].to_list() == names
    assert ("nodes.message" in names) == messages
    assert all(schema["meaning"].str.len_chars() > 0)
    assert all(schema["type"].str.len_chars() > 0)


def test_spans_are_read_from_the_span_columns_alone(ways: dict[str, Path], tmp_path: Path) -> None:
    """The bytes of the nodes can be anything when nobody asks for a stream."""
    damaged = tmp_path / "dump"
    ta.write_dump(ways["dump of store"], damaged)
    spoilt = 0
    for path in files_of(damaged):
        data = bytearray(path.read_bytes())
        meta = pq.read_metadata(path)
        for group in range(meta.num_row_groups):
            for at in range(meta.num_columns):
                column = meta.row_group(group).column(at)
                if column.path_in_schema.split(".")[0] in ("nodes", "branches"):
                    start = column.data_page_offset
                    if column.has_dictionary_page:
                        start = min(start, column.dictionary_page_offset)
                    size = column.total_compressed_size
                    data[start : start + size] = b"\xa5" * size
                    spoilt += size
        path.write_bytes(data)
    assert spoilt > 100_000
    whole, spans = ta.scan_spans(ways["dump of store"]), ta.scan_spans(damaged)
    assert_same_frame(spans.collect(), whole.collect())
    for weighting in WEIGHTINGS:
        of_whole = ta.off_policy_metrics(whole, weighting=weighting)
        assert_same_frame(ta.off_policy_metrics(spans, weighting=weighting), of_whole)
    ages = ta.scan_tokens(damaged, ["step", "trace_id", "index", "completion_tokens", "age"])
    assert ages.collect().height == 68_927
    for column in ("logprob", "token_id", "position", "context_age"):
        with pytest.raises((ta.TraceError, OSError)):
            ta.scan_tokens(damaged, [column]).collect()


# --- messages -------------------------------------------------------------------------------------


@few
@given(stored_records())
def test_messages_are_kept_on_request(stored: list[Stored]) -> None:
    with folder() as root:
        write_steps(root / "run", stored)
        ta.write_dump(root / "run", root / "dump", messages=True)
        table = pl.concat(
            pl.read_parquet(path, columns=["trace_id", "nodes"]) for path in files_of(root / "dump")
        )
        assert_alike(root / "run", root / "dump")
    found = {
        trace_id: [node["message"] for node in nodes or []]
        for trace_id, nodes in table.drop_nulls("trace_id").iter_rows()
    }
    for record, _, _ in stored:
        for one in record.get("traces", [record]):
            kept = found.pop(one["id"])
            for text, own in zip(kept, one.get("nodes") or [], strict=True):
                message = own.get("message")
                assert (text is None) == (message is None)
                if message is not None:
                    # As text, for NaN equals nothing.
                    assert json.dumps(json.loads(text)) == json.dumps(message)
    assert not found


# --- again and again ------------------------------------------------------------------------------


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    first = ta.write_dump(DATA / "real-dump", dump)
    assert first["written"].all()
    before = {path: path.stat().st_mtime_ns for path in files_of(dump)}
    again = ta.write_dump(DATA / "real-dump", dump)
    assert not again["written"].any()
    assert_same_frame(again.drop("written"), first.drop("written"))
    assert {path: path.stat().st_mtime_ns for path in files_of(dump)} == before


def test_a_source_file_that_changed_is_done_again(tmp_path: Path) -> None:
    run, dump = tmp_path / "run", tmp_path / "dump"
    stored = [Stored(simple(number), 1 + number % 3, {}) for number in range(9)]
    write_steps(run, stored)
    assert len(converted(ta.write_dump(run, dump))) == 3

    grown = run / "rollouts" / "step_2" / "train" / "effective" / "traces.jsonl"
    with grown.open("ab") as file:
        file.write(encode(simple(20, 9)))
    done = ta.write_dump(run, dump)
    assert done.filter("written")["source"].to_list() == [str(grown)]
    assert_alike(run, dump)

    # Rewritten with other content of the same size, at another time.
    changed = run / "rollouts" / "step_1" / "train" / "effective" / "traces.jsonl"
    size = changed.stat().st_size
    changed.write_bytes(changed.read_bytes().replace(b'"version":"3"', b'"version":"4"'))
    assert changed.stat().st_size == size
    os.utime(changed, ns=(1, 1))
    assert len(converted(ta.write_dump(run, dump))) == 1
    assert_alike(run, dump)

    # A step more, and another way to convert the rest.
    write_steps(run, [Stored(simple(30), 4, {})])
    assert len(converted(ta.write_dump(run, dump))) == 1
    assert len(converted(ta.write_dump(run, dump, messages=True))) == 4
    assert_alike(run, dump)


def test_a_live_store_is_followed(tmp_path: Path) -> None:
    """Episodes arrive, batches take them, chunks are sealed: each time the dump keeps up."""
    run, dump = tmp_path / "run", tmp_path / "dump"
    store = StoreWriter(run)

    def ship(step: int, *trace_ids: str) -> None:
        for trace_id in trace_ids:
            advantages = [None, 0.5, 0.5, 0.5, 0.5]
            said = {"index": 0, "advantages": advantages}
            info = {"effective": True, "ship": {"step": step, "time": 3.0}}
            store.annotate(trace_id, info, branches=[said])

    moves: list[Callable[[], object]] = [
        lambda: store.append(simple(0), simple(1), arrival=1),
        lambda: ship(2, "t0"),
        lambda: store.stream.roll(),
        lambda: store.append(simple(2), arrival=3),
        lambda: store.stream.seal(0, stop_at="renamed"),
        lambda: store.stream.plain(0).unlink(),
        lambda: ship(4, "t1", "t2"),
        lambda: store.producer("orch").roll(),
        lambda: store.producer("orch").seal(0),
        lambda: store.append(simple(3), arrival=5, kind="eval"),
        lambda: store.annotate("t2", {"ship": {"step": 6}}, branches=[]),
        lambda: store.stream.roll(),
        lambda: store.stream.seal(1),
    ]
    every: Options = {"subset": "all", "kind": "any", "include_frozen": True}
    for number, move in enumerate(moves):
        move()
        ta.write_dump(run, dump)
        for options in ({}, every):
            spans, of_dump = (ta.scan_spans(one, **options).collect() for one in (run, dump))
            assert_same_frame(spans.drop("file"), of_dump.drop("file"))
        traces = pl.concat(pl.read_parquet(path).select("trace_id") for path in files_of(dump))
        assert traces["trace_id"].is_unique().all(), number
        assert not ta.write_dump(run, dump)["written"].any(), number
    assert_alike(run, dump, without={"file"})
    assert_alike(run, dump, every, without={"file"})


def test_a_dump_of_dumps(tmp_path: Path) -> None:
    runs = [tmp_path / "one", tmp_path / "other"]
    for at, run in enumerate(runs):
        stored = [Stored(simple(10 * at + number), 1 + number, {}) for number in range(3)]
        write_steps(run, stored)
        ta.write_dump(run, tmp_path / f"dump of {run.name}")
    both = tmp_path / "both"
    dumps = [tmp_path / f"dump of {run.name}" for run in runs]
    done = ta.write_dump(dumps, both)
    assert done["traces"].sum() == 12
    assert not ta.write_dump(dumps, both)["written"].any()
    assert_alike(runs, both)
    assert_alike(runs, both, {"include_frozen": True})
    # A dump and lines beside it, in one.
    ta.write_dump([dumps[0], runs[1]], tmp_path / "mixed")
    assert_alike(runs, tmp_path / "mixed")


# --- cut off --------------------------------------------------------------------------------------

CHILD = "import sys, traceage as ta; ta.write_dump(sys.argv[1], sys.argv[2], workers=1, quiet=True)"


def test_a_conversion_that_was_killed_goes_on(tmp_path: Path) -> None:
    """Killed twice in the middle, then run to its end: as if nothing had happened."""
    run, dump = tmp_path / "run", tmp_path / "dump"
    for record, step, _ in ref.read_steps(DATA / "real-dump-steps"):
        lines = []
        for copy in range(4):
            again = json.loads(json.dumps(record))
            again["id"] = f"{record['id']}-{copy}"
            for one in again["traces"]:
                one["id"] = f"{one['id']}-{copy}"
            lines.append(encode(again))
        path = run / "rollouts" / f"step_{step}" / "train" / "effective" / "traces.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.writelines(lines)
    whole = tmp_path / "undisturbed"
    ta.write_dump(run, whole)

    for enough in (2, 5):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(run), str(dump)])
        try:
            while len(files_of(dump)) < enough and child.poll() is None:
                time.sleep(0.002)
        finally:
            child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "the child was through before it was killed"
        assert enough <= len(files_of(dump)) < 10
        # What stands there is whole, and who reads it hears that it is not all.
        with pytest.warns(ta.TraceWarning, match="dump"):
            some = ta.scan_spans(dump).collect()
        steps = some["step"].unique()
        wanted = ta.scan_spans(run).filter(pl.col("step").is_in(steps.to_list())).collect()
        assert_same_frame(some, wanted)

    done = ta.write_dump(run, dump)
    # Five files stand; one that was killed before it was written down as done is made again.
    assert 0 < len(converted(done)) <= 6
    assert_alike(whole, dump)
    names = [path.relative_to(dump) for path in files_of(dump)]
    assert names == [path.relative_to(whole) for path in files_of(whole)]
    assert not list(dump.rglob("*.part"))


def test_unfinished_files_are_not_seen(tmp_path: Path) -> None:
    run, dump = tmp_path / "run", tmp_path / "dump"
    write_steps(run, [Stored(simple(number), 1, {}) for number in range(3)])
    ta.write_dump(run, dump)
    (whole,) = files_of(dump)
    for garbage in (b"", b"PAR1 and so on", whole.read_bytes()):
        part = whole.with_name(f".{whole.name}.part")
        part.write_bytes(garbage)
        assert_alike(run, dump)
        assert pl.read_parquet(dump / "**/*.parquet")["trace_id"].is_unique().all()
    source = run / "rollouts" / "step_1" / "train" / "effective" / "traces.jsonl"
    with source.open("ab") as file:
        file.write(encode(simple(7)))
    ta.write_dump(run, dump)
    assert_alike(run, dump)
    assert not list(dump.rglob("*.part"))


def test_a_fault_leaves_what_was_finished(tmp_path: Path) -> None:
    run, dump = tmp_path / "run", tmp_path / "dump"
    write_steps(run, [Stored(simple(number), 1 + number, {}) for number in range(3)])
    bad = run / "rollouts" / "step_2" / "train" / "effective" / "traces.jsonl"
    good = bad.read_bytes()
    bad.write_bytes(good.replace(b'"end":4', b'"end":9', 1))
    with pytest.raises(ta.TraceError, match="t1"):
        ta.write_dump(run, dump)
    assert not list(dump.rglob("*.part"))
    with pytest.warns(ta.TraceWarning):
        done = ta.write_dump(run, dump, on_error="skip")
    assert done["skipped"].to_list() == [0, 1, 0]
    bad.write_bytes(good)
    assert converted(ta.write_dump(run, dump)) == ["traces.jsonl"]
    assert_alike(run, dump)


def test_a_dump_of_the_first_version_lacks_the_trainers_mismatch(tmp_path: Path) -> None:
    """It reads as null; all else is as it was. Converted into another dump it stays what it is."""
    record = simple(1)
    record["traces"][0]["nodes"][0]["mismatch_kl"] = [0.5] * 4
    write_steps(tmp_path / "run", [Stored(record, 1, {})])
    ta.write_dump(tmp_path / "run", tmp_path / "dump")
    now = {
        weighting: ta.scan_tokens(tmp_path / "dump", weighting=weighting).collect()
        for weighting in WEIGHTINGS
    }
    (path,) = files_of(tmp_path / "dump")
    table = pq.read_table(path, partitioning=None)
    lists = table["nodes"].combine_chunks()
    fields = [field for field in lists.type.value_type if field.name != "mismatch_kl"]
    kept = [lists.values.field(field.name) for field in fields]
    nodes = pa.ListArray.from_arrays(lists.offsets, pa.StructArray.from_arrays(kept, fields=fields))
    table = table.set_column(table.schema.get_field_index("nodes"), "nodes", nodes)
    told = {**json.loads(table.schema.metadata[b"traceage"]), "schema_version": 1}
    pq.write_table(table.replace_schema_metadata({"traceage": json.dumps(told)}), path)
    ta.write_dump(tmp_path / "dump", tmp_path / "again")
    for dump in (tmp_path / "dump", tmp_path / "again"):
        for weighting, tokens in now.items():
            assert tokens["trainer_mismatch_kl"].to_list() == [0.5] * tokens.height
            without = tokens.with_columns(trainer_mismatch_kl=pl.lit(None, pl.Float32))
            found = ta.scan_tokens(dump, weighting=weighting).collect()
            assert found.schema == without.schema
            assert_same_frame(found.drop("file"), without.drop("file"))
        assert ta.scan_spans(dump).collect()["length"].sum() == now["nodes"].height


# --- other Parquet files --------------------------------------------------------------------------


def test_a_dump_of_a_later_version_is_refused(tmp_path: Path) -> None:
    write_steps(tmp_path / "run", [Stored(simple(1), 1, {})])
    ta.write_dump(tmp_path / "run", tmp_path / "dump")
    (path,) = files_of(tmp_path / "dump")
    table = pq.read_table(path, partitioning=None)
    kept = json.loads(table.schema.metadata[b"traceage"])
    assert kept["schema_version"] == 2
    kept["schema_version"] = 99
    pq.write_table(table.replace_schema_metadata({"traceage": json.dumps(kept)}), path)
    for source in (path, tmp_path / "dump"):
        with pytest.raises(ta.TraceError, match=r"\.parquet.*schema version 99.*update"):
            ta.scan_spans(source).collect()


def test_a_parquet_file_of_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path.parent / f"{tmp_path.name}-dump"
    other = tmp_path / "other.parquet"
    pl.DataFrame({"a": [1], "b": ["x"]}).write_parquet(other)
    with pytest.raises(ta.TraceError, match=r"other\.parquet.*\ba, b\b"):
        ta.scan_spans(other).collect()
    with pytest.raises(ta.TraceError, match=r"other\.parquet"):
        ta.write_dump(other, target)
    assert main(["metrics", str(other)]) == 2
    assert "other.parquet" in capsys.readouterr().err

    # Met in a directory it is passed over, and named.
    write_lines(tmp_path / "traces.jsonl", [simple(1)])
    reads: list[Callable[[ta.ReadSummary], pl.DataFrame]] = [
        lambda summary: ta.scan_spans(tmp_path, step=3, summary=summary).collect(),
        lambda summary: ta.scan_tokens(tmp_path, step=3, summary=summary).collect(),
        lambda summary: ta.write_dump(tmp_path, target, step=3, summary=summary),
    ]
    for read in reads:
        summary = ta.ReadSummary()
        with no_warnings():
            assert read(summary).height > 0
        assert summary.files_without_traces == [str(other)]
        assert any("other.parquet" in line for line in summary.lines())


# --- the command line -----------------------------------------------------------------------------


def test_the_command_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "dump"
    source = DATA / "real-dump-steps"
    assert main(["convert", str(source), "-o", str(dump), "--messages"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "80 traces" in said.err
    assert "68,927" in said.err
    assert_alike(source, dump)
    assert main(["convert", str(source), "-o", str(dump), "--messages", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["metrics", str(source), "--format", "json"]) == 0
    of_source = json.loads(capsys.readouterr().out)
    assert main(["metrics", str(dump), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == of_source
    assert main(["convert", str(tmp_path / "nothing"), "-o", str(tmp_path / "d")]) == 2
    assert not (tmp_path / "d").exists()
