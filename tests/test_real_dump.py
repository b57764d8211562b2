"""Real dumps: ten batches of a served model, and the figures that were computed beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import reference as ref
from compare import assert_same_metrics, assert_same_tokens

import traceage as ta

DATA = Path(__file__).parent.parent / "data"
LAYOUTS = ("real-dump", "real-dump-steps")

# Names in expected.json that differ from the metric's.
RENAMED = {
    "sampled": "sampled_tokens",
    "labelled": "labelled_tokens",
    "default": "default_tokens",
    "unlabelled": "unlabelled_tokens",
    "nodes": "sampled_nodes",
    "min": "off_policy/token/min",
}

# Where the expected figure is a mean; everything else has to agree exactly.
MEANS = {name for name in ("off_policy/token/mean", "off_policy/mean")} | {
    f"off_policy/{part}/mean" for part in ("in_flight", "in_queue")
}


def expected(layout: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((DATA / layout / "expected.json").read_text())
    return figures


def assert_figures(rows: list[dict[str, Any]], layout: str) -> None:
    steps = expected(layout)["steps"]
    assert [row["step"] for row in rows] == sorted(int(step) for step in steps)
    checked = 0
    for row in rows:
        assert row["training_version"] == row["step"] - 1
        for name, value in steps[str(row["step"])].items():
            found = row[RENAMED.get(name, name)]
            if name in MEANS:
                assert found == pytest.approx(value, rel=1e-12, abs=1e-12), (row["step"], name)
            else:
                assert found == value, (row["step"], name)
            checked += 1
    assert checked == 14 * 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_figure_of_every_step(layout: str) -> None:
    assert_figures(ta.off_policy_metrics(ta.scan_spans(DATA / layout)).to_dicts(), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_by_age(layout: str) -> None:
    counts = ta.age_counts(ta.scan_spans(DATA / layout))
    totals = counts.group_by("age").agg(pl.col("tokens").sum()).sort("age")
    by_age = expected(layout)["mismatch_by_age"]
    assert totals.rows() == sorted((int(age), row["tokens"]) for age, row in by_age.items())
    assert totals["tokens"].sum() == 68_927


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_whole_dump(layout: str) -> None:
    """190 sampled nodes, 102 of them mixed, 68,927 tokens, every one labelled."""
    spans = ta.scan_spans(DATA / layout).collect()
    nodes = spans.group_by("trace_id", "node").agg(pl.col("mixed").first())
    assert (nodes.height, nodes["mixed"].sum()) == (190, 102)
    assert spans["length"].sum() == 68_927
    assert spans["version"].null_count() == 0
    assert spans["episode_id"].n_unique() == 80


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_for_token(layout: str) -> None:
    """The library and the reference agree on the real thing as they do on random records."""
    root = DATA / layout
    stored = ref.fold_store(root) if layout == "real-dump" else ref.read_steps(root)
    rows = ref.token_rows(stored)
    assert_figures(ref.metrics_rows(rows), layout)
    spans = ta.scan_spans(root).collect()
    assert_same_tokens(spans, rows)
    assert_same_metrics(ta.off_policy_metrics(spans), ref.metrics_rows(rows))


def test_both_layouts_say_the_same() -> None:
    """One run, stored twice: the trace store and the per-step folders give the same rows."""
    columns = ["step", "training_version", "episode_id", "trace_id", "node", "start", "end"]
    columns += ["label", "version", "branches", "policy_start", "policy_end", "reward"]
    one, other = (
        ta.scan_spans(DATA / layout).select(columns).collect().sort(columns) for layout in LAYOUTS
    )
    assert one.equals(other)
