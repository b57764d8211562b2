"""Random records, written to files, read by the library, against the plain-Python reference."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import polars as pl
import pytest
import reference as ref
from compare import (
    assert_same_metrics,
    assert_same_tokens,
    library_counts,
    library_tokens,
    write_lines,
    write_steps,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Extras, Record, Stored
from store_writer import seekable_zstd
from strategies import Problem, Style, invalid_records, stored_records, styles

import traceage as ta

Weighting = Literal["nodes", "branches"]

few = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)

suffixes = st.sampled_from(["", ".gz", ".zst"])
weightings: st.SearchStrategy[Weighting] = st.sampled_from(("nodes", "branches"))
groupings = st.sampled_from([["step"], ["step", "env"], ["env"], ["group_id"], []])


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of one example."""
    with TemporaryDirectory() as name:
        yield Path(name)


def at_one_step(stored: Sequence[Stored]) -> list[Stored]:
    return [Stored(record, stored[0].step, {}) for record, _, _ in stored]


# --- spans ----------------------------------------------------------------------------------------


@few
@given(stored_records(), suffixes, styles)
def test_spans_are_the_tokens(stored: list[Stored], suffix: str, style: Style) -> None:
    """Every sampled token, node, trace and episode, whatever the compression and the spelling."""
    with folder() as root:
        write_steps(root, stored, suffix=suffix, style=style)
        spans = ta.scan_spans(root).collect()
    assert_same_tokens(spans, ref.token_rows(stored))
    assert set(spans["kind"]) == {"train"}
    assert set(spans["subset"]) == {"effective"}


@few
@given(stored_records(), suffixes, styles)
def test_one_file_of_one_step(stored: list[Stored], suffix: str, style: Style) -> None:
    """A bare file has no step of its own, and its rows say where they were read."""
    stored = at_one_step(stored)
    with folder() as root:
        path = root / f"records.jsonl{suffix}"
        write_lines(path, [record for record, _, _ in stored], style)
        spans = ta.scan_spans(path, step=stored[0].step).collect()
    assert_same_tokens(spans, ref.token_rows(stored))
    lines = {record["id"]: number for number, (record, _, _) in enumerate(stored, start=1)}
    for row in spans.select("episode_id", "file", "line").iter_rows(named=True):
        assert row["line"] == lines[row["episode_id"]]
        assert Path(row["file"]).name == path.name


@few
@given(stored_records())
def test_frozen_agents_on_request(stored: list[Stored]) -> None:
    with folder() as root:
        write_steps(root, stored)
        spans = ta.scan_spans(root, include_frozen=True).collect()
    assert_same_tokens(spans, ref.token_rows(stored, include_frozen=True))


@few
@given(stored_records(), st.data())
def test_pushdown_changes_nothing(stored: list[Stored], data: st.DataObject) -> None:
    """Columns, filters and row limits asked of the scan give what they give of the table."""
    with folder() as root:
        write_steps(root, stored)
        lazy = ta.scan_spans(root)
        whole = lazy.collect()
        columns = data.draw(st.lists(st.sampled_from(whole.columns), min_size=1, unique=True))
        predicate = data.draw(
            st.sampled_from(
                [
                    pl.col("step") == stored[0].step,
                    pl.col("version").is_null(),
                    pl.col("version") > 3,
                    pl.col("label") == "default",
                    (pl.col("env") == "math") & (pl.col("length") > 1),
                    pl.col("trace_id").is_in(["t-0-0", "bare-1"]),
                    pl.col("mixed") | (pl.col("branches") == 0),
                    pl.col("completion_tokens") > pl.col("length"),
                    pl.lit(False),
                ]
            )
        )
        limit = data.draw(st.integers(0, 5))
        picked = lazy.filter(predicate).select(columns).collect()
        started = lazy.head(limit).collect()
        length = lazy.select(pl.len()).collect().item()
    assert_same_frame(picked, whole.filter(predicate).select(columns))
    assert started.height == min(limit, whole.height)
    assert length == whole.height


def assert_same_frame(one: pl.DataFrame, other: pl.DataFrame) -> None:
    """The same rows and dtypes; the order of files is the reader's own affair."""
    assert one.schema == other.schema
    assert sorted(map(repr, one.rows())) == sorted(map(repr, other.rows()))


# --- ages and metrics -----------------------------------------------------------------------------


@few
@given(stored_records(), groupings, weightings)
def test_age_counts(stored: list[Stored], by: list[str], weighting: Weighting) -> None:
    with folder() as root:
        write_steps(root, stored)
        counts = ta.age_counts(ta.scan_spans(root), by=by, weighting=weighting)
    assert counts.columns == [*by, "age", "tokens"]
    assert counts.schema["age"] == pl.Int32
    assert counts.schema["tokens"] == pl.Int64
    assert library_counts(counts, by) == ref.age_counts(ref.token_rows(stored), by, weighting)


