"""Where tokens of an age are: in one step, in the traces of one batch, in a completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from traceage.ages import age
from traceage.counts import age_figures, merge_counts
from traceage.figures.ages import age_range, age_row_edges
from traceage.figures.style import (
    LIGHT,
    UNDER,
    Theme,
    legend,
    one_panel,
    percent,
    require,
    say,
    signed,
    title,
    value_range,
)
from traceage.groups import FIRST_BIN
from traceage.spans import DEFAULT_LABEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["age_by_index", "age_distribution", "batch_timeline"]

MOST_TRACES, MOST_RUNS = 64, 4000
"""What a timeline shows."""


# --- one step -----------------------------------------------------------------------------------


def age_distribution(
    counts: pl.DataFrame, step: int | None = None, *, ax: Axes | None = None
) -> Figure:
    """How the labelled tokens of one step spread over the ages, as bars of their share.

    `counts` is what `age_counts` returns; further group columns are summed over. `step` is the
    step to show, the last by default. With many distinct ages, a bar holds several, and its name
    says which. Ages below 0 (a fault in the labelling) are orange.

    Returns the figure. Raises `ValueError` when `counts` has no `step`, `age` or `tokens` column,
    or no token of the step.

    >>> import polars as pl
    >>> counts = pl.DataFrame({"step": [1, 2, 2], "age": [0, 0, 1], "tokens": [400, 300, 100]})
    >>> figure = age_distribution(counts)
    >>> [float(bar.get_height()) for bar in figure.axes[0].patches]
    [0.75, 0.25]
    """
    return draw_distribution(counts, step, ax=ax)


def draw_distribution(
    counts: pl.DataFrame, step: int | None, *, ax: Axes | None = None, theme: Theme = LIGHT
) -> Figure:
    """`age_distribution` with the colours of `theme`."""
    from matplotlib.ticker import PercentFormatter

    require(counts, "step", "age", "tokens")
    there = counts.filter(pl.col("tokens") > 0, pl.col("step").is_not_null())
    if step is None:
        step = there.select(pl.col("step").max()).item()
    if step not in there["step"]:
        raise ValueError(f"no token with an age{'' if step is None else f' in step {step}'}")
    ages = there.filter(pl.col("step") == step).group_by("age").agg(pl.col("tokens").sum())
    edges = age_row_edges(*ages.select(low=pl.col("age").min(), high=pl.col("age").max()).row(0))
    bar = np.searchsorted(edges, ages["age"].to_numpy(), side="right") - 1
    tokens = ages["tokens"].to_numpy()
    shares = np.bincount(bar, tokens, len(edges) - 1) / tokens.sum()

    figure, ax = one_panel(ax, theme, height=2.6)
    fault = [edge < 0 for edge in edges[:-1]]
    ax.bar(
        range(len(shares)),
        shares,
        color=[theme.fault if bad else theme.age for bad in fault],
        width=0.86,
        zorder=3,
    )
    names = [age_range(*edges[k : k + 2]) for k in range(len(shares))]
    every = -(-len(names) // 16)
    ax.set_xticks(range(0, len(names), every), names[::every])
    if len(shares) <= 16:
        for k, share in enumerate(shares):
            if share > 0:
                ax.annotate(
                    percent(float(share)),
                    (k, share),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7.5,
                    color=theme.ink,
                )
    ax.set_ylim(0, float(shares.max()) * 1.12)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set_xlabel("age (policy versions)")
    ax.set_ylabel("share of labelled tokens")
    title(ax, theme, f"Token age in step {step}")
    return figure


# --- the traces of one batch --------------------------------------------------------------------


def batch_timeline(spans: pl.DataFrame, *, ax: Axes | None = None) -> Figure:
    """The traces of one batch, a row each: their sampled tokens in order, coloured by version.

    `spans` is a spans table, collected, of one step. Traces are ordered by the version of their
    first token, oldest on top, then by length; of more than 64, or with more than 4,000 runs, every
    n-th is shown and the title says so. The darker, the older; ages of 4 and above share a colour.
    `default` tokens are grey, tokens without a label are hatched, and thin gaps part the
    completions of a trace.

    Returns the figure. Raises `ValueError` when a column is missing, or for several steps.

    >>> import polars as pl, traceage as ta
    >>> spans = ta.scan_spans("data/real-dump").filter(pl.col("step") == 5).collect()
    >>> batch_timeline(spans).axes[0].get_title(loc="left")
    'Batch 5: who sampled the tokens of its 8 traces'
    """
    return draw_timeline(spans, ax=ax)


_OLDEST = 4
"""Ages from here on share a colour."""


def draw_timeline(spans: pl.DataFrame, *, ax: Axes | None = None, theme: Theme = LIGHT) -> Figure:
    """`batch_timeline` with the colours of `theme`."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    columns = ("step", "training_version", "episode_id", "trace_id", "node", "start", "length")
    require(spans, *columns, "label", "version")
    runs = spans.filter(pl.col("length") > 0).with_columns(age())
    if runs["step"].n_unique() > 1:
        raise ValueError("spans of several steps: a timeline is of one batch")
    runs, every, traces = _rows_of(runs)
    rows = int(runs["row"].n_unique())
    figure, ax = one_panel(ax, theme, height=min(6.0, 1.2 + 0.11 * max(rows, 6)))
    step = runs["step"].item(0) if runs.height else None
    shown = f"{rows} of its {traces:,} traces" if every > 1 else f"its {traces:,} traces"
    title(ax, theme, f"Batch {step}: who sampled the tokens of {shown}", pad=UNDER)
    ax.set_xlabel("sampled tokens of the trace, in order")
    ax.set_ylabel("trace")
    if not runs.height:
        say(ax, theme, "no sampled token")
        return figure

    shades = [theme.ramp[k] for k in range(_OLDEST + 1)]
    kinds: list[tuple[pl.Expr, dict[str, Any], str]] = [
        (pl.col("age") < 0, {"facecolor": theme.fault}, "newer than trained"),
        *(
            (pl.col("age") == k, {"facecolor": shades[k]}, _name_of(runs, k))
            for k in range(_OLDEST)
        ),
        (pl.col("age") >= _OLDEST, {"facecolor": shades[-1]}, f"age {_OLDEST} and above"),
        (
            pl.col("age").is_null() & (pl.col("label") == DEFAULT_LABEL),
            {"facecolor": theme.peak},
            "default",
        ),
        (
            pl.col("age").is_null() & (pl.col("label") != DEFAULT_LABEL),
            {"facecolor": theme.in_queue},
            "no training version",
        ),
        (
            pl.col("label").is_null(),
            {"facecolor": theme.empty, "edgecolor": theme.muted, "hatch": "////", "lw": 0},
            "no label",
        ),
    ]
    handles = []
    for condition, style, name in kinds:
        part = runs.filter(condition)
        if part.is_empty():
            continue
        left, right, row = part.select("from", "right", "row").to_numpy().T
        low, high = row - 0.42, row + 0.42
        corners = np.stack([left, low, left, high, right, high, right, low], axis=1)
        ax.add_collection(PolyCollection(list(corners.reshape(-1, 4, 2)), **{"lw": 0, **style}))
        handles.append(Patch(label=name, **{"lw": 0, **style}))
    ax.set_xlim(0, runs.select(pl.col("right").max()).item())
    ax.set_ylim(rows - 0.5, -0.5)
    ax.set_yticks([])
    legend(ax, theme, "under the title", handles)
    return figure


