"""How old the tokens of each step are: age counts and metrics -> matplotlib figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from traceage.figures.style import (
    LIGHT,
    Theme,
    by_columns,
    contrast,
    legend,
    new_figure,
    percent,
    plain,
    require,
    say,
    signed,
    step_ticks,
    style_axes,
    title,
    value_range,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_MAX_COLUMNS = 500  # heat map: more steps than this share a column
_MAX_SINGLE_ROWS = 32  # heat map: more ages than this share a row
_MAX_GROUPS = 8  # lines of a figure by step and group


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

    require(counts, "step", "age", "tokens")
    grid = _grid(counts, steps)
    if ax is None:
        rows = len(grid.edges) - 1 if grid else 4
        figure = new_figure(theme, height=min(4.4, 1.35 + 0.26 * max(rows, 4)))
        ax = figure.add_subplot()
    figure = ax.get_figure(root=True)  # type: ignore[assignment]
    style_axes(ax, theme)
    title(ax, theme, "Distribution of token age")
    ax.set_xlabel("training step")
    ax.set_ylabel("age (policy versions)")
    if grid is None:
        ax.set_xticks([])
        say(ax, theme, "no token with an age")
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
    step_ticks(ax)

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
    ax.set_yticks(shown, [age_range(*grid.edges[row : row + 2]) for row in shown])
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
        title(ax, theme, ax.get_title(loc="left"), pad=19)
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
            color=contrast(ramp, float(norm(share))),
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
    require(metrics, "step")
    groups = [name for name in by_columns(metrics) if name != "step"]
    frame = metrics.filter(pl.col("step").is_not_null())
    if not groups and frame["step"].is_duplicated().any():
        raise ValueError("more than one row a step and no group column before 'episodes'")
    coverage = value_range(frame["coverage"])
    partial = coverage is not None and coverage[0] < 1

    if ax is None:
        heights = [3.0, 2.6, 1.0] if partial else [3.0, 2.6]
        figure = new_figure(theme, height=0.4 + 0.72 * sum(heights))
        axes = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    else:
        axes = list(ax) if isinstance(ax, Sequence | np.ndarray) else [ax]
        figure = axes[0].get_figure(root=True)
    for panel in axes:
        style_axes(panel, theme)
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
    title(axes[0], theme, f"Token age{' (mean)' if groups else ''}{scope}{note}")
    if value_range(frame["off_policy/token/mean"]) is None:
        say(axes[0], theme, "no token with an age")
    if len(axes) > 1:
        axes[1].set_ylabel("staleness (policy versions)")
        title(axes[1], theme, f"Episode staleness{' (mean; dotted: in queue)' if groups else ''}")
        if value_range(frame["off_policy/mean"]) is None:
            say(axes[1], theme, "no episode says which policies were live")
    if len(axes) > 2:
        from matplotlib.ticker import PercentFormatter

        axes[2].set_ylim(0, 1.04)
        axes[2].set_yticks([0, 0.5, 1])
        axes[2].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[2].set_ylabel("coverage")
        title(axes[2], theme, "Coverage (labelled share of the sampled tokens)")

    span = value_range(frame["step"])
    for panel in axes:
        if span is None:
            panel.set_xticks([])
        else:
            panel.set_xlim(span[0] - unit / 2, span[1] + unit / 2)
            step_ticks(panel)
    for panel in axes[:1] if groups else axes[:2]:
        if panel.get_legend_handles_labels()[1] and _drawn(panel):
            legend(panel, theme, "beside" if groups else "right of the title")
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
    lows, highs, usual = (value_range(frame[columns[q]]) for q in ("min", "max", "p95"))
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
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: signed(round(value))))
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
        (", ".join("-" if value is None else plain(value) for value in key), part)
        for key, part in frame.partition_by(groups, as_dict=True, maintain_order=True).items()
    ]
    parts.sort(key=lambda part: (-int(part[1]["sampled_tokens"].sum()), part[0]))
    return sorted(parts[:_MAX_GROUPS], key=lambda part: part[0]), max(0, len(parts) - _MAX_GROUPS)


def _drawn(ax: Axes) -> bool:
    return any(np.isfinite(np.asarray(line.get_ydata(), float)).any() for line in ax.lines)


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


def _unit(steps: pl.Series) -> float:
    """The usual distance between one step and the next."""
    return float(median(steps.drop_nulls().unique().sort().diff()[1:].to_list() or [1]))


def _runs(indices: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Sorted indices -> half-open ranges of neighbours."""
    if len(indices):
        for part in np.split(indices, np.flatnonzero(np.diff(indices) > 1) + 1):
            yield int(part[0]), int(part[-1]) + 1


def age_range(start: int, stop: int) -> str:
    """The ages start .. stop - 1 as a row is named."""
    if stop - start == 1:
        return signed(start)
    dash = "\u2013" if start >= 0 else " to "
    return f"{signed(start)}{dash}{signed(stop - 1)}"
