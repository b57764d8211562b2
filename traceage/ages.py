"""Age: how many policy versions lie between the sampling of a token and its training.

`age = training_version - version`, signed. A negative age means that a token carries a newer
version than its batch trained: a fault in the labelling, kept and shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from traceage.errors import TraceError
from traceage.spans import LabelReader, Run, SpanError, tile

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray

    TrainingVersion = str | int | Mapping[int, int]


def age() -> pl.Expr:
    """The age of every row that has `training_version` and `version`: Int32, null without either.

    >>> import polars as pl
    >>> frame = pl.DataFrame({"training_version": [7, 7, 7], "version": [5, 9, None]})
    >>> frame.select(age())["age"].to_list()
    [2, -2, None]
    """
    import polars as pl

    difference = pl.col("training_version") - pl.col("version")
    return difference.cast(pl.Int32).alias("age")


def training_versions(spans: pl.DataFrame, how: TrainingVersion) -> pl.Series:
    """The training version of each row of `spans`, before anything is masked: Int32.

    `how` is `"step"`, `"step-1"`, the name of a column, an integer, or a mapping from step to
    version. Raises `TraceError` for an unknown column or a step that the mapping lacks.
    """
    import polars as pl

    steps = spans["step"]
    if isinstance(how, int):
        versions = pl.repeat(how, spans.height, eager=True)
    elif isinstance(how, str):
        if how == "step":
            versions = steps
        elif how == "step-1":
            versions = steps - 1
        elif how in spans.columns and spans[how].dtype.is_integer():
            versions = spans[how]
        else:
            raise TraceError(
                f"training version {how!r} is neither 'step', 'step-1', an integer nor an integer "
                "column of the spans (policy_start, policy_end, ...)"
            )
    else:
        missing = sorted(set(steps.drop_nulls().unique()) - set(how))
        if missing:
            raise TraceError(f"the mapping gives no training version for step {missing[0]}")
        versions = steps.replace_strict(dict(how), default=None, return_dtype=pl.Int32)
    return versions.cast(pl.Int32).alias("training_version")


def node_policy_versions(node: Any, version_pattern: str | None = None) -> pl.Series:
    """The policy version of each sampled token of one node: Int32, one value a sampled token.

    `node` is a `verifiers` `MessageNode` or a plain record of one. The value is null where the
    engine gave no label or said `default`. Raises `TraceError` for spans that do not fit the node
    and for a label that is no version.

    >>> node = {"sampled": True, "mask": [False, True, True, True],
    ...         "weight_versions": [{"version": "4", "start": 0, "end": 2}]}
    >>> node_policy_versions(node).to_list()
    [4, 4, None]
    """
    import polars as pl

    read = LabelReader(version_pattern)
    runs = _runs(node, "node") or []
    versions = pl.Series("version", [_version(read, run, "node") for run in runs], pl.Int32)
    lengths = np.array([end - start for start, end, _ in runs], dtype=np.int64)
    return versions.gather(np.repeat(np.arange(len(runs)), lengths))


def token_policy_ages(
    trace: Any, training_version: int, version_pattern: str | None = None
) -> NDArray[np.int32]:
    """The age of every sampled token that carries a version, in node order: an int32 array.

    `trace` is a `verifiers` `Trace` or a plain record of one. Each sampled node counts once,
    however many branches share it. Tokens labelled `default` and tokens without a label are left
    out, so the array is as long as the labelled tokens are many. Raises `TraceError` for spans
    that do not fit their node and for a label that is no version.

    >>> trace = {"nodes": [{"sampled": True, "mask": [True, True, True], "weight_versions": [
    ...     {"version": "9", "start": 0, "end": 1}, {"version": "10", "start": 1, "end": 3}]}]}
    >>> token_policy_ages(trace, training_version=11)
    array([2, 1, 1], dtype=int32)
    """
    read = LabelReader(version_pattern)
    found = [
        (training_version - version, run[1] - run[0])
        for where, runs in completions(trace)
        for run in runs
        if (version := _version(read, run, where)) is not None
    ]
    pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
    return np.repeat(pairs[:, 0].astype(np.int32), pairs[:, 1])


def completions(trace: Any) -> Iterator[tuple[str, list[Run]]]:
    """Where each sampled node of a trace is, for messages, and its runs of tokens."""
    for index, node in enumerate(field(trace, "nodes") or ()):
        where = f"trace {field(trace, 'id')}, node {index}"
        runs = _runs(node, where)
        if runs is not None:
            yield where, runs


def field(value: Any, name: str) -> Any:
    """A field of a `verifiers` object or of a plain record; None where it is absent."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _runs(node: Any, where: str) -> list[Run] | None:
    """The runs of a live node; None when the model did not sample it."""
    spans = field(node, "weight_versions")
    sampled = field(node, "sampled")
    if sampled is None:
        sampled = bool(spans) or bool(_count_true(field(node, "mask")))
    if not sampled:
        return None
    try:
        if isinstance(node, dict):
            stored = [(str(s["version"]), s["start"], s["end"]) for s in spans or ()]
        else:
            stored = [(str(s.version), s.start, s.end) for s in spans or ()]
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{where}: malformed weight_versions {spans!r}: {error}") from None
    logprobs = field(node, "logprobs")
    tokens = len(logprobs) if logprobs is not None else 0
    # One logprob stands for each sampled token, and counting a mask costs more than its length;
    # spans that end elsewhere are the one sign that the two might differ.
    if not tokens or (stored and stored[-1][2] != tokens):
        mask = field(node, "mask")
        if mask is not None and len(mask):
            tokens = _count_true(mask)
        elif not tokens and stored:
            tokens = max(end for _, _, end in stored)
    try:
        return tile(stored, tokens)
    except SpanError as error:
        raise TraceError(f"{where}: bad spans: {error}; spans: {stored}") from None


def _count_true(mask: Any) -> int:
    if mask is None:
        return 0
    return mask.count(True) if isinstance(mask, list) else int(np.count_nonzero(mask))


def _version(read: LabelReader, run: Run, where: str) -> int | None:
    try:
        return read(run[2])
    except ValueError as error:
        raise TraceError(f"{where}: {error}; name the labels' form with version_pattern") from None
