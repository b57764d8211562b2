"""A source -> every table that the report is made of, in one pass over the spans.

A second pass over the tokens, for the mismatch, is made only where a trainer's logprobs are found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Unpack

import polars as pl

from traceage.counts import Weighting, read_batches
from traceage.errors import ReadSummary
from traceage.metrics import Tally
from traceage.mismatch import MismatchTally, Trend, mismatch_batches
from traceage.scan import ReadingOptions, scan_spans, scan_tokens
from traceage.thresholds import masking_of
from traceage.traces import TraceTally

BREAKDOWNS = ("env", "agent", "turn", "index_bin", "completion_bin")
"""What the ages of all steps together are broken down by."""

LOOKED_AT = 50_000
"""Tokens among which a trainer's logprobs are looked for."""

_BATCH = (
    "step",
    "training_version",
    "shipped",
    "episode_id",
    "trace_id",
    "node",
    "start",
    "length",
    "label",
    "version",
)


@dataclass(frozen=True)
class Study:
    """What a run's traces say; the tables that `write_report` shows.

    Only the first two are always there: what is None or empty could not be told.
    """

    metrics: pl.DataFrame
    """`off_policy_metrics` by step."""
    counts: pl.DataFrame
    """`age_counts` by step."""
    sources: Sequence[str | os.PathLike[str]] = ()
    """What was read."""
    notes: Sequence[str] = ()
    """What a reader has to know about it: faults that were skipped, files that were passed over."""
    by_env: pl.DataFrame | None = None
    """`off_policy_metrics` by step and env."""
    breakdowns: dict[str, pl.DataFrame] = field(default_factory=dict)
    """`off_policy_metrics` by each of `BREAKDOWNS`."""
    by_reward: pl.DataFrame | None = None
    """`age_by_reward`."""
    versions: pl.DataFrame | None = None
    """`versions_per_trace`."""
    index_counts: pl.DataFrame | None = None
    """`age_counts` by `index_bin`."""
    masking: pl.DataFrame | None = None
    """`masking` for all of the run."""
    batch: pl.DataFrame | None = None
    """The spans of the last batch."""
    mismatch: pl.DataFrame | None = None
    """`mismatch_by_age`; None where no trainer's logprobs were found."""
    trend: Trend | None = None
    """How mismatch KL changes with age, with a 99% interval."""


def read_study(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    weighting: Weighting = "nodes",
    **reading: Unpack[ReadingOptions],
) -> Study:
    """Every table that the report is made of.

    Args:
        source: see `scan_spans`.
        weighting: of the metrics and the age counts; see `off_policy_metrics`. Masking, mismatch
            and what is said of traces count each token once.
        **reading: see `scan_spans`.

    Returns:
        A `Study`. Trainer's logprobs are looked for among the first 50,000 sampled tokens; where
        there are any, all tokens are read for the mismatch.

    Raises:
        TraceError: as `scan_spans`.

    >>> study = read_study("data/real-dump")
    >>> study.metrics.height, study.mismatch.height, sorted(study.breakdowns)
    (10, 5, ['agent', 'completion_bin', 'env', 'index_bin', 'turn'])
    """
    sources = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    summary = reading.get("summary") or ReadSummary()
    reading["summary"] = summary
    steps, envs = Tally(["step"], weighting), Tally(["step", "env"], weighting)
    parts = {name: Tally([name], weighting) for name in BREAKDOWNS}
    traces = TraceTally()
    tallies: list[Tally | TraceTally] = [steps, envs, *parts.values(), traces]
    columns = list(dict.fromkeys([*_BATCH, *(name for t in tallies for name in t.columns)]))
    last = pl.DataFrame()
    for batch in read_batches(scan_spans(sources, **reading), columns, weighting):
        for tally in tallies:
            tally.add(batch)
        last = _newest(last, batch)
    notes = summary.lines()

    mismatch = trend = None
    if _scored_by_a_trainer(sources, reading):
        ratios = MismatchTally()
        for batch in mismatch_batches(sources, ratios.columns, reading):
            ratios.add(batch)
        mismatch, trend = ratios.table(), ratios.trend(confidence=0.99)
        notes = list(dict.fromkeys([*notes, *summary.lines()]))
    return Study(
        metrics=steps.metrics(),
        counts=steps.counts,
        sources=sources,
        notes=notes,
        by_env=envs.metrics(),
        breakdowns={name: tally.metrics() for name, tally in parts.items()},
        by_reward=traces.age_by_reward(),
        versions=traces.versions_per_trace(),
        index_counts=parts["index_bin"].counts,
        masking=masking_of(traces),
        batch=last,
        mismatch=mismatch,
        trend=trend,
    )


def _newest(last: pl.DataFrame, batch: pl.DataFrame) -> pl.DataFrame:
    """The rows of the newest batch among those of `last` and `batch`."""
    trained = batch.select(_BATCH).filter(
        pl.col("step").is_not_null(), pl.col("shipped").fill_null(True)
    )
    both = pl.concat([last, trained]) if last.width else trained
    return both.filter(pl.col("step") == pl.col("step").max())


def _scored_by_a_trainer(
    sources: Sequence[str | os.PathLike[str]], reading: ReadingOptions
) -> bool:
    """Whether a trainer's logprobs are found among the first tokens."""
    # In this process and in silence: it is a look, not a reading.
    looking: ReadingOptions = {**reading, "workers": 1, "quiet": True, "summary": ReadSummary()}
    columns = ["logprob", "trainer_logprob"]
    head = scan_tokens(sources, columns, **looking).head(LOOKED_AT)
    both = pl.all_horizontal(pl.col(columns).is_not_null())
    return bool(head.select(both.any()).collect().item())