def _rows_of(runs: pl.DataFrame) -> tuple[pl.DataFrame, int, int]:
    """Runs with `row`, `left`, `from` and `right`; one trace in how many is there, and of all."""
    key = ["episode_id", "trace_id"]
    runs = runs.sort(*key, "node", "start", maintain_order=True).with_columns(
        right=pl.col("length").cum_sum().over(key)
    )
    runs = runs.with_columns(left=pl.col("right") - pl.col("length"))
    # A gap before each completion but the first, as wide as a hair; half of a run stays in sight.
    gap = pl.min_horizontal(pl.col("right").max() / 300, pl.col("length") / 2)
    later = (pl.col("start") == 0) & (pl.col("left") > 0)
    begin = pl.col("left") + gap
    runs = runs.with_columns(pl.when(later).then(begin).otherwise("left").alias("from"))
    traces = (
        runs.group_by(key, maintain_order=True)
        .agg(pl.col("version").drop_nulls().first(), pl.col("right").max())
        .sort("version", "right", descending=[False, True], nulls_last=True, maintain_order=True)
    )
    most = min(MOST_TRACES, max(1, MOST_RUNS * traces.height // max(1, runs.height)))
    every = max(1, -(-traces.height // most))
    shown = traces.gather_every(every).with_row_index("row").select(*key, "row")
    rows = shown.with_columns(pl.col("row").cast(pl.Int64))
    return runs.join(rows, on=key, maintain_order="left"), every, traces.height


def _name_of(runs: pl.DataFrame, k: int) -> str:
    versions = runs.filter(pl.col("age") == k)["version"].unique()
    return f"v{signed(versions.item())} (age {k})" if len(versions) == 1 else f"age {k}"


# --- places in a completion ---------------------------------------------------------------------


def age_by_index(counts: pl.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Token age by the place of the token in its completion.

    `counts` is what `age_counts(spans, by=["index_bin"])` returns; further group columns are summed
    over. The mean is a line, the band reaches from p50 to p95.

    Returns the figure. Raises `ValueError` when a column is missing.

    >>> import traceage as ta
    >>> counts = ta.age_counts(ta.scan_spans("data/real-dump"), by=["index_bin"])
    >>> age_by_index(counts).axes[0].get_xlabel()
    'place in the completion (tokens)'
    """
    return draw_by_index(counts, ax=ax)


def draw_by_index(counts: pl.DataFrame, *, ax: Axes | None = None, theme: Theme = LIGHT) -> Figure:
    """`age_by_index` with the colours of `theme`."""
    from matplotlib.ticker import MaxNLocator

    require(counts, "index_bin", "age", "tokens")
    figure, ax = one_panel(ax, theme, height=2.6)
    title(ax, theme, "Token age by place in the completion")
    ax.set_xlabel("place in the completion (tokens)")
    ax.set_ylabel("age (policy versions)")
    ages = merge_counts(counts.select("index_bin", "age", "tokens"))
    bins = age_figures(ages, ["index_bin"]).sort("index_bin")
    mean, p50, p95 = (bins[f"off_policy/token/{figure}"] for figure in ("mean", "p50", "p95"))
    if bins.is_empty():
        say(ax, theme, "no token with an age")
        return figure
    edges = np.arange(bins.height + 1) - 0.5
    ax.stairs(
        p95.to_numpy(),
        edges,
        baseline=p50.to_numpy(),
        fill=True,
        color=theme.age_band,
        lw=1,
        label="p50 to p95",
        zorder=2,
    )
    ax.plot(
        range(bins.height), mean, color=theme.age, marker="o", ms=4, lw=1.8, label="mean",
        zorder=3,
    )  # fmt: skip
    names = [bin_name(first) for first in bins["index_bin"]]
    every = -(-len(names) // 9)
    ax.set_xticks(range(0, len(names), every), names[::every])
    span = value_range(pl.concat([figure.cast(pl.Float64) for figure in (mean, p50, p95)]))
    assert span is not None
    if span[0] < 0:
        ax.axhline(0, color=theme.fault, lw=1.1, ls=(0, (4, 2)), label="below: labelling fault")
    ax.set_ylim(min(0.0, span[0] * 1.1), max(1.0, span[1] * 1.12))
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend(ax, theme)
    return figure


def bin_name(first: int) -> str:
    """A bin of `index_bin` or `completion_bin` as it is named.

    >>> bin_name(0), bin_name(512), bin_name(4096)
    ('0\u201331', '512\u20131023', '4k\u20138k')
    """
    last = FIRST_BIN - 1 if first == 0 else 2 * first - 1

    def short(number: int) -> str:
        return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else f"{number}"

    return f"{short(first)}\u2013{short(last + 1) if last > 1024 else last}"
