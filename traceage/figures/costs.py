"""What staleness does, and what a limit on it would cost: tables -> matplotlib figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from traceage.figures.style import (
    LIGHT,
    UNDER,
    Theme,
    legend,
    new_figure,
    one_panel,
    percent,
    require,
    say,
    signed,
    style_axes,
    title,
)
from traceage.thresholds import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["masking_curves", "mismatch_curve"]


def mismatch_curve(table: pl.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Mismatch KL by token age, with intervals.

    `table` is what `mismatch_by_age` returns without further groups. The axis of the KL is
    logarithmic where it spans more than a decade. Under each age stands the share of the tokens.
    A dashed line is the floor that the rounding of the stored logprobs allows, where it is in
    sight.

    Returns the figure. Raises `ValueError` when a column is missing, or for several rows an age.

    >>> import traceage as ta
    >>> figure = mismatch_curve(ta.mismatch_by_age("data/real-dump"))
    >>> figure.axes[0].get_ylabel()
    'mismatch KL (nats a token)'
    """
    return draw_mismatch(table, ax=ax)


def draw_mismatch(table: pl.DataFrame, *, ax: Axes | None = None, theme: Theme = LIGHT) -> Figure:
    """`mismatch_curve` with the colours of `theme`."""
    bounds = ("mismatch_kl_low", "mismatch_kl_high")
    require(table, "age", "tokens", "mismatch_kl", *bounds, "kl_floor")
    rows = table.filter(pl.col("age").is_not_null(), pl.col("tokens") > 0).sort("age")
    if rows["age"].is_duplicated().any():
        raise ValueError("more than one row an age: draw one group at a time")
    figure, ax = one_panel(ax, theme, height=2.9)
    title(ax, theme, "Mismatch KL by token age")
    ax.set_xlabel("age (policy versions); below it, the share of the tokens")
    ax.set_ylabel("mismatch KL (nats a token)")
    if rows.is_empty():
        say(ax, theme, "no token has both logprobs and an age")
        return figure

    at = np.arange(rows.height)
    kl = rows["mismatch_kl"].to_numpy()
    low, high = (rows[name].fill_null(rows["mismatch_kl"]).to_numpy() for name in bounds)
    positive = kl[kl > 0]
    log = len(positive) == len(kl) and positive.max() > 10 * positive.min()
    if log:
        ax.set_yscale("log")
        low = np.maximum(low, positive.min() / 10)
    ax.errorbar(
        at,
        kl,
        yerr=[np.maximum(kl - low, 0), np.maximum(high - kl, 0)],
        color=theme.age,
        ecolor=theme.age,
        elinewidth=1.4,
        capsize=3,
        marker="o",
        ms=4.5,
        lw=1.6,
        label="mean, and its interval over episodes",
        zorder=3,
    )
    floor = rows["kl_floor"].max()
    if isinstance(floor, float) and floor > 0 and floor > 0.02 * float(kl.min()):
        ax.axhline(
            floor, color=theme.fault, lw=1, ls=(0, (4, 2)), label="floor of the rounding", zorder=2
        )
    if not log:
        ax.set_ylim(min(0.0, float(low.min())), float(high.max()) * 1.1 or 1e-6)
    shares = rows["tokens"] / rows["tokens"].sum()
    every = -(-rows.height // 16)
    named = list(zip(rows["age"], shares, strict=True))[::every]
    ax.set_xticks(at[::every], [f"{signed(age)}\n{percent(share)}" for age, share in named])
    for (age, _), tick in zip(named, ax.get_xticklabels(), strict=True):
        if age < 0:
            tick.set_color(theme.fault)
    ax.set_xlim(-0.5, rows.height - 0.5)
    legend(ax, theme)
    return figure


def masking_curves(table: pl.DataFrame, *, ax: Sequence[Axes] | None = None) -> Figure:
    """What each policy keeps at each threshold, and the bias of what it keeps.

    `table` is what `masking` returns without further groups. Panels: the share of the sampled
    tokens that is kept; the mean reward of what is kept less that of all; the mean length of the
    completions that are kept as a share of that of all. `ax` can be three axes.

    Returns the figure. Raises `ValueError` when a column is missing, or for several rows a policy
    and threshold.

    >>> import traceage as ta
    >>> figure = masking_curves(ta.masking(ta.scan_spans("data/real-dump")))
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['kept tokens', 'reward,\\nkept less all', 'length,\\nkept of all']
    """
    return draw_masking(table, ax=ax)


NAMES = {
    "token": "mask single tokens",
    "trace": "drop traces by their oldest token",
    "episode": "drop episodes by their dispatch",
}
"""What a policy is called in words."""

_STYLES = {"token": ("o", "-"), "trace": ("s", "--"), "episode": ("^", ":")}


def draw_masking(
    table: pl.DataFrame, *, ax: Sequence[Axes] | None = None, theme: Theme = LIGHT
) -> Figure:
    """`masking_curves` with the colours of `theme`."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    length, reward = "completion_tokens", "reward"
    require(table, "policy", "max_age", "kept_share", f"{length}/all", f"{reward}/kept")
    if table.select("policy", "max_age").is_duplicated().any():
        raise ValueError("more than one row a policy and threshold: draw one group at a time")
    if ax is None:
        figure = new_figure(theme, height=4.4)
        axes = list(figure.subplots(3, 1, sharex=True, height_ratios=[2.2, 1.3, 1.3]))
    else:
        axes = list(ax)
        found = axes[0].get_figure(root=True)
        assert found is not None
        figure = found
    panels = [
        ("kept tokens", pl.col("kept_share")),
        ("reward,\nkept less all", pl.col(f"{reward}/kept") - pl.col(f"{reward}/all")),
        ("length,\nkept of all", pl.col(f"{length}/kept") / pl.col(f"{length}/all")),
    ]
    for panel, (name, figure_of) in zip(axes, panels, strict=True):
        style_axes(panel, theme)
        panel.grid(axis="y", color=theme.rule, lw=0.7)
        panel.set_ylabel(name)
        drawn = False
        for policy, colour in zip(
            POLICIES, (theme.age, theme.in_queue, theme.lines[2]), strict=True
        ):
            rows = table.filter(pl.col("policy") == policy).sort("max_age")
            values = rows.select(figure_of.cast(pl.Float64)).to_series()
            drawn |= values.null_count() < len(values)
            marker, dashes = _STYLES[policy]
            panel.plot(
                rows["max_age"],
                values.fill_null(np.nan),
                color=colour,
                marker=marker,
                ls=dashes,
                ms=4,
                lw=1.6,
                label=NAMES[policy],
                zorder=3,
            )
        if not drawn:
            say(panel, theme, "no value; are there rewards?" if "reward" in name else "no value")
    axes[1].axhline(0, color=theme.muted, lw=0.8)
    for panel in (axes[0], axes[2]):
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[0].set_ylim(0, 1.05)
    axes[-1].xaxis.set_major_locator(MaxNLocator(10, integer=True, min_n_ticks=1))
    axes[-1].set_xlabel("threshold: the highest age that is kept (policy versions)")
    title(axes[0], theme, "What a limit on staleness would keep", pad=UNDER)
    legend(axes[0], theme, "under the title")
    figure.align_ylabels(axes)
    return figure
