"""Metrics -> the columns of a table, as plain text and as cells of the page."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from traceage.figures.batches import bin_name
from traceage.figures.style import by_columns, percent, plain

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the table: its heading, the value of a row, and how that value is written."""

    group: str  # heading over several columns; "" for none
    name: str
    value: Callable[[Row], Any]
    write: Callable[[Any], str]
    hint: str
    text: bool = False  # left-aligned
    key: bool = False  # heads its row

    def cell(self, row: Row) -> str:
        value = self.value(row)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        return self.write(value)


def _get(key: str) -> Callable[[Row], Any]:
    return lambda row: row.get(key)


def _ratio(part: str, whole: str) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        top, bottom = row.get(part), row.get(whole)
        return None if top is None or not bottom else float(top / bottom)

    return value


def integer(value: Any) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def mean(value: Any) -> str:
    return f"{value:,.2f}"


_AGE = "token age"
_EPISODE = "episode staleness"

_COLUMNS = (
    Column("", "episodes", _get("episodes"), integer, "episodes with tokens in this batch"),
    Column(
        "",
        "not shipped",
        _get("not_shipped"),
        integer,
        "episodes that arrived at this step and that no batch took",
    ),
    Column("", "sampled tokens", _get("sampled_tokens"), integer, "tokens that a policy sampled"),
    Column("", "coverage", _get("coverage"), percent, "labelled share of the sampled tokens"),
    Column(_AGE, "mean", _get("off_policy/token/mean"), mean, "mean over the labelled tokens"),
    Column(
        _AGE,
        "min",
        _get("off_policy/token/min"),
        integer,
        "below 0: a token labelled with a newer policy than the one its batch trained",
    ),
    Column(_AGE, "p50", _get("off_policy/token/p50"), integer, "half of the tokens are no older"),
    Column(_AGE, "p95", _get("off_policy/token/p95"), integer, "95% of the tokens are no older"),
    Column(_AGE, "max", _get("off_policy/token/max"), integer, "age of the oldest token"),
    Column(_EPISODE, "mean", _get("off_policy/mean"), mean, "mean over the episodes"),
    Column(_EPISODE, "max", _get("off_policy/max"), integer, "the stalest episode"),
    Column(
        _EPISODE,
        "in-flight",
        _ratio("off_policy/in_flight/mean", "off_policy/mean"),
        percent,
        "share of the mean that passed while the episodes were generated",
    ),
    Column(
        _EPISODE,
        "in-queue",
        _ratio("off_policy/in_queue/mean", "off_policy/mean"),
        percent,
        "share of the mean that passed while the episodes waited for a batch",
    ),
    Column(
        "",
        "mixed",
        _ratio("mixed_nodes", "sampled_nodes"),
        percent,
        "share of the completions that more than one policy sampled",
    ),
)


def columns_of(metrics: pl.DataFrame) -> list[Column]:
    """The columns of the table; the lowest age only where it shows a fault."""
    keys = [_key(metrics, name) for name in by_columns(metrics)]
    columns = [c for c in _COLUMNS if c.name != "min" or _lowest(metrics) < 0]
    return keys + columns


def _key(frame: pl.DataFrame, name: str) -> Column:
    """A column that a frame is grouped by."""
    if name in _BINS:
        return Column("", _BINS[name], _get(name), bin_name, "tokens", key=True)
    text = frame[name].dtype == pl.String
    return Column("", plain(name), _get(name), plain, "", text=text, key=True)


_BINS = {"index_bin": "place in the completion", "completion_bin": "length of the completion"}


def mismatch_columns(mismatch: pl.DataFrame) -> list[Column]:
    """The columns of the table of `mismatch_by_age`."""

    def number(value: Any) -> str:
        return f"{value:.3g}"

    kl, ratio = "mismatch KL (nats a token)", "importance ratio"
    columns = [
        _key(mismatch, "age"),
        Column("", "tokens", _get("tokens"), integer, "tokens with both logprobs"),
        Column("", "episodes", _get("episodes"), integer, "that have such a token"),
        Column(kl, "mean", _get("mismatch_kl"), number, "mean of w - r - 1 (k3)"),
        Column(kl, "low", _get("mismatch_kl_low"), number, "95% interval over episodes"),
        Column(kl, "high", _get("mismatch_kl_high"), number, "95% interval over episodes"),
        Column(kl, "k1", _get("mismatch_k1"), number, "mean of -r"),
        Column(kl, "k2", _get("mismatch_k2"), number, "mean of r^2 / 2"),
        Column(kl, "trainer's", _get("trainer_mismatch_kl"), number, "what the trainer logged"),
        Column("", "mean log ratio", _get("mean_log_ratio"), number, "mean of r"),
        *(
            Column(ratio, f"p{q}", _get(f"importance_ratio_p{q:02}"), lambda v: f"{v:.3f}", "")
            for q in (1, 50, 99)
        ),
        Column("", "outside clip", _get("outside_clip"), percent, "w below 0.8 or above 1.2"),
        Column("", "ESS", _get("ess_ratio"), percent, "effective sample size, as a share"),
        Column("", "left out", _left_out, integer, "a logprob is missing or infinite"),
    ]
    given = mismatch["trainer_mismatch_kl"].is_not_null().any()
    return [c for c in columns if c.name != "trainer's" or given]


def _left_out(row: Row) -> int:
    return int(row["missing"] + row["non_finite"])