@few
@given(stored_records(), groupings.filter(bool), weightings)
def test_metrics(stored: list[Stored], by: list[str], weighting: Weighting) -> None:
    with folder() as root:
        write_steps(root, stored)
        found = ta.off_policy_metrics(ta.scan_spans(root), by=by, weighting=weighting)
    assert_same_metrics(found, ref.metrics_rows(ref.token_rows(stored), by, weighting), by)
    if by == ["step"]:
        assert found["step"].is_sorted()


@few
@given(stored_records(max_size=2), stored_records(max_size=2, first=10), weightings)
def test_counts_of_parts_add_up(
    one: list[Stored], other: list[Stored], weighting: Weighting
) -> None:
    counts = []
    with folder() as root:
        for name, part in (("whole", one + other), ("one", one), ("other", other)):
            write_steps(root / name, part)
            counts.append(ta.age_counts(ta.scan_spans(root / name), weighting=weighting))
    whole, *of_parts = counts
    merged = ta.merge_counts(*of_parts)
    assert merged.schema == whole.schema
    assert library_counts(merged, ["step"]) == library_counts(whole, ["step"])


@few
@given(
    stored_records(),
    st.sampled_from(["step", "constant", "mapping", "column"]),
    st.integers(0, 12),
)
def test_training_version_is_the_callers_to_say(
    stored: list[Stored], choice: str, constant: int
) -> None:
    restated = []
    mapping: dict[int, int] = {}
    for record, step, _ in stored:
        assert step is not None
        mapping[step] = 2 * step - 1
        version = {
            "step": step,
            "constant": constant,
            "mapping": mapping[step],
            "column": ref.get(record, "run", "work", "policy", "end"),
        }[choice]
        restated.append(Stored(record, step, {"training_version": version}))
    told: Any = {
        "step": "step",
        "constant": constant,
        "mapping": mapping,
        "column": "policy_end",
    }[choice]
    with folder() as root:
        write_steps(root, stored)
        spans = ta.scan_spans(root, training_version=told)
        assert_same_tokens(spans.collect(), ref.token_rows(restated))
        found = ta.off_policy_metrics(spans)
    assert_same_metrics(found, ref.metrics_rows(ref.token_rows(restated)))


@few
@given(stored_records(max_size=2), stored_records(max_size=2, first=10))
def test_several_sources(one: list[Stored], other: list[Stored]) -> None:
    with folder() as root:
        write_steps(root / "one", one)
        write_steps(root / "other", other, suffix=".zst")
        spans = ta.scan_spans([root / "one", root / "other"]).collect()
    assert_same_tokens(spans, ref.token_rows(one + other))


# --- records and objects in memory ----------------------------------------------------------------


@few
@given(stored_records(), st.integers(0, 12))
def test_ages_of_a_record_in_memory(stored: list[Stored], version: int) -> None:
    """`token_policy_ages`: an age for every labelled token; `node_policy_versions`: every token."""
    for record, _, _ in stored:
        for trace in record.get("traces", [record]):
            if not ref.is_trainable(trace):
                continue
            ages = ta.token_policy_ages(trace, version)
            extras: Extras = {"training_version": version}
            rows = ref.token_rows([Stored(trace, 1, extras)])
            assert ages.dtype == "int32"
            assert ages.tolist() == [row.age for row in rows if row.age is not None]
            for number, node in enumerate(trace.get("nodes") or []):
                if ref.is_sampled(node):
                    versions = ta.node_policy_versions(node)
                    assert versions.dtype == pl.Int32
                    assert versions.to_list() == [
                        row.version for row in rows if row.node == number and row.index is not None
                    ]


@few
@given(stored_records(), st.integers(1, 12), st.one_of(st.none(), st.integers(0, 12)))
def test_metrics_of_a_batch_in_memory(stored: list[Stored], step: int, version: int | None) -> None:
    extras: Extras = {} if version is None else {"training_version": version}
    rows = ref.token_rows([Stored(record, step, extras) for record, _, _ in stored])
    (expected,) = ref.metrics_rows(rows)
    found = ta.batch_metrics(
        [record for record, _, _ in stored], step=step, training_version=version
    )
    wanted = {name: value for name, value in expected.items() if name.startswith("off_policy/")}
    wanted["off_policy/token/coverage"] = expected["coverage"]
    assert set(wanted) == set(found)
    for name, value in wanted.items():
        assert found[name] == (value if value is None else pytest.approx(value, abs=1e-12)), name


