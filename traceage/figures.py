"""Age counts and metrics -> matplotlib figures.

Nothing here keeps global state: every figure is a `matplotlib.figure.Figure`, and matplotlib is
imported when a figure is drawn, not when this module is.
"""

from __future__ import annotations

import html
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = ["age_heatmap", "staleness"]

_WIDTH = 7.2  # inches; 9 pt text then reads well from 600 to 900 px
_MAX_COLUMNS = 500  # heat map: more steps than this share a column
_MAX_SINGLE_ROWS = 32  # heat map: more ages than this share a row
_MAX_GROUPS = 8  # lines of a figure by step and group


@dataclass(frozen=True)
class Theme:
    """The colours of a figure. All hues are from colour-blind safe sets and differ in lightness."""

    background: str
    ink: str
    muted: str
    rule: str
    empty: str
    age: str
    age_band: str
    peak: str
    in_flight: str
    in_queue: str
    fault: str
    ramp: tuple[str, ...]
    fault_ramp: tuple[str, ...]
    lines: tuple[str, ...]


LIGHT = Theme(
    background="#ffffff",
    ink="#1f2430",
    muted="#5a6272",
    rule="#e3e6eb",
    empty="#eceef1",
    age="#0b5a93",
    age_band="#a9cde8",
    peak="#7d8797",
    in_flight="#5aa9d6",
    in_queue="#e8a33d",
    fault="#b8400b",
    ramp=("#d8e8f5", "#9dc6e3", "#4a96c9", "#1a64a0", "#082c58"),
    fault_ramp=("#fbdcc4", "#f2a673", "#dd6b2c", "#a83c08", "#6a2202"),
    lines=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#333a47", "#8c510a"),
)
DARK = Theme(
    background="#171a21",
    ink="#e6e9ef",
    muted="#a2abba",
    rule="#2c323d",
    empty="#242933",
    age="#7cc4f4",
    age_band="#2b4f6d",
    peak="#8a94a5",
    in_flight="#3f88b8",
    in_queue="#dc9838",
    fault="#ff9a5c",
    ramp=("#16324a", "#1f5880", "#2f86bd", "#79bfe9", "#e0f2ff"),
    fault_ramp=("#47250f", "#7f3f15", "#c2611f", "#f29a5e", "#ffe3cf"),
    lines=("#4aa8e0", "#f0793a", "#2fc497", "#e39cc6", "#e2bd45", "#a5dcff", "#cfd5df", "#cf9a5f"),
)


# --- public -------------------------------------------------------------------------------------