def masking_columns(masking: pl.DataFrame, names: Mapping[str, str]) -> list[Column]:
    """The columns of the table of `masking`; `names` says the policies in words."""
    lost, reward = "lost", "reward"
    length, turns = "completion length", "turns"
    columns = [
        Column("", "policy", _get("policy"), lambda v: names[v], "", text=True, key=True),
        Column("", "max age", _get("max_age"), integer, "the threshold", key=True),
        Column("", "kept tokens", _get("kept_tokens"), integer, ""),
        Column("", "kept share", _get("kept_share"), percent, "of the sampled tokens"),
        Column(lost, "traces", _get("lost_traces"), integer, "that keep no token"),
        Column(lost, "groups", _get("lost_groups"), integer, "that keep no trace"),
        Column(lost, "small groups", _get("small_groups"), integer, "left with fewer than two"),
    ]
    for group, key, write in (
        (reward, "reward", lambda v: f"{v:.3f}"),
        (length, "completion_tokens", lambda v: f"{v:,.0f}"),
        (turns, "turns", mean),
    ):
        columns += [
            Column(group, of, _get(f"{key}/{of}"), write, "mean over traces")
            for of in ("kept", "all")
        ]
    return columns


def reward_columns(by_reward: pl.DataFrame) -> list[Column]:
    """The columns of the table of `age_by_reward`."""

    def reward(value: Any) -> str:
        return f"{value:.3f}"

    return [
        Column("", "quarter", _get("reward_quantile"), integer, "the last is the best", key=True),
        Column("reward", "from", _get("reward_min"), reward, ""),
        Column("reward", "to", _get("reward_max"), reward, ""),
        Column("", "traces", _get("traces"), integer, ""),
        Column("", "labelled tokens", _get("labelled_tokens"), integer, ""),
        *(c for c in _COLUMNS if c.group == _AGE and c.name != "min"),
    ]


def versions_columns(versions: pl.DataFrame) -> list[Column]:
    """The columns of the table of `versions_per_trace`."""
    traces = versions["traces"].sum()
    return [
        Column("", "versions", _get("versions"), integer, "distinct in a trace", key=True),
        Column("", "traces", _get("traces"), integer, ""),
        Column("", "share", lambda row: row["traces"] / traces, percent, "of the traces"),
    ]


def _lowest(metrics: pl.DataFrame) -> int:
    """The lowest token age, 0 if none is below."""
    if "off_policy/token/min" not in metrics.columns:
        return 0
    lowest: int = min([0, *metrics["off_policy/token/min"].drop_nulls()])
    return lowest


# --- plain text ---------------------------------------------------------------------------------


def summary_table(metrics: pl.DataFrame) -> str:
    """The metrics as a plain-text table, one line a row, without a trailing newline.

    `metrics` is what `off_policy_metrics` returns. The columns are those it is grouped by, then:
    episodes, episodes not shipped, sampled tokens, coverage (labelled share of them), token age
    in policy versions (mean, p50, p95, max; also min when one is below 0), episode staleness in
    policy versions (mean, max, and the shares of the mean in flight and in queue), and the share
    of completions that mix versions. `-` stands for null. About 110 columns wide by step.

    >>> import polars as pl
    >>> table = summary_table(pl.DataFrame({
    ...     "step": [1, 2], "episodes": [8, 8], "sampled_tokens": [4151, 5335],
    ...     "coverage": [1.0, 0.5], "off_policy/token/mean": [0.0, 0.71],
    ... }))
    >>> for line in table.splitlines():
    ...     print(line[:43].rstrip())
                        not  sampled
    step  episodes  shipped   tokens  coverage
       1         8        -    4,151      100%
       2         8        -    5,335     50.0%
    """
    columns = columns_of(metrics)
    rows = [[column.cell(row) for column in columns] for row in metrics.iter_rows(named=True)]
    heads = [_two_lines(column.name) for column in columns]
    widths = [max(map(_width, [*head, *(row[i] for row in rows)])) for i, head in enumerate(heads)]
    upper: list[str] = []
    for start, stop, group in headings_of(columns):
        if group:
            whole = sum(widths[start:stop]) + 2 * (stop - start - 1)
            upper.append(f" {group} ".center(whole, "-"))
        else:
            upper += [_pad(heads[i][0], widths[i], columns[i].text) for i in range(start, stop)]
    lines = ["  ".join(upper)]
    for cells in [[head[1] for head in heads], *rows]:
        padded = zip(cells, widths, columns, strict=True)
        lines.append("  ".join(_pad(cell, width, c.text) for cell, width, c in padded))
    return "\n".join(line.rstrip() for line in lines)


def _two_lines(name: str) -> tuple[str, str]:
    upper, _, lower = (
        name.rpartition(" ") if name in ("not shipped", "sampled tokens") else ("", "", name)
    )
    return upper, lower


def _width(text: str) -> int:
    """Columns that `text` takes in a terminal."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _pad(text: str, width: int, left: bool) -> str:
    fill = " " * (width - _width(text))
    return text + fill if left else fill + text


def headings_of(columns: Sequence[Column]) -> list[tuple[int, int, str]]:
    """Neighbouring columns of one group as (start, stop, group)."""
    spans: list[tuple[int, int, str]] = []
    for index, column in enumerate(columns):
        if spans and spans[-1][2] == column.group:
            spans[-1] = (spans[-1][0], index + 1, column.group)
        else:
            spans.append((index, index + 1, column.group))
    return spans