# --- what is wrong --------------------------------------------------------------------------------


@few
@given(invalid_records(), stored_records(max_size=2))
def test_a_fault_is_an_error_that_says_where(
    drawn: tuple[Record, Problem], around: list[Stored]
) -> None:
    record, problem = drawn
    with folder() as root:
        path = root / "traces.jsonl"
        write_lines(path, [*(stored.record for stored in around), record])
        with pytest.raises(ta.TraceError) as caught:
            ta.scan_spans(path, step=7).collect()
    said = str(caught.value)
    if problem.fault == "label":
        assert problem.label is not None
        assert problem.label in said or ascii(problem.label)[1:-1] in said
        return
    assert "traces.jsonl" in said
    assert problem.trace_id in said
    for number in (len(around) + 1, problem.node):
        assert re.search(rf"(?<!\d){number}(?!\d)", said), said


@few
@given(invalid_records(), stored_records(max_size=2), weightings)
def test_a_fault_can_be_skipped(
    drawn: tuple[Record, Problem], around: list[Stored], weighting: Weighting
) -> None:
    """A node whose spans make no sense is unlabelled; a label that does not read has no version."""
    record, problem = drawn
    stored = [Stored(each, 7, {}) for each in [*(one.record for one in around), record]]
    with folder() as root:
        path = root / "traces.jsonl"
        write_lines(path, [one.record for one in stored])
        with pytest.warns(ta.TraceWarning):
            spans = ta.scan_spans(path, step=7, on_error="skip").collect()
    rows = ref.token_rows(stored, skip=True)
    assert_same_tokens(spans, rows)
    if problem.fault != "label":
        bad = spans.filter(trace_id=problem.trace_id, node=problem.node)
        assert bad.height == 1
    assert_same_metrics(
        ta.off_policy_metrics(spans, weighting=weighting),
        ref.metrics_rows(rows, weighting=weighting),
    )


def test_a_pattern_reads_other_labels(tmp_path: Path) -> None:
    node = {
        "sampled": True,
        "mask": [True] * 6,
        "weight_versions": [
            {"version": "default", "start": 0, "end": 1},
            {"version": "policy-12@b", "start": 1, "end": 4},
            {"version": "policy-3@a", "start": 4, "end": 6},
        ],
    }
    path = tmp_path / "traces.jsonl"
    write_lines(path, [{"id": "t", "nodes": [node]}])
    with pytest.raises(ta.TraceError, match="policy-12@b"):
        ta.scan_spans(path, step=14).collect()
    spans = ta.scan_spans(path, step=14, version_pattern=r"^policy-(\d+)@").collect()
    assert [(row["label"], row["version"]) for row in library_tokens(spans)] == [
        ("default", None),
        *[("policy-12@b", 12)] * 3,
        *[("policy-3@a", 3)] * 2,
    ]


def test_tokens_that_nothing_counts_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    write_lines(path, [{"id": "t-odd", "nodes": [{"sampled": True, "token_ids": [1, 2, 3]}]}])
    with pytest.raises(ta.TraceError, match="t-odd"):
        ta.scan_spans(path, step=1).collect()


def test_no_step_anywhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    work = {"type": "train", "step": 5, "policy": {"start": 4, "end": 5}}
    run = {"type": "train", "id": "run", "work": work}
    write_lines(path, [{"id": "t", "run": run, "nodes": []}])
    with pytest.raises(ta.TraceError, match="step"):
        ta.scan_spans(path).collect()


