"""What reaches the reader, and that how a file is cut and who reads it changes nothing."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from polars.testing import assert_frame_equal

import traceage as ta
from traceage.errors import ReadSummary
from traceage.formats import content, parts
from traceage.formats.content import read_content, seek_table
from traceage.formats.parts import Part
from traceage.formats.records import What
from traceage.formats.trace_store import TraceStore
from traceage.schema import SPANS
from traceage.sources import find_files

DATA = Path(__file__).parent.parent / "data"
STORE = DATA / "real-dump"
STEPS = DATA / "real-dump-steps"
PLACE = ["file", "line"]


def read(source: Any, **options: Any) -> tuple[pl.DataFrame, ReadSummary]:
    summary = ReadSummary()
    return ta.scan_spans(source, summary=summary, **options).collect(), summary


def in_order(spans: pl.DataFrame) -> pl.DataFrame:
    return spans.drop(PLACE).sort("trace_id", "node", "start")


def test_columns_and_types() -> None:
    spans = ta.scan_spans(STORE)
    assert dict(spans.collect_schema()) == SPANS
    assert dict(spans.collect().schema) == SPANS


@pytest.mark.parametrize("column", list(SPANS))
def test_any_one_column_alone(column: str) -> None:
    spans = ta.scan_spans(STEPS)
    assert_frame_equal(spans.select(column).collect(), spans.collect().select(column))


@pytest.mark.parametrize("source", [STORE, STEPS])
@pytest.mark.parametrize(
    "predicate",
    [
        pl.col("step") == 4,
        pl.col("step").is_in([2, 9]) & (pl.col("env") == "toy"),
        (pl.col("env") == "toy") & (pl.col("length") > 100) & (pl.col("version") == 3),
        (pl.col("step") < 3) | (pl.col("group_id") == "g14"),
        pl.col("training_version") == 5,
        pl.col("env").is_null(),
        pl.col("kind") == "train",
        ~(pl.col("step") == 4),
        pl.lit(False),
    ],
)
def test_filters_give_what_they_give_afterwards(source: Path, predicate: pl.Expr) -> None:
    spans = ta.scan_spans(source)
    assert_frame_equal(spans.filter(predicate).collect(), spans.collect().filter(predicate))


def test_a_filter_on_step_reads_its_files_alone() -> None:
    summary = ReadSummary()
    spans = ta.scan_spans(STEPS, summary=summary)
    assert spans.filter(pl.col("step") == 4).collect()["episode_id"].n_unique() == 8
    assert summary.lines_read == 8


def test_a_filter_reads_its_lines_of_a_trace_store_alone() -> None:
    summary = ReadSummary()
    spans = ta.scan_spans(STORE, summary=summary)
    one = spans.filter(pl.col("step") == 4, pl.col("env") == "toy").collect()
    everything = spans.collect()
    assert_frame_equal(one, everything.filter(pl.col("step") == 4, pl.col("env") == "toy"))
    spans.filter(pl.col("step") == 4, pl.col("env") == "toy").collect()
    # Its own lines, and the last of each of the three chunks, which the index may lag behind.
    assert summary.lines_read <= one["episode_id"].n_unique() + 3


def test_head_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = ReadSummary()
    first = ta.scan_spans(STEPS, summary=summary).head(3).collect()
    assert_frame_equal(first, ta.scan_spans(STEPS).collect().head(3))
    assert summary.lines_read < 80


def as_lines(target: Path) -> bytes:
    lines = b"".join(b"".join(content.stream_content(file.path)) for file in find_files(STEPS))
    target.mkdir()
    (target / "traces.jsonl").write_bytes(lines)
    return lines


@pytest.mark.parametrize("part_bytes", [100, 1_000, 7_777, 50_000])
def test_where_a_file_is_cut_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    as_lines(tmp_path / "x")
    whole = ta.scan_spans(tmp_path / "x", step=5).collect()
    store = ta.scan_spans(STORE).collect()
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes if part_bytes > 100 else 5_000)
    assert_frame_equal(ta.scan_spans(tmp_path / "x", step=5).collect(), whole)
    assert_frame_equal(ta.scan_spans(STORE).collect(), store)


@pytest.mark.parametrize("suffix", ["gz", "zst", "frames.zst"])
def test_compression_changes_nothing(tmp_path: Path, suffix: str) -> None:
    lines = as_lines(tmp_path / "plain")
    if suffix == "gz":
        # Two members, as appending to an archive makes them.
        packed = gzip.compress(lines[:100_000]) + gzip.compress(lines[100_000:])
    elif suffix == "zst":
        packed = zstandard.compress(lines)
    else:
        cuts = range(0, len(lines), 65_536)
        packed = b"".join(zstandard.compress(lines[cut : cut + 65_536]) for cut in cuts)
    path = tmp_path / f"traces.jsonl.{suffix}"
    path.write_bytes(packed)
    plain = ta.scan_spans(tmp_path / "plain", step=5).collect()
    assert_frame_equal(ta.scan_spans(path, step=5).collect().drop("file"), plain.drop("file"))
    misnamed = path.rename(tmp_path / "content-tells.jsonl")
    assert_frame_equal(ta.scan_spans(misnamed, step=5).collect().drop("file"), plain.drop("file"))


def test_a_large_archive_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = as_lines(tmp_path / "plain")
    path = tmp_path / "traces.jsonl.gz"
    path.write_bytes(gzip.compress(lines))
    plain = ta.scan_spans(tmp_path / "plain", step=5).collect()
    monkeypatch.setattr(parts, "PART_BYTES", 10_000)
    assert_frame_equal(ta.scan_spans(path, step=5).collect().drop("file"), plain.drop("file"))


def test_workers_change_nothing() -> None:
    alone = ta.scan_spans(STORE, workers=1).collect()
    assert_frame_equal(ta.scan_spans(STORE, workers=2).collect(), alone)


def test_workers_start_from_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "plain_script.py"
    script.write_text(
        f"import traceage as ta\nprint(ta.scan_spans({str(STEPS)!r}, workers=2).collect().height)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) == ta.scan_spans(STEPS).collect().height


def test_importing_is_light() -> None:
    heavy = "{'polars', 'pyarrow', 'matplotlib', 'torch', 'vllm', 'ray', 'verifiers'}"
    code = f"import sys, traceage; print(sorted(set(sys.modules) & {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    code = (
        "import sys, traceage as ta\n"
        f"ta.off_policy_metrics(ta.scan_spans({str(STEPS)!r}))\n"
        "print(sorted(set(sys.modules) & {'matplotlib', 'torch', 'vllm', 'ray', 'verifiers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in ta.__all__:
        assert getattr(ta, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ta.nonsense


# --- sources ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "monitors",
        "monitors/file/traces",
        "monitors/file/traces/stream",
        "monitors/file/traces/stream/*",
        "monitors/file/traces/stream/0000[012].jsonl*",
    ],
)
def test_any_folder_of_a_trace_store(inside: str) -> None:
    spans, _ = read(os.path.join(STORE, inside))
    assert_frame_equal(spans, ta.scan_spans(STORE).collect())


def test_a_folder_is_found_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(STORE / "monitors/file/traces/stream")
    assert read(".")[0].height == read("../..")[0].height == read(STORE)[0].height


def test_any_folder_of_a_step_layout() -> None:
    everything = ta.scan_spans(STEPS).collect()
    assert_frame_equal(read(STEPS / "rollouts")[0], everything)
    assert_frame_equal(read(f"{STEPS}/rollouts/step_*")[0], everything)
    one = everything.filter(pl.col("step") == 3)
    assert_frame_equal(read(STEPS / "rollouts/step_3")[0], one)
    assert_frame_equal(read(STEPS / "rollouts/step_3/train/effective/traces.jsonl.zst")[0], one)


def test_sources_add_up_and_count_once() -> None:
    parts = [STEPS / f"rollouts/step_{step}" for step in range(1, 11)]
    assert_frame_equal(read(parts)[0], read(STEPS)[0])
    assert_frame_equal(read([STEPS, *parts])[0], read(STEPS)[0])
    with pytest.raises(ta.TraceError, match="trace read twice"):
        read([STORE, STEPS])


def layout(folder: Path, *places: str) -> None:
    line = json.dumps(
        {"id": "e", "traces": [{"id": "t", "nodes": [{"sampled": True, "mask": [True]}]}]}
    )
    for place in places:
        path = folder / "rollouts" / place / "traces.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(line + "\n")


def places(folder: Path, **options: Any) -> list[str]:
    return [os.path.relpath(f.path, folder / "rollouts") for f in find_files(folder, **options)]


def test_what_trained_is_read_where_a_run_has_both(tmp_path: Path) -> None:
    layout(
        tmp_path,
        "step_9/train/all",
        "step_9/train/effective",
        "step_10/train/effective",
        "step_11/train/all",
        "step_9/eval/all",
    )
    assert places(tmp_path) == [
        "step_9/eval/all/traces.jsonl",
        "step_9/train/effective/traces.jsonl",
        "step_10/train/effective/traces.jsonl",
    ]
    assert places(tmp_path, subset="all") == [
        "step_9/eval/all/traces.jsonl",
        "step_9/train/all/traces.jsonl",
        "step_11/train/all/traces.jsonl",
    ]
    spans, summary = read(tmp_path)
    assert spans["step"].to_list() == [9, 10]
    assert summary.other_kind == 1
    with pytest.raises(ta.TraceError, match="none of the 1 files is of the subset 'effective'"):
        find_files(tmp_path / "rollouts/step_11", subset="effective")


def test_side_files_of_a_run_are_not_traces(tmp_path: Path) -> None:
    layout(tmp_path, "step_9/train/effective")
    for name in ("token_exports/step_9/rank_0.jsonl", "metrics.jsonl", "logs/x.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"step": 9}\n')
    assert len(find_files(tmp_path)) == 1


# --- sealed chunks ------------------------------------------------------------------------------


def test_any_stretch_of_a_sealed_chunk() -> None:
    chunk = STORE / "monitors/file/traces/stream/00000.jsonl.zst"
    whole = b"".join(content.stream_content(str(chunk)))
    with open(chunk, "rb") as file:
        frames = seek_table(file)
    assert frames is not None
    assert len(frames) == 9
    size = frames[1].start
    for start in (0, 1, size - 1, size, size + 1, len(whole) - 5, len(whole)):
        for end in (start, start + 1, size, 3 * size, len(whole), len(whole) + 99):
            assert read_content(str(chunk), start, end) == whole[start:end]


def test_a_chunk_sealed_while_it_is_read(tmp_path: Path) -> None:
    chunk = STORE / "monitors/file/traces/stream/00000.jsonl.zst"
    whole = b"".join(content.stream_content(str(chunk)))
    (tmp_path / "00000.jsonl.zst").write_bytes(chunk.read_bytes())
    part = Part(str(tmp_path / "00000.jsonl"), What(), 1_000, 90_000)
    assert read_content(part.path, part.start, part.end) == whole[1_000:90_000]


def test_a_file_that_only_looks_sealed(tmp_path: Path) -> None:
    chunk = STORE / "monitors/file/traces/stream/00000.jsonl.zst"
    tail = chunk.read_bytes()[-200:]
    path = tmp_path / "x"
    path.write_bytes(b"no frames" + tail)
    with open(path, "rb") as file:
        assert seek_table(file) is None


def test_ship_steps_come_from_the_index_alone(tmp_path: Path) -> None:
    store = TraceStore(str(STORE / "monitors/file/traces"))
    steps = store.ship_steps
    assert sorted(set(steps.values())) == list(range(1, 11))
    assert len(steps) == 80
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/orch.index.jsonl").write_bytes(
        (STORE / "monitors/file/traces/annotations/orch.index.jsonl").read_bytes()
    )
    assert TraceStore(str(tmp_path)).ship_steps == steps
