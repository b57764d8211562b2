"""The capture that ships with the sources: what was logged is what its traces give."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import traceage as ta

RUN = Path(__file__).parent.parent / "data" / "capture"


def test_logged_metrics_are_those_of_the_traces() -> None:
    lines = (RUN / "monitors" / "file" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    log = {row["step"]: row["metrics"] for row in rows if row["producer"] == "orch"}
    metrics = ta.off_policy_metrics(ta.scan_spans(RUN, quiet=True)).filter(pl.col("episodes") > 0)
    assert metrics["step"].to_list() == list(range(1, 41)) == sorted(log)
    assert (metrics["coverage"] == 1.0).all()
    for row in metrics.to_dicts():
        # The log is as old as the run: figures that came later are not in it.
        shared = {key: row[key] for key in row if key in log[row["step"]]}
        assert sum(key.startswith("off_policy/") for key in shared) >= 12
        logged = {key: log[row["step"]][key] for key in shared}
        assert logged == pytest.approx(shared, abs=1e-12)
    rewards = [log[step]["reward/mean"] for step in sorted(log)]
    assert rewards[0] < 0.26
    assert rewards[-1] > 0.59


def test_figures_of_the_readme() -> None:
    totals = ta.off_policy_metrics(ta.scan_spans(RUN, quiet=True)).sum()
    names = ("episodes", "sampled_tokens", "mixed_nodes", "sampled_nodes", "default_tokens")
    assert [totals[name].item() for name in names] == [640, 229_108, 1_122, 1_920, 0]
    tokens = ta.scan_tokens(RUN, ["age", "logprob", "trainer_logprob", "entropy"], quiet=True)
    ratio = pl.col("trainer_logprob") - pl.col("logprob")
    kl = (ratio.exp() - ratio - 1).mean().alias("kl")
    by_age = tokens.group_by("age").agg(pl.len(), kl).sort("age").collect()
    assert by_age["len"].to_list() == [48_736, 102_594, 69_971, 7_717, 90]
    assert by_age["kl"].to_list() == pytest.approx(
        [0.0004, 0.0026, 0.0073, 0.0162, 0.0855], abs=6e-5
    )
    assert sum(tokens.collect().null_count().row(0)) == 0