def test_a_trace_stands_once_in_a_step(tmp_path: Path) -> None:
    def record(episode: str, tokens: int) -> Record:
        node = {"sampled": True, "mask": [True] * tokens}
        return {"id": episode, "traces": [{"id": "twice", "nodes": [node]}]}

    path = tmp_path / "traces.jsonl"
    write_lines(path, [record("e1", 2), record("e2", 3)])
    with pytest.raises(ta.TraceError, match="twice"):
        ta.scan_spans(path, step=1).collect()
    with pytest.warns(ta.TraceWarning):
        spans = ta.scan_spans(path, step=1, on_error="skip").collect()
    assert spans.filter(pl.col("trace_id") == "twice")["length"].to_list() == [2]

    # In two steps the same trace is no duplicate: each batch trained on it.
    for step in (1, 2):
        write_lines(tmp_path / "run" / f"step_{step}" / "traces.jsonl", [record("e1", 2)])
    spans = ta.scan_spans(tmp_path / "run").collect()
    assert sorted(spans.select("step", "length").rows()) == [(1, 2), (2, 2)]


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["traces.jsonl", "traces.jsonl.gz", "traces.jsonl.zst"])
def test_a_file_of_many_parts(tmp_path: Path, name: str, workers: int) -> None:
    """Lines from tiny to larger than a part, in more content than is read at a time."""
    sizes = [1, 900_000, 3, 1, 4_500_000, 2, 2_000_000, 1, 1_500_000, 5]
    lines = []
    for number, count in enumerate(sizes):
        head = b'{"id":"t%d","nodes":[{"sampled":true,"token_ids":[' % number
        body = b"1," * (count - 1) + b'1],"mask":[' + b"true," * (count - 1) + b"true]"
        labels = b',"weight_versions":[{"version":"%d","start":0,"end":%d}]}]}\n' % (number, count)
        lines.append(head + body + labels)
    data = b"".join(lines)
    if name.endswith(".gz"):
        data = gzip.compress(data, 1)
    elif name.endswith(".zst"):
        data = seekable_zstd(data, 1 << 20)
    path = tmp_path / name
    path.write_bytes(data)
    spans = ta.scan_spans(path, step=10, workers=workers).collect()
    assert spans.select("trace_id", "label", "length", "line").sort("line").rows() == [
        (f"t{number}", str(number), count, number + 1) for number, count in enumerate(sizes)
    ]


# --- the shape of the tables ----------------------------------------------------------------------

SPAN_COLUMNS = {
    "step": pl.Int32,
    "training_version": pl.Int32,
    "kind": pl.String,
    "subset": pl.String,
    "shipped": pl.Boolean,
    "env": pl.String,
    "group_id": pl.String,
    "episode_id": pl.String,
    "trace_id": pl.String,
    "agent": pl.String,
    "trainable": pl.Boolean,
    "node": pl.Int32,
    "turn": pl.Int32,
    "completion_tokens": pl.Int32,
    "start": pl.Int32,
    "end": pl.Int32,
    "length": pl.Int32,
    "label": pl.String,
    "version": pl.Int32,
    "mixed": pl.Boolean,
    "branches": pl.Int32,
    "has_run": pl.Boolean,
    "policy_start": pl.Int32,
    "policy_end": pl.Int32,
    "reward": pl.Float64,
    "timestamp": pl.Float64,
    "file": pl.String,
    "line": pl.Int64,
}


def test_columns_and_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    write_lines(path, [{"id": "t", "nodes": [{"sampled": True, "mask": [True]}]}])
    lazy = ta.scan_spans(path, step=1)
    assert dict(lazy.collect_schema()) == SPAN_COLUMNS
    assert list(lazy.collect_schema()) == list(SPAN_COLUMNS)
    assert lazy.collect().schema == lazy.collect_schema()


@pytest.mark.parametrize("subset", [None, "effective", "all"])
def test_what_arrived_and_what_trained_are_read_apart(tmp_path: Path, subset: Any) -> None:
    """The same episode stands in both copies of a step; by default what trained is read."""

    def record(number: int) -> Record:
        return {"id": f"t{number}", "nodes": [{"sampled": True, "mask": [True] * number}]}

    write_steps(tmp_path, [Stored(record(i), 1, {}) for i in (1, 2)], subset="effective")
    write_steps(tmp_path, [Stored(record(i), 1, {}) for i in (1, 2, 3)], subset="all")
    write_steps(tmp_path, [Stored(record(9), 1, {})], kind="eval", subset="all")
    write_steps(tmp_path, [Stored(record(9), 1, {})], kind="eval", subset="effective")
    spans = ta.scan_spans(tmp_path, subset=subset).collect()
    wanted = {"t1", "t2", "t3"} if subset == "all" else {"t1", "t2"}
    assert set(spans["trace_id"]) == wanted
    assert set(spans["subset"]) == {subset or "effective"}
    assert set(spans["kind"]) == {"train"}
    evals = ta.scan_spans(tmp_path, kind="eval").collect()
    assert evals["length"].to_list() == [9]


def test_a_half_written_last_line_is_no_error(tmp_path: Path) -> None:
    stored = [
        Stored({"id": f"t{i}\u2028", "nodes": [{"sampled": True, "mask": [True]}]}, 1, {})
        for i in range(3)
    ]
    write_steps(tmp_path, stored)
    (path,) = tmp_path.glob("rollouts/**/traces.jsonl")
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last + 1, len(whole) - 1, 3):
        path.write_bytes(whole[:cut])
        with pytest.warns(ta.TraceWarning, match=r"traces\.jsonl"):
            spans = ta.scan_spans(tmp_path).collect()
        assert_same_tokens(spans, ref.token_rows(stored[:2]))
