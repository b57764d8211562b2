"""Time `traceage.batch_metrics` on one batch in memory against the loop over every token.

    python benchmarks/live.py --episodes 256

The batch is 256 episodes of about 8,000 sampled tokens, as plain records and, where verifiers is
installed, as its objects.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from generate import episodes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STEP = 8
Tool = Callable[[list[Any]], tuple[float, int]]


def batch(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The records of one batch late enough that its tokens have every age."""
    made = islice(episodes(seed, count), (STEP - 1) * count, STEP * count)
    return [json.loads(episode.line()) for episode in made]


def loop_records(batch: list[dict[str, Any]]) -> tuple[float, int]:
    """Mean and maximum age by a list with an entry a token."""
    ages = [
        STEP - 1 - int(span["version"])
        for episode in batch
        for trace in episode["traces"]
        if trace["agent"]["trainable"]
        for node in trace["nodes"]
        for span in node.get("weight_versions") or []
        if span["version"] != "default"
        for _ in range(span["start"], span["end"])
    ]
    return sum(ages) / len(ages), max(ages)


def loop_objects(batch: list[Any]) -> tuple[float, int]:
    """The same over verifiers' objects."""
    ages = [
        STEP - 1 - int(span.version)
        for episode in batch
        for trace in episode.traces
        if trace.agent.trainable
        for node in trace.nodes
        for span in node.weight_versions or []
        if span.version != "default"
        for _ in range(span.start, span.end)
    ]
    return sum(ages) / len(ages), max(ages)


def ours(batch: list[Any]) -> tuple[float, int]:
    import traceage

    metrics: dict[str, Any] = dict(traceage.batch_metrics(batch, step=STEP))
    return metrics["off_policy/token/mean"], metrics["off_policy/token/max"]


def clock(tools: list[Tool], batch: list[Any], repeats: int) -> list[float]:
    """Median seconds of each, run in turn."""
    seconds: list[list[float]] = [[] for _ in tools]
    for _ in range(repeats):
        for tool, times in zip(tools, seconds, strict=True):
            begin = time.perf_counter()
            tool(batch)
            times.append(time.perf_counter() - begin)
    return [median(times) for times in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    records = batch(args.episodes)
    forms: list[tuple[str, list[Any], Tool]] = [("plain records", records, loop_records)]
    if importlib.util.find_spec("verifiers"):
        episode_class = importlib.import_module("verifiers.v1.episode").Episode
        objects = [episode_class.model_validate(record) for record in records]
        forms.append(("verifiers objects", objects, loop_objects))
    print(f"{args.episodes} episodes, {sum(map(_sampled, records)):,} sampled tokens\n")
    print("| batch | token loop, ms | batch_metrics, ms | times as fast |")
    print("| --- | ---: | ---: | ---: |")
    for name, data, loop in forms:
        (mean, highest), (our_mean, our_highest) = loop(data), ours(data)
        if not math.isclose(mean, our_mean, rel_tol=1e-9) or highest != our_highest:
            raise AssertionError(f"{name}: {mean}, {highest} against {our_mean}, {our_highest}")
        slow, fast = clock([loop, ours], data, args.repeats)
        print(f"| {name} | {slow * 1e3:.1f} | {fast * 1e3:.1f} | {slow / fast:.1f} |")


def _sampled(episode: dict[str, Any]) -> int:
    """Sampled tokens of the agent that is trained."""
    return sum(
        sum(node["mask"])
        for trace in episode["traces"]
        if trace["agent"]["trainable"]
        for node in trace["nodes"]
    )


if __name__ == "__main__":
    main()
