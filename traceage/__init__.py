"""How old was every token when it was trained on?

traceage reads the stored traces of asynchronous reinforcement learning, turns the engine's
`weight_versions` spans into tables, and computes each token's age against the policy version that
its batch trained.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceage import figures as figures
    from traceage.ages import age as age
    from traceage.ages import node_policy_versions as node_policy_versions
    from traceage.ages import token_policy_ages as token_policy_ages
    from traceage.convert import read_dump_schema as read_dump_schema
    from traceage.convert import write_dump as write_dump
    from traceage.counts import age_counts as age_counts
    from traceage.counts import merge_counts as merge_counts
    from traceage.errors import ReadSummary as ReadSummary
    from traceage.errors import TraceError as TraceError
    from traceage.errors import TraceWarning as TraceWarning
    from traceage.figures import age_heatmap as age_heatmap
    from traceage.figures import staleness as staleness
    from traceage.metrics import batch_metrics as batch_metrics
    from traceage.metrics import off_policy_metrics as off_policy_metrics
    from traceage.mismatch import mismatch_by_age as mismatch_by_age
    from traceage.report import write_report as write_report
    from traceage.scan import scan_spans as scan_spans
    from traceage.scan import scan_tokens as scan_tokens
    from traceage.study import Study as Study
    from traceage.study import read_study as read_study
    from traceage.thresholds import masking as masking
    from traceage.thresholds import staleness_mask as staleness_mask
    from traceage.tokens import explode as explode
    from traceage.tokens import to_numpy as to_numpy
    from traceage.tokens import to_torch as to_torch
    from traceage.traces import age_by_reward as age_by_reward
    from traceage.traces import versions_per_trace as versions_per_trace

__version__ = "0.1.0"

# Imported when first used: a worker process that only parses lines does not pay for polars, nor a
# batch job for matplotlib.
_HOME = {
    "age": "ages",
    "node_policy_versions": "ages",
    "token_policy_ages": "ages",
    "read_dump_schema": "convert",
    "write_dump": "convert",
    "age_counts": "counts",
    "merge_counts": "counts",
    "ReadSummary": "errors",
    "TraceError": "errors",
    "TraceWarning": "errors",
    "age_heatmap": "figures",
    "staleness": "figures",
    "batch_metrics": "metrics",
    "off_policy_metrics": "metrics",
    "mismatch_by_age": "mismatch",
    "write_report": "report",
    "scan_spans": "scan",
    "scan_tokens": "scan",
    "Study": "study",
    "read_study": "study",
    "masking": "thresholds",
    "staleness_mask": "thresholds",
    "explode": "tokens",
    "to_numpy": "tokens",
    "to_torch": "tokens",
    "age_by_reward": "traces",
    "versions_per_trace": "traces",
}

__all__ = ["__version__", "figures", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name == "figures":
        return import_module("traceage.figures")
    if name not in _HOME:
        raise AttributeError(f"module 'traceage' has no attribute {name!r}")
    return getattr(import_module(f"traceage.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
