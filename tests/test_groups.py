"""Tokens by their place and by the length of their completion: by hand, and against plain loops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import polars as pl
import pytest
import reference as ref
from compare import assert_same_metrics, library_counts, write_lines, write_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Record, Stored
from strategies import STAMPED, stored_records

import traceage as ta
from traceage.groups import bin_of, with_groups

Weighting = Literal["nodes", "branches"]

DATA = Path(__file__).parent.parent / "data"

few = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)

weightings: st.SearchStrategy[Weighting] = st.sampled_from(("nodes", "branches"))
groupings = st.sampled_from(
    [
        ["index_bin"],
        ["completion_bin"],
        ["index_bin", "env"],
        ["completion_bin", "env"],
        ["index_bin", "completion_bin"],
        ["step", "index_bin", "completion_bin"],
    ]
)


@contextmanager
def folder() -> Iterator[Path]:
    """A directory of one example."""
    with TemporaryDirectory() as name:
        yield Path(name)


def node(*runs: tuple[str | None, int]) -> Record:
    """A completion of some runs of (label, tokens)."""
    spans, at = [], 0
    for label, length in runs:
        if label is not None:
            spans.append({"version": label, "start": at, "end": at + length})
        at += length
    return {"sampled": True, "mask": [True] * at, "weight_versions": spans}


def scan(path: Path, *traces: list[Record]) -> pl.DataFrame:
    """The spans of a batch that trained version 4: a trace, and an episode, of its nodes each."""
    write_lines(path, [{"id": f"t{i}", "nodes": nodes} for i, nodes in enumerate(traces)])
    return ta.scan_spans(path, step=5).collect()


# --- worked by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "first"),
    [(0, 0), (1, 0), (31, 0), (32, 32), (63, 32), (64, 64), (127, 64), (128, 128), (255, 128)]
    + [(2**k - 1, 2 ** (k - 1)) for k in (10, 20, 30)]
    + [(2**k, 2**k) for k in (10, 20, 30)],
)
def test_bins_double(number: int, first: int) -> None:
    found = pl.DataFrame({"n": [number, None]}, {"n": pl.Int32}).select(bin_of(pl.col("n")))
    assert found.dtypes == [pl.Int32]
    assert found.to_series().to_list() == [first, None]


def test_runs_are_cut_where_a_bin_ends() -> None:
    spans = pl.DataFrame(
        {
            "start": [0, 0, 32, 31, 63, 10, 64, 0],
            "end": [32, 33, 64, 64, 65, 300, 64, 0],
            "env": list("abcdefgh"),
        },
        {"start": pl.Int32, "end": pl.Int32, "env": pl.String},
    ).with_columns(length=pl.col("end") - pl.col("start"))
    cut = with_groups(spans, ["index_bin"])
    assert cut.schema == {**spans.schema, "index_bin": pl.Int32}
    assert cut.select("env", "start", "end", "length", "index_bin").rows() == [
        ("a", 0, 32, 32, 0),
        ("b", 0, 32, 32, 0),
        ("b", 32, 33, 1, 32),
        ("c", 32, 64, 32, 32),
        ("d", 31, 32, 1, 0),
        ("d", 32, 64, 32, 32),
        ("e", 63, 64, 1, 32),
        ("e", 64, 65, 1, 64),
        ("f", 10, 32, 22, 0),
        ("f", 32, 64, 32, 32),
        ("f", 64, 128, 64, 64),
        ("f", 128, 256, 128, 128),
        ("f", 256, 300, 44, 256),
        ("g", 64, 64, 0, 64),
        ("h", 0, 0, 0, 0),
    ]


def test_figures_by_place(tmp_path: Path) -> None:
    """70 tokens: 40 of age 1, 10 of no label, 20 of age 0; and a completion that ends before."""
    spans = scan(
        tmp_path / "traces.jsonl", [node(("3", 40), (None, 10), ("4", 20))], [node(("2", 5))]
    )
    columns = ["episodes", "sampled_tokens", "labelled_tokens", "unlabelled_tokens"]
    columns += ["sampled_nodes", "mixed_nodes", "off_policy/token/max", "off_policy/token/mean"]
    found = ta.off_policy_metrics(spans, by=["index_bin"]).select("index_bin", *columns)
    assert found.rows() == [
        # A completion counts where its first token stands, and is mixed wherever it mixes.
        (0, 2, 37, 37, 0, 2, 1, 2, (32 * 1 + 5 * 2) / 37),
        (32, 1, 32, 22, 10, 0, 0, 1, 8 / 22),
        (64, 1, 6, 6, 0, 0, 0, 0, 0.0),
    ]
    counts = ta.age_counts(spans, by=["index_bin"])
    assert counts.rows() == [(0, 1, 32), (0, 2, 5), (32, 0, 14), (32, 1, 8), (64, 0, 6)]
    assert counts.dtypes == [pl.Int32, pl.Int32, pl.Int64]


def test_figures_by_length(tmp_path: Path) -> None:
    spans = scan(
        tmp_path / "traces.jsonl",
        [node(("3", 31)), node(("2", 20), ("4", 12))],
        [node(("1", 63)), node(("4", 64))],
    )
    columns = ["episodes", "sampled_tokens", "sampled_nodes", "mixed_nodes", "off_policy/token/max"]
    found = ta.off_policy_metrics(spans, by=["completion_bin"]).select("completion_bin", *columns)
    assert found.rows() == [(0, 1, 31, 1, 0, 1), (32, 2, 95, 2, 1, 3), (64, 1, 64, 1, 0, 0)]
    counts = ta.age_counts(spans, by=["completion_bin"])
    assert counts.rows() == [(0, 1, 31), (32, 0, 12), (32, 2, 20), (32, 3, 63), (64, 0, 64)]


def test_what_has_no_token(tmp_path: Path) -> None:
    """An empty completion has a length, 0; a trace without any has none. None has a place."""
    spans = scan(tmp_path / "traces.jsonl", [node()], [])
    by_place = ta.off_policy_metrics(spans, by=["index_bin"])
    assert by_place.select("index_bin", "traces", "sampled_nodes", "sampled_tokens").rows() == [
        (0, 2, 1, 0)
    ]
    by_length = ta.off_policy_metrics(spans, by=["completion_bin"])
    assert by_length.select("completion_bin", "traces", "sampled_nodes").rows() == [
        (0, 1, 1),
        (None, 1, 0),
    ]
    for by in ("index_bin", "completion_bin"):
        assert ta.age_counts(spans, by=[by]).schema == {
            by: pl.Int32,
            "age": pl.Int32,
            "tokens": pl.Int64,
        }


def test_no_such_group() -> None:
    spans = ta.scan_spans(DATA / "real-dump")
    with pytest.raises(ValueError, match=r"no column 'bin' to group by; .* completion_bin"):
        ta.off_policy_metrics(spans, by=["index_bin", "bin"])
    with pytest.raises(pl.exceptions.ColumnNotFoundError, match="completion_tokens"):
        ta.age_counts(spans.drop("completion_tokens"), by=["completion_bin"])


# --- against plain loops --------------------------------------------------------------------------


def stretched(record: Record, times: int) -> Record:
    """A record, or a trace, with each sampled token `times` over, labels and streams among them."""
    record = dict(record)
    if record.get("traces"):
        record["traces"] = [stretched(trace, times) for trace in record["traces"]]
    if record.get("nodes"):
        record["nodes"] = [stretched_node(node, times) for node in record["nodes"]]
    return record


def stretched_node(node: Record, times: int) -> Record:
    node = {name: value for name, value in node.items() if name != "loss_weights"}
    mask = node.get("mask") or []
    for name in ("token_ids", "is_content", "mask"):
        if mask and node.get(name):
            node[name] = [
                value
                for value, sampled in zip(node[name], mask, strict=True)
                for _ in range(times if sampled else 1)
            ]
    for name in ("logprobs", *STAMPED):
        if node.get(name):
            node[name] = [value for value in node[name] for _ in range(times)]
    if node.get("weight_versions"):
        node["weight_versions"] = [
            {**span, "start": times * span["start"], "end": times * span["end"]}
            for span in node["weight_versions"]
        ]
    return node


# Up to some thirty tokens times as many: as far as the bin of 512.
longer_records = st.builds(
    lambda stored, times: [one._replace(record=stretched(one.record, times)) for one in stored],
    stored_records(max_size=3),
    st.integers(1, 40),
)


@few
@given(longer_records, groupings, weightings)
def test_bins_of_random_records(stored: list[Stored], by: list[str], weighting: Weighting) -> None:
    with folder() as root:
        write_steps(root, stored)
        spans = ta.scan_spans(root)
        found = ta.off_policy_metrics(spans, by=by, weighting=weighting)
        counts = ta.age_counts(spans, by=by, weighting=weighting)
    rows = ref.token_rows(stored)
    assert_same_metrics(found, ref.metrics_rows(rows, by, weighting), by)
    assert library_counts(counts, by) == ref.age_counts(rows, by, weighting)


@pytest.mark.parametrize("by", ["index_bin", "completion_bin"])
def test_bins_of_the_real_dump(by: str) -> None:
    """Bins add up to the whole; a token's bin is that of its own place."""
    spans = ta.scan_spans(DATA / "real-dump").collect()
    counts = ta.age_counts(spans, by=[by])
    figures = json.loads((DATA / "real-dump/expected.json").read_text())["mismatch_by_age"]
    of_age = counts.group_by("age").agg(pl.col("tokens").sum()).sort("age")
    assert of_age.rows() == [(int(age), row["tokens"]) for age, row in sorted(figures.items())]
    number = "index" if by == "index_bin" else "completion_tokens"
    tokens = ta.scan_tokens(DATA / "real-dump", [number, "age"]).collect()
    single = [(ref.bin_of(value), age) for value, age in tokens.iter_rows()]
    assert {row[:2]: row[2] for row in counts.iter_rows()} == {
        key: single.count(key) for key in set(single)
    }
