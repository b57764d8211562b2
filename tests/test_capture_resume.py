"""What a run that is resumed takes back: batches after the step, and one that was cut in half."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import traceage as ta
from traceage.capture.store import MetricsLog, TraceStoreWriter

orchestrator = pytest.importorskip("traceage.capture.orchestrator")


def episode(name: str) -> dict[str, Any]:
    spans = [{"version": "0", "start": 0, "end": 2}]
    node = {"message": {"role": "assistant"}, "sampled": True, "token_ids": [1, 2]}
    node |= {"mask": [True, True], "logprobs": [-1.0, -2.0], "weight_versions": spans}
    trace = {"id": f"{name}-t", "agent": {"name": "agent", "trainable": True}, "nodes": [node]}
    return {"id": name, "env": {"id": "e", "name": "e"}, "traces": [trace]}


def ship(store: TraceStoreWriter, step: int, *names: str) -> None:
    for name in names:
        store.append(
            episode(name),
            dispatch_step=step,
            arrival_step=step,
            dispatch_time=1.0,
            arrival_time=2.0,
        )
        info = {"effective": True, "ship": {"step": step, "time": 3.0}}
        store.annotate("orch", f"{name}-t", info, [])


@pytest.mark.parametrize(("step", "left"), [(2, {1: 2, 2: 2}), (1, {1: 2}), (0, {})])
def test_later_batches_are_taken_back(tmp_path: Path, step: int, left: dict[int, int]) -> None:
    with TraceStoreWriter(tmp_path) as store:
        for whole in (1, 2):
            ship(store, whole, f"{whole}a", f"{whole}b")
            MetricsLog(tmp_path).log(whole, {})
            MetricsLog(tmp_path).log(whole, {}, producer="trainer")
        ship(store, 3, "3a")  # killed before its second trace, and so before it was logged
    assert orchestrator.shipped_steps(tmp_path) == 2
    with TraceStoreWriter(tmp_path) as store:
        taken = orchestrator.take_back(tmp_path, store, step)
    assert taken == 5 - sum(left.values())
    metrics = ta.off_policy_metrics(ta.scan_spans(tmp_path, quiet=True))
    shipped = metrics.filter(pl.col("episodes") > 0)
    assert dict(zip(shipped["step"], shipped["episodes"], strict=True)) == left
    assert metrics["not_shipped"].sum() == taken


def test_a_row_half_written_is_no_batch(tmp_path: Path) -> None:
    assert orchestrator.shipped_steps(tmp_path) == 0
    log = MetricsLog(tmp_path)
    log.log(1, {})
    with log.path.open("a") as file:
        file.write(json.dumps({"step": 2, "producer": "orch"}))
    assert orchestrator.shipped_steps(tmp_path) == 1