def age_heatmap(counts: pl.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Token age by training step as a heat map of token share.

    `counts` is what `age_counts` returns: `step`, `age` (policy versions) and `tokens`, one row
    for each age of a step; further group columns are summed over. Each column of the map is one
    step and sums to 1. Steps without an aged token are grey. Ages below 0 (a fault in the
    labelling) keep their own rows, in orange under a dashed line.

    Nothing is dropped: with more than 32 distinct ages, rows hold several ages, and with more
    than 500 steps, columns hold several steps. The axis labels then say so.

    Draws into `ax` if one is given. Returns the figure. Raises `ValueError` when `counts` has no
    `step`, `age` or `tokens` column.

    >>> import polars as pl
    >>> counts = pl.DataFrame({"step": [1, 2, 2], "age": [0, 0, 1], "tokens": [400, 300, 100]})
    >>> figure = age_heatmap(counts)
    >>> figure.axes[0].get_images()[0].get_array().tolist()  # rows: age 0, age 1
    [[1.0, 0.75], [None, 0.25]]
    """
    return draw_heatmap(counts, ax=ax)


def staleness(metrics: pl.DataFrame, *, ax: Axes | Sequence[Axes] | None = None) -> Figure:
    """Token age and episode staleness over the training steps.

    `metrics` is what `off_policy_metrics` returns for `by=["step"]` or `by=["step", ...]`.

    - Token age (policy versions): the mean as a line, the band from p50 to p95, and the maximum.
      A minimum below 0, a fault in the labelling, is marked.
    - Episode staleness (policy versions): the mean, split into the part that passed while the
      episode was generated (in flight) and the part that passed while it waited (in queue).
    - Coverage (share of the sampled tokens that carry a version), only when it is below 1
      somewhere.

    With more `by` columns than `step`, each group is a line of means, up to the eight groups with
    the most sampled tokens; the title says when there are more. Null values, and steps that are
    not there, are gaps.

    `ax` can be one axes (token age only) or two or three (token age, episode staleness, coverage).
    Returns the figure. Raises `ValueError` when `metrics` has no `step` column.

    >>> import polars as pl
    >>> metrics = pl.DataFrame({
    ...     "step": [1, 2], "sampled_tokens": [400, 400], "coverage": [1.0, 1.0],
    ...     "off_policy/token/mean": [0.0, 0.25], "off_policy/token/min": [0, 0],
    ...     "off_policy/token/p50": [0, 0], "off_policy/token/p95": [0, 1],
    ...     "off_policy/token/max": [0, 1], "off_policy/mean": [0.0, 1.0],
    ...     "off_policy/in_flight/mean": [0.0, 0.75], "off_policy/in_queue/mean": [0.0, 0.25],
    ... })
    >>> figure = staleness(metrics)
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['age (policy versions)', 'staleness (policy versions)']
    >>> [line.get_ydata().tolist() for line in figure.axes[0].lines if line.get_label() == "mean"]
    [[0.0, 0.25]]
    """
    return draw_staleness(metrics, ax=ax)


# --- heat map -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """Token shares by age row and step column, with what the rows and columns stand for."""

    shares: NDArray[np.float64]  # rows x columns; a column sums to 1, or is all 0
    first_step: float  # the centre of column 0
    pitch: float  # steps a column
    edges: list[int]  # row i holds the ages edges[i] .. edges[i + 1] - 1
    negative_tokens: int
    tokens: int


def age_row_edges(low: int, high: int) -> list[int]:
    """Edges of the age rows that cover `low` to `high`: row i holds edges[i] .. edges[i + 1] - 1.

    One age a row as long as 32 rows do. Beyond that, four rows an octave from 16 up (16-19, 20-23,
    24-27, 28-31, 32-39, ...), likewise below -15, so that a long tail costs few rows and the young
    ages stay apart; or, where all ages are above 15, rows of one width. No row straddles 0.

    >>> age_row_edges(0, 3)
    [0, 1, 2, 3, 4]
    >>> age_row_edges(-1, 40)[-7:]
    [16, 20, 24, 28, 32, 40, 48]
    """
    if low > -_MAX_SINGLE_ROWS and high < _MAX_SINGLE_ROWS:
        low, high = min(low, 0), max(high, 0)  # age 0 is the baseline: show it in any case
    if high - low < _MAX_SINGLE_ROWS:
        return list(range(low, high + 2))
    if low > 15 or high < -15:
        width = -(-(high - low + 1) // _MAX_SINGLE_ROWS)
        return list(range(low // width * width, high + width + 1, width))

    negative = [1 - edge for edge in _ladder(-low) if edge] if low < 0 else []
    return sorted({*negative, *_ladder(max(high, -1))})


def _ladder(high: int) -> list[int]:
    """Row edges from 0 up to the first one above `high`: ones to 16, then four an octave."""
    edges = [0]
    while edges[-1] <= high:
        edge = edges[-1]
        edges.append(edge + (1 if edge < 16 else 1 << (edge.bit_length() - 3)))
    return edges


def _grid(counts: pl.DataFrame, steps: pl.Series | None) -> _Grid | None:
    """The heat map's numbers, over the range of `steps` if given; None when there is no token."""
    cells = (
        counts.lazy()
        .filter(pl.col("tokens") > 0, pl.col("step").is_not_null())
        .group_by(pl.col("step").cast(pl.Int64), pl.col("age").cast(pl.Int64))
        .agg(pl.col("tokens").sum())
        .sort("step", "age")
        .collect()
    )
    if cells.is_empty():
        return None
    every = cells["step"] if steps is None else pl.concat([cells["step"], steps.cast(pl.Int64)])
    every = every.drop_nulls().unique().sort()
    # Evaluations may come every 50 steps: a column is then 50 steps wide, not 49 empty ones.
    pitch = max(1, round(median(every.diff()[1:].to_list() or [1])))
    first, last = int(every[0]), int(every[-1])
    pitch = max(pitch, -(-(last - first + 1) // _MAX_COLUMNS))
    columns = (last - first + pitch // 2) // pitch + 1
    ages = cells["age"].to_numpy()
    edges = age_row_edges(int(ages.min()), int(ages.max()))
    tokens = np.zeros((len(edges) - 1, columns))
    row = np.searchsorted(edges, ages, side="right") - 1
    column = (cells["step"].to_numpy() - first + pitch // 2) // pitch
    np.add.at(tokens, (row, column), cells["tokens"].to_numpy())
    total = tokens.sum(axis=0)
    return _Grid(
        shares=np.divide(tokens, total, out=np.zeros_like(tokens), where=total > 0),
        first_step=first,
        pitch=pitch,
        edges=edges,
        negative_tokens=int(cells.filter(pl.col("age") < 0)["tokens"].sum()),
        tokens=int(cells["tokens"].sum()),
    )


def draw_heatmap(
    counts: pl.DataFrame,
    *,
    ax: Axes | None = None,
    steps: pl.Series | None = None,
    theme: Theme = LIGHT,
) -> Figure:
    """`age_heatmap` with the colours of `theme`; `steps` widens the map to steps without tokens."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.ticker import PercentFormatter

    _require(counts, "step", "age", "tokens")
    grid = _grid(counts, steps)
    if ax is None:
        rows = len(grid.edges) - 1 if grid else 4
        figure = _figure(theme, height=min(4.4, 1.35 + 0.26 * max(rows, 4)))
        ax = figure.add_subplot()
    figure = ax.get_figure(root=True)  # type: ignore[assignment]
    _style(ax, theme)
    _title(ax, theme, "Distribution of token age")
    ax.set_xlabel("training step")
    ax.set_ylabel("age (policy versions)")
    if grid is None:
        ax.set_xticks([])
        _say(ax, theme, "no token with an age")
        return figure

    rows, columns = grid.shares.shape
    left = grid.first_step - grid.pitch / 2
    extent = (left, left + columns * grid.pitch, -0.5, rows - 0.5)
    zero_row = min(int(np.searchsorted(grid.edges, 0)), rows)
    peak = float(grid.shares.max())
    full = next(limit for limit in (0.05, 0.1, 0.2, 0.5, 1.0) if peak <= limit)
    norm = PowerNorm(0.5, vmin=0, vmax=full)  # the square root keeps a thin old tail in sight
    image = None
    for ramp, below in ((theme.ramp, False), (theme.fault_ramp, True)):
        if below and zero_row == 0:
            continue
        hidden = np.broadcast_to((np.arange(rows) < zero_row)[:, None] != below, grid.shares.shape)
        drawn = ax.imshow(
            np.ma.masked_where(hidden | (grid.shares == 0), grid.shares),
            cmap=LinearSegmentedColormap.from_list("share", ramp, N=64),
            norm=norm,
            extent=extent,
            origin="lower",
            aspect="auto",
            interpolation="none",
            zorder=2,
        )
        image = image or drawn
    assert image is not None

    bare = np.flatnonzero(grid.shares.sum(axis=0) == 0)
    for start, stop in _runs(bare):
        ax.axvspan(left + start * grid.pitch, left + stop * grid.pitch, color=theme.empty, lw=0)
    unit = f"training step (a column is {grid.pitch} steps)" if grid.pitch > 1 else "training step"
    ax.set_xlabel(f"{unit}; grey: no token with an age" if len(bare) else unit)
    ax.set_xlim(extent[0], extent[1])
    _step_ticks(ax)

    _age_ticks(ax, grid, theme, zero_row)
    if columns <= 14 and rows <= 12:
        _write_shares(ax, grid, image.norm, theme, zero_row)
    bar = figure.colorbar(image, ax=ax, pad=0.015, aspect=28, fraction=0.05)
    bar.set_label("share of the step's labelled tokens", color=theme.muted, fontsize=8)
    bar.set_ticks([t for t in (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0) if t <= full])
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    bar.ax.tick_params(labelsize=7.5, colors=theme.muted, length=2, which="both")
    bar.outline.set_visible(False)
    bar.solids.set_edgecolor("face")  # type: ignore[union-attr]  # no hairlines in SVG
    return figure


def _age_ticks(ax: Axes, grid: _Grid, theme: Theme, zero_row: int) -> None:
    """Name the rows, and set the rows below age 0 apart."""
    rows = len(grid.edges) - 1
    widths = np.diff(grid.edges)
    every = max(1, math.ceil(rows / 14))
    # Count from row 0 so that age 0 always has its name.
    shown = [row for row in range(rows) if (row - zero_row) % every == 0]
    ax.set_yticks(shown, [_age_range(*grid.edges[row : row + 2]) for row in shown])
    ax.set_ylim(-0.5, rows - 0.5)
    if widths.max() > 1:
        same = widths.min() == widths.max()
        how = f"rows of {widths[0]}" if same else "several a row from 16 up"
        if zero_row and not same:
            how = "several a row from \u00b116 out"
        ax.set_ylabel(f"age (policy versions; {how})")
    if grid.negative_tokens:
        ax.axhline(zero_row - 0.5, color=theme.fault, lw=1.1, ls=(0, (4, 2)), zorder=4)
        for row, tick in zip(shown, ax.get_yticklabels(), strict=True):
            if row < zero_row:
                tick.set_color(theme.fault)
        share = grid.negative_tokens / grid.tokens
        _title(ax, theme, ax.get_title(loc="left"), pad=19)
        ax.annotate(
            f"Below the dashed line: {grid.negative_tokens:,} of {grid.tokens:,} tokens"
            f" ({percent(share)}) have a negative age, a fault in the labelling",
            (0, 1),
            (0, 5),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=8,
            color=theme.fault,
        )


def _write_shares(ax: Axes, grid: _Grid, norm: Any, theme: Theme, zero_row: int) -> None:
    """In a small map, the share in each cell."""
    for row, column in zip(*np.nonzero(grid.shares), strict=True):
        share = float(grid.shares[row, column])
        ramp = theme.fault_ramp if row < zero_row else theme.ramp
        ax.text(
            grid.first_step + column * grid.pitch,
            row,
            percent(share, decimals=0),
            ha="center",
            va="center",
            fontsize=7.5,
            color=_contrast(ramp, float(norm(share))),
            zorder=3,
        )


# --- staleness ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    """The steps laid out on an axis: one cell a step, and an empty cell where steps are missing."""

    edges: list[float]
    rows: list[int | None]  # the row of the frame in each cell; None: no such step

    @property
    def centres(self) -> list[float]:
        return [(a + b) / 2 for a, b in itertools.pairwise(self.edges)]

    def values(self, column: pl.Series) -> NDArray[np.float64]:
        """A column laid out on the cells; null and missing are NaN."""
        data = column.cast(pl.Float64).to_list()
        taken = (None if row is None else data[row] for row in self.rows)
        return np.array([math.nan if value is None else value for value in taken])


def _axis(steps: Sequence[int], unit: float) -> _Axis:
    edges = [steps[0] - unit / 2]
    rows: list[int | None] = [0]
    for row, (before, step) in enumerate(itertools.pairwise(steps), start=1):
        if step - before > 1.5 * unit:
            edges += [before + unit / 2, step - unit / 2]
            rows += [None, row]
        else:
            edges.append((before + step) / 2)
            rows.append(row)
    return _Axis([*edges, steps[-1] + unit / 2], rows)


def draw_staleness(
    metrics: pl.DataFrame, *, ax: Axes | Sequence[Axes] | None = None, theme: Theme = LIGHT
) -> Figure:
    """`staleness` with the colours of `theme`."""
    _require(metrics, "step")
    groups = [name for name in by_columns(metrics) if name != "step"]
    frame = metrics.filter(pl.col("step").is_not_null())
    if not groups and frame["step"].is_duplicated().any():
        raise ValueError("more than one row a step and no group column before 'episodes'")
    coverage = _range(frame["coverage"])
    partial = coverage is not None and coverage[0] < 1

    if ax is None:
        heights = [3.0, 2.6, 1.0] if partial else [3.0, 2.6]
        figure = _figure(theme, height=0.4 + 0.72 * sum(heights))
        axes = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    else:
        axes = list(ax) if isinstance(ax, Sequence | np.ndarray) else [ax]
        figure = axes[0].get_figure(root=True)
    for panel in axes:
        _style(panel, theme)
        panel.grid(axis="y", color=theme.rule, lw=0.7)
        panel.set_axisbelow(True)
    axes[-1].set_xlabel("training step")

    unit = _unit(frame["step"])
    if groups:
        parts, left_out = _largest_groups(frame, groups)
        for index, (name, part) in enumerate(parts):
            _draw_group(axes, part, name, unit, theme, index)
        scope = f", {len(parts)} largest of {len(parts) + left_out} groups" if left_out else ""
    else:
        if not frame.is_empty():
            _draw_token_age(axes[0], frame.sort("step"), unit, theme)
            if len(axes) > 1:
                _draw_episodes(axes[1], frame.sort("step"), unit, theme)
            if len(axes) > 2:
                _draw_coverage(axes[2], frame.sort("step"), unit, theme)
        scope = ""

    axes[0].set_ylabel("age (policy versions)")
    note = ""
    if coverage is not None and partial and len(axes) < 3:
        low, high = map(percent, coverage)
        note = f", coverage {low}" if low == high else f", coverage {low} to {high}"
    _title(axes[0], theme, f"Token age{' (mean)' if groups else ''}{scope}{note}")
    if _range(frame["off_policy/token/mean"]) is None:
        _say(axes[0], theme, "no token with an age")
    if len(axes) > 1:
        axes[1].set_ylabel("staleness (policy versions)")
        _title(axes[1], theme, f"Episode staleness{' (mean; dotted: in queue)' if groups else ''}")
        if _range(frame["off_policy/mean"]) is None:
            _say(axes[1], theme, "no episode says which policies were live")
    if len(axes) > 2:
        from matplotlib.ticker import PercentFormatter

        axes[2].set_ylim(0, 1.04)
        axes[2].set_yticks([0, 0.5, 1])
        axes[2].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[2].set_ylabel("coverage")
        _title(axes[2], theme, "Coverage (labelled share of the sampled tokens)")

    span = _range(frame["step"])
    for panel in axes:
        if span is None:
            panel.set_xticks([])
        else:
            panel.set_xlim(span[0] - unit / 2, span[1] + unit / 2)
            _step_ticks(panel)
    for panel in axes[:1] if groups else axes[:2]:
        if panel.get_legend_handles_labels()[1] and _drawn(panel):
            _legend(panel, theme, wide=bool(groups))
    figure.align_ylabels(axes)
    return figure


def _draw_token_age(ax: Axes, frame: pl.DataFrame, unit: float, theme: Theme) -> None:
    axis = _axis(frame["step"].to_list(), unit)
    columns = {q: f"off_policy/token/{q}" for q in ("mean", "min", "p50", "p95", "max")}
    values = {q: axis.values(frame[name]) for q, name in columns.items()}
    ax.stairs(
        values["p95"],
        axis.edges,
        baseline=values["p50"],
        fill=True,
        color=theme.age_band,
        lw=1,  # so that a band of no height is a line
        label="p50 to p95",
        zorder=2,
    )
    ax.stairs(
        values["max"], axis.edges, baseline=None, color=theme.peak, lw=1, label="max", zorder=3
    )
    _line(ax, axis, values["mean"], theme.age, "mean")
    lows, highs, usual = (_range(frame[columns[q]]) for q in ("min", "max", "p95"))
    if lows is None or highs is None or usual is None:
        return
    if lows[0] < 0:
        ax.axhspan(*_below_zero(lows[0]), color=theme.fault, alpha=0.09, lw=0, zorder=1)
        _mark_negative(ax, axis, values["min"], theme)
    _age_limits(ax, lows[0], highs[1], max(2.0, usual[1]))


def _below_zero(low: float) -> tuple[float, float]:
    return low * 1.15 - 0.3, 0.0


def _mark_negative(ax: Axes, axis: _Axis, minimum: NDArray[np.float64], theme: Theme) -> None:
    """Mark the steps whose youngest token is newer than the policy that its batch trained."""
    label = "min below 0: labelling fault"
    ax.axhline(0, color=theme.fault, lw=1.1, ls=(0, (4, 2)), zorder=3)
    ax.plot(
        axis.centres,
        np.where(minimum < 0, minimum, np.nan),
        color=theme.fault,
        marker="v",
        ms=4.5,
        ls="none",
        label="_" if label in ax.get_legend_handles_labels()[1] else label,
        zorder=6,
    )


def _age_limits(ax: Axes, low: float, top: float, usual: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    if top > 8 * usual:
        # One old straggler must not flatten the rest: linear to `usual`, logarithmic above.
        ax.set_yscale("symlog", linthresh=usual, linscale=1.5)
        above = [t * 10.0**k for k in range(10) for t in (1, 3) if usual * 1.6 < t * 10**k <= top]
        marks = sorted({low, 0.0, usual, *above})
        ax.yaxis.set_major_locator(FixedLocator(marks))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _signed(round(value))))
        ax.annotate(
            f"log scale above {usual:g}",
            (0.005, 0.97),
            xycoords="axes fraction",
            va="top",
            fontsize=7.5,
            color=ax.yaxis.get_label().get_color(),
        )
    else:
        ax.yaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    ax.set_ylim(_below_zero(low)[0] if low < 0 else 0, max(1.0, top) * 1.06)


def _draw_episodes(ax: Axes, frame: pl.DataFrame, unit: float, theme: Theme) -> None:
    axis = _axis(frame["step"].to_list(), unit)
    flight = axis.values(frame["off_policy/in_flight/mean"])
    queue = axis.values(frame["off_policy/in_queue/mean"])
    ax.stairs(flight, axis.edges, fill=True, color=theme.in_flight, lw=0, label="in flight")
    ax.stairs(
        flight + queue,
        axis.edges,
        baseline=flight,
        fill=True,
        color=theme.in_queue,
        lw=0,
        label="in queue",
    )
    mean = axis.values(frame["off_policy/mean"])
    _line(ax, axis, mean, theme.ink, "mean", width=1.2)
    _from_zero(ax)


def _draw_coverage(ax: Axes, frame: pl.DataFrame, unit: float, theme: Theme) -> None:
    axis = _axis(frame["step"].to_list(), unit)
    values = axis.values(frame["coverage"])
    ax.stairs(values, axis.edges, fill=True, color=theme.empty, lw=0)
    ax.stairs(values, axis.edges, baseline=None, color=theme.muted, lw=1, label="coverage")


def _draw_group(
    axes: Sequence[Axes], part: pl.DataFrame, name: str, unit: float, theme: Theme, index: int
) -> None:
    """One group's line in each panel."""
    part = part.sort("step")
    axis = _axis(part["step"].to_list(), unit)
    colour = theme.lines[index % len(theme.lines)]
    name = name if len(name) <= 28 else f"{name[:27]}\u2026"
    name = f" {name}" if name.startswith("_") else name  # matplotlib keeps `_...` out of legends
    age = axis.values(part["off_policy/token/mean"])
    _line(axes[0], axis, age, colour, name, width=1.5, index=index)
    minimum = axis.values(part["off_policy/token/min"])
    if np.nanmin(minimum, initial=0) < 0:
        _mark_negative(axes[0], axis, minimum, theme)
    _from_zero(axes[0])
    if len(axes) > 1:
        mean = axis.values(part["off_policy/mean"])
        _line(axes[1], axis, mean, colour, name, width=1.5, index=index)
        queue = axis.values(part["off_policy/in_queue/mean"])
        axes[1].plot(axis.centres, queue, color=colour, lw=1, ls=":", label="_in queue")
        _from_zero(axes[1])
    if len(axes) > 2:
        _line(axes[2], axis, axis.values(part["coverage"]), colour, name, width=1.2, index=index)


def _from_zero(ax: Axes) -> None:
    """Fit the axis to what was drawn, from 0 (or below, where the data goes there)."""
    low, high = ax.dataLim.intervaly
    if low <= high:
        ax.set_ylim(min(1.1 * low, 0.0), max(1.0, 1.08 * high))


def _largest_groups(
    frame: pl.DataFrame, groups: list[str]
) -> tuple[list[tuple[str, pl.DataFrame]], int]:
    """The groups with the most sampled tokens, in the order of their names, and how many more."""
    parts = [
        (", ".join("-" if value is None else str(value) for value in key), part)
        for key, part in frame.partition_by(groups, as_dict=True, maintain_order=True).items()
    ]
    parts.sort(key=lambda part: (-int(part[1]["sampled_tokens"].sum()), part[0]))
    return sorted(parts[:_MAX_GROUPS], key=lambda part: part[0]), max(0, len(parts) - _MAX_GROUPS)


# --- SVG for a page -----------------------------------------------------------------------------


def inline_svg(draw: Callable[[Theme], Figure], theme: Theme, *, key: str, label: str) -> str:
    """A figure as an `<svg>` element to stand in an HTML page; equal input gives equal bytes.

    `draw` makes the figure in the colours of `theme`. `label` is the text alternative. `key` keeps
    the ids of several figures on one page apart. Text stays text, in the font of the page. The
    element names no address, not even a namespace's: inside HTML it needs none.
    """
    import matplotlib
    import matplotlib.style

    buffer = io.StringIO()
    # A style the caller has set must not leak into the page.
    with matplotlib.style.context("default"), matplotlib.rc_context(_SVG_SETTINGS):
        draw(theme).savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    body = body.replace("xlink:href=", "href=")
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', body))

    def own_id(match: re.Match[str]) -> str:
        return f' id="{key}-{match[1]}"' if match[1] in used else ""

    body = re.sub(r' id="([^"]*)"', own_id, body)
    body = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg {box[0]} role="img" aria-label="{html.escape(label)}">{body}'


_SVG_SETTINGS: Any = {
    "svg.hashsalt": "traceage",
    "svg.fonttype": "none",
    "svg.image_inline": True,
    "path.simplify": False,  # every value that goes in comes out
}


# --- common -------------------------------------------------------------------------------------


def by_columns(metrics: pl.DataFrame) -> list[str]:
    """The columns that a metrics frame is grouped by: those before `episodes`.

    >>> import polars as pl
    >>> by_columns(pl.DataFrame({"step": [1], "env": ["math"], "training_version": [0],
    ...                          "episodes": [8]}))
    ['step', 'env']
    """
    names = metrics.columns
    before = names[: names.index("episodes")] if "episodes" in names else ["step"]
    return [name for name in before if name != "training_version" or "step" not in before]


def _require(frame: pl.DataFrame, *names: str) -> None:
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise ValueError(
            f"no column {', '.join(map(repr, missing))} to draw; the frame has "
            f"{', '.join(map(repr, frame.columns)) or 'no columns'} (group by 'step')"
        )


def _figure(theme: Theme, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor=theme.background)
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06, hspace=0.03)  # type: ignore[union-attr, call-arg]
    return figure


def _style(ax: Axes, theme: Theme) -> None:
    ax.set_facecolor("none")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(theme.muted)
    ax.spines["bottom"].set_zorder(5)
    ax.tick_params(colors=theme.muted, labelsize=8, length=3)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.label.set(color=theme.ink, fontsize=8.5)
    ax.yaxis.label.set(color=theme.ink, fontsize=8.5)


def _title(ax: Axes, theme: Theme, text: str, pad: float = 6) -> None:
    ax.set_title(text, loc="left", fontsize=9, color=theme.ink, fontweight="bold", pad=pad)


def _say(ax: Axes, theme: Theme, text: str) -> None:
    """Words where there is nothing to draw."""
    ax.text(
        0.5,
        0.5,
        text,
        transform=ax.transAxes,
        ha="center",
        va="center",
        fontsize=9,
        color=theme.muted,
    )
    ax.set_yticks([])


def _drawn(ax: Axes) -> bool:
    return any(np.isfinite(np.asarray(line.get_ydata(), float)).any() for line in ax.lines)


def _range(column: pl.Series) -> tuple[float, float] | None:
    """The least and the greatest value; None when there is none."""
    data = column.drop_nulls().cast(pl.Float64).to_numpy()
    return (float(data.min()), float(data.max())) if len(data) else None


def _line(
    ax: Axes,
    axis: _Axis,
    values: NDArray[np.float64],
    colour: str,
    label: str,
    *,
    width: float = 1.8,
    index: int = 0,
) -> None:
    """A line with gaps at NaN. A value between two gaps has no line to stand on: it gets a dot."""
    there = np.concatenate([[False], ~np.isnan(values), [False]])
    alone = np.flatnonzero(there[1:-1] & ~there[:-2] & ~there[2:])
    few = len(values) <= 40
    ax.plot(
        axis.centres,
        values,
        color=colour,
        lw=width if len(values) <= 120 else 0.6 * width,
        ls=("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))[index // 2 % 4] if index else "-",
        marker="osD^vPX*"[index % 8],
        ms=3.5,
        markevery=None if few else [int(i) for i in alone],
        label=label,
        zorder=5,
    )


def _legend(ax: Axes, theme: Theme, *, wide: bool) -> None:
    place: dict[str, Any] = (
        {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        if wide
        else {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 4}
    )
    legend = ax.legend(
        **place,
        frameon=False,
        fontsize=8,
        labelcolor=theme.ink,
        handlelength=1.6,
        columnspacing=1.2,
        borderaxespad=0.2 if not wide else 0.5,
        borderpad=0.1,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a `$` in the name of a group is a `$`


def _step_ticks(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _unit(steps: pl.Series) -> float:
    """The usual distance between one step and the next."""
    return float(median(steps.drop_nulls().unique().sort().diff()[1:].to_list() or [1]))


def _runs(indices: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Sorted indices -> half-open ranges of neighbours."""
    if len(indices):
        for part in np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1):
            yield int(part[0]), int(part[-1]) + 1


def _contrast(ramp: Sequence[str], value: float) -> str:
    """Black or white, whichever reads better on the ramp's colour at `value` (WCAG luminance)."""
    from matplotlib.colors import LinearSegmentedColormap

    parts = LinearSegmentedColormap.from_list("share", ramp, N=64)(value)[:3]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000000"


def _signed(value: int) -> str:
    return str(value).replace("-", "\u2212")


def _age_range(start: int, stop: int) -> str:
    """The ages start .. stop - 1 as a row is named."""
    if stop - start == 1:
        return _signed(start)
    dash = "\u2013" if start >= 0 else " to "
    return f"{_signed(start)}{dash}{_signed(stop - 1)}"


def percent(share: float, decimals: int = 1) -> str:
    """A share as per cent; what is neither 0 nor 1 never reads as 0% or 100%.

    >>> percent(0.25), percent(1.0), percent(0.99999), percent(0.00001)
    ('25.0%', '100%', '>99.9%', '<0.1%')
    """
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    text = f"{share:.{decimals}%}"
    least = 10**-decimals
    if float(text[:-1]) == 0:
        return f"<{least:.{decimals}f}%"
    if float(text[:-1]) == 100 and share < 1:
        return f">{100 - least:.{decimals}f}%"
    return text
