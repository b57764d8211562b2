"""Figures of one step, one batch, one place, mismatch and masking: numbers read back from them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from test_report import (
    HOSTILE,
    NASTY,
    Step,
    by_env,
    counts_of,
    environment,
    legend,
    line,
    long,
    metrics_of,
    negative,
    patch,
    quantile,
    ten,
    words,
)

import traceage as ta
from traceage.figures import (
    age_by_index,
    age_distribution,
    age_heatmap,
    batch_timeline,
    masking_curves,
    mismatch_curve,
)
from traceage.figures.ages import age_row_edges, draw_heatmap, draw_staleness
from traceage.figures.batches import bin_name, draw_by_index, draw_distribution, draw_timeline
from traceage.figures.costs import NAMES, draw_masking, draw_mismatch
from traceage.figures.style import DARK, LIGHT, Theme, css_variables, inline_svg

DATA = Path(__file__).parent.parent / "data"

Completion = Sequence[tuple[int | str | None, int]]


# --- frames -------------------------------------------------------------------------------------


def spans_of(traces: Sequence[Sequence[Completion]], step: int = 5) -> pl.DataFrame:
    """A spans table of one batch: of each trace its completions, of each its (label, length)."""
    rows = []
    for number, completions in enumerate(traces):
        for node, runs in enumerate(completions):
            at = 0
            for label, length in runs:
                rows.append(
                    {
                        "step": step,
                        "training_version": step - 1,
                        "episode_id": f"e{number:03}",
                        "trace_id": f"t{number:03}",
                        "node": node,
                        "start": at,
                        "length": length,
                        "label": None if label is None else str(label),
                        "version": label if isinstance(label, int) else None,
                    }
                )
                at += length
    numbers = dict.fromkeys(("step", "training_version", "node", "start", "length"), pl.Int32())
    texts = dict.fromkeys(("episode_id", "trace_id", "label"), pl.String())
    return pl.DataFrame(rows, schema={**numbers, **texts, "version": pl.Int32()})


def mismatch_of(kl: dict[int | None, float], floor: float = 0.0, spread: float = 0.1) -> Any:
    """A table with the columns of `mismatch_by_age` that are drawn."""
    return pl.DataFrame(
        {
            "age": list(kl),
            "tokens": [1000 // (k + 1) for k in range(len(kl))],
            "mismatch_kl": list(kl.values()),
            "mismatch_kl_low": [value * (1 - spread) for value in kl.values()],
            "mismatch_kl_high": [value * (1 + 2 * spread) for value in kl.values()],
            "kl_floor": [floor] * len(kl),
        },
        schema_overrides={"age": pl.Int32},
    )


def masking_of(thresholds: int = 4, reward: float | None = 0.5) -> pl.DataFrame:
    """A table with the columns of `masking` that are drawn."""
    rows = [
        {
            "policy": policy,
            "max_age": k,
            "kept_share": (k + 1) / (thresholds + p),
            "reward/all": reward,
            "reward/kept": None if reward is None or not k else reward + 0.01 * p * k,
            "completion_tokens/all": 100.0,
            "completion_tokens/kept": 80.0 + 3 * k - p,
        }
        for p, policy in enumerate(NAMES)
        for k in range(thresholds)
    ]
    return pl.DataFrame(rows, schema_overrides={"reward/all": pl.Float64})


# --- one step -----------------------------------------------------------------------------------


def bars(figure: Figure) -> list[Rectangle]:
    return [bar for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]


@pytest.mark.parametrize("steps", [ten(), negative()])
@pytest.mark.parametrize("step", [None, 4])
def test_distribution_shows_each_share(steps: list[Step], step: int | None) -> None:
    ages = next(s.ages for s in reversed(steps) if step in (None, s.step))
    ends = range(min(0, *ages), max(ages) + 1)
    figure = age_distribution(counts_of(steps), step)
    shares = [ages.get(age, 0) / sum(ages.values()) for age in ends]
    assert [bar.get_height() for bar in bars(figure)] == pytest.approx(shares)
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == [
        str(age).replace("-", "−") for age in ends
    ]
    assert figure.axes[0].get_title(loc="left") == f"Token age in step {step or steps[-1].step}"
    for age, bar in zip(ends, bars(figure), strict=True):
        assert to_hex(bar.get_facecolor()) == (LIGHT.fault if age < 0 else LIGHT.age)


def test_distribution_sums_over_groups() -> None:
    steps = by_env("a", "b")
    split = pl.concat(
        [counts_of([s for s in steps if s.env == e]).with_columns(env=pl.lit(e)) for e in "ab"]
    )
    one, other = age_distribution(split), age_distribution(counts_of(steps))
    assert [b.get_height() for b in bars(one)] == [b.get_height() for b in bars(other)]


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.integers(-90, 900), st.integers(1, 10**9), min_size=1))
def test_a_bar_of_several_ages_holds_all_of_them(ages: dict[int, int]) -> None:
    shares = [bar.get_height() for bar in bars(age_distribution(counts_of([Step(1, ages)])))]
    edges = age_row_edges(min(ages), max(ages))
    total = sum(ages.values())
    assert shares == pytest.approx(
        [sum(n for age, n in ages.items() if a <= age < b) / total for a, b in pairwise(edges)]
    )


def test_distribution_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token with an age in step 99"):
        age_distribution(counts_of(ten()), 99)
    with pytest.raises(ValueError, match=r"no token with an age$"):
        age_distribution(counts_of([]))


# --- the traces of one batch --------------------------------------------------------------------


def runs_of(figure: Figure) -> dict[int, list[tuple[float, float, str]]]:
    """Row of a timeline -> its polygons from left to right, as (left, right, colour)."""
    rows: dict[int, list[tuple[float, float, str]]] = {}
    for collection in figure.axes[0].collections:
        assert isinstance(collection, PolyCollection)
        colour = to_hex(np.asarray(collection.get_facecolor())[0])
        for path in collection.get_paths():
            x, y = np.asarray(path.vertices).T
            assert y.max() - y.min() == pytest.approx(0.84)
            row = round(float(y.min() + 0.42))
            rows.setdefault(row, []).append((float(x.min()), float(x.max()), colour))
    return {row: sorted(runs) for row, runs in rows.items()}


def colour_of(label: int | str | None, trained: int) -> str:
    if label is None:
        return LIGHT.empty
    if label == "default":
        return LIGHT.peak
    age = trained - int(label)
    return LIGHT.fault if age < 0 else LIGHT.ramp[min(age, 4)]


def first_version(trace: Sequence[Completion]) -> float:
    versions = [label for runs in trace for label, n in runs if isinstance(label, int) and n]
    return versions[0] if versions else float("inf")


def tokens_of(trace: Sequence[Completion]) -> int:
    return sum(length for runs in trace for _, length in runs)


def assert_shows(figure: Figure, traces: Sequence[Sequence[Completion]], trained: int) -> None:
    """Every run of every trace, in its row and order, with its length and its colour."""
    rows = runs_of(figure)
    traces = [trace for trace in traces if tokens_of(trace)]
    traces = sorted(traces, key=lambda trace: (first_version(trace), -tokens_of(trace)))
    assert sorted(rows) == list(range(len(traces)))
    for row, trace in enumerate(traces):
        expected = [
            (label, length, k == 0)
            for runs in trace
            for k, (label, length) in enumerate((label, n) for label, n in runs if n)
        ]
        end = 0.0
        for (left, right, colour), run in zip(rows[row], expected, strict=True):
            label, length, begins = run
            gap = left - end
            assert right == pytest.approx(end + length)
            assert (gap > 0) == (begins and end > 0)
            assert gap <= length / 2 + 1e-9  # a run stays in sight, however short
            assert colour == colour_of(label, trained)
            end = right
        assert end == pytest.approx(tokens_of(trace))


BATCH: list[list[Completion]] = [
    [[(2, 30), (3, 20)], [(4, 500)]],
    [[(4, 10)]],
    [[("default", 5), (1, 7)], [], [(None, 3), (3, 2)]],
    [[(0, 4), (-1, 3)], [(-7, 900)]],
    [[(9, 1)]],
    [[(None, 8)]],
    [[("default", 9)], [("default", 0)], [(None, 1)]],
    [[(4, 0)]],
    [[(2, 55)], [(2, 1)]],
]


def test_timeline_shows_each_run() -> None:
    figure = batch_timeline(spans_of(BATCH))
    assert_shows(figure, BATCH, trained=4)
    ax = figure.axes[0]
    assert ax.get_title(loc="left") == "Batch 5: who sampled the tokens of its 8 traces"
    assert legend(ax) == [
        "newer than trained",
        "v4 (age 0)",
        "v3 (age 1)",
        "v2 (age 2)",
        "v1 (age 3)",
        "age 4 and above",
        "default",
        "no label",
    ]
    (bare,) = (c for c in ax.collections if c.get_hatch())
    assert to_hex(np.asarray(bare.get_facecolor())[0]) == LIGHT.empty
    assert ax.get_xlim() == (0, 907)


label = st.one_of(st.integers(-3, 6), st.just("default"), st.none())
completion = st.lists(st.tuples(label, st.integers(0, 300)), max_size=4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(completion, min_size=1, max_size=3), min_size=1, max_size=12))
def test_timeline_shows_any_batch(traces: list[list[Completion]]) -> None:
    figure = batch_timeline(spans_of(traces))
    if any(map(tokens_of, traces)):
        assert_shows(figure, traces, trained=4)
    else:
        assert "no sampled token" in words(figure)


def test_timeline_of_stored_traces_holds_all_tokens() -> None:
    spans = ta.scan_spans(DATA / "real-dump").filter(pl.col("step") == 7).collect()
    rows = runs_of(batch_timeline(spans))
    ends = sorted(round(runs[-1][1]) for runs in rows.values())
    assert ends == sorted(spans.group_by("trace_id").agg(pl.col("length").sum())["length"])
    assert sum(map(len, rows.values())) == spans.filter(pl.col("length") > 0).height


@pytest.mark.parametrize(
    ("traces", "runs", "shown"), [(64, 1, 64), (65, 1, 33), (200, 3, 50), (10, 1000, 4)]
)
def test_a_large_batch_shows_every_nth_trace_and_says_so(
    traces: int, runs: int, shown: int
) -> None:
    batch = [[[(k % 5, 10 + n) for k in range(runs)]] for n in range(traces)]
    figure = batch_timeline(spans_of(batch))
    rows = runs_of(figure)
    assert len(rows) == shown <= 64
    every = -(-traces // shown)
    lengths = [runs * (10 + n) for n in reversed(range(traces))]  # one version: longest on top
    assert [round(rows[row][-1][1]) for row in range(shown)] == lengths[::every]
    said = f"{shown} of its {traces} traces" if shown < traces else f"its {traces} traces"
    assert figure.axes[0].get_title(loc="left") == f"Batch 5: who sampled the tokens of {said}"


def test_a_run_without_a_training_version_is_told_apart() -> None:
    spans = spans_of([[[(3, 7)]]]).with_columns(training_version=pl.lit(None, pl.Int32))
    figure = batch_timeline(spans)
    assert runs_of(figure) == {0: [(0, 7, LIGHT.in_queue)]}
    assert legend(figure.axes[0]) == ["no training version"]


def test_an_age_of_two_versions_is_not_named_by_one() -> None:
    both = spans_of([[[(3, 7)]], [[(2, 5)]]])
    spans = both.with_columns(training_version=pl.Series([4, 3], dtype=pl.Int32))
    assert legend(batch_timeline(spans).axes[0]) == ["age 1"]


def test_a_timeline_is_of_one_batch() -> None:
    with pytest.raises(ValueError, match="several steps"):
        batch_timeline(pl.concat([spans_of(BATCH), spans_of(BATCH, step=6)]))
    assert "no sampled token" in words(batch_timeline(spans_of(BATCH).head(0)))


# --- places in a completion ---------------------------------------------------------------------


def places_of(ages: dict[int, dict[int, int]]) -> pl.DataFrame:
    rows = [(place, age, n) for place, of in ages.items() for age, n in of.items()]
    schema = {"index_bin": pl.Int32, "age": pl.Int32, "tokens": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


PLACES = {0: {0: 70, 1: 30}, 32: {0: 1, 2: 99}, 64: {1: 5}, 4096: {-1: 60, 0: 10, 7: 30}}


@pytest.mark.parametrize("places", [{k: PLACES[k] for k in (0, 32, 64)}, PLACES])
def test_places_show_mean_and_quantiles(places: dict[int, dict[int, int]]) -> None:
    ax = age_by_index(places_of(places)).axes[0]
    means = [sum(a * n for a, n in of.items()) / sum(of.values()) for of in places.values()]
    at, drawn = line(ax, "mean")
    assert at == list(range(len(places)))
    assert drawn == pytest.approx(means)
    upper, lower = patch(ax, "p50 to p95")
    assert list(upper) == [quantile(of, 0.95) for of in places.values()]
    assert list(lower) == [quantile(of, 0.5) for of in places.values()]
    assert [t.get_text() for t in ax.get_xticklabels()] == [bin_name(place) for place in places]
    low, high = ax.get_ylim()
    assert low <= min(lower)
    assert high >= max(upper)
    faults = [item for item in ax.lines if item.get_color() == LIGHT.fault]
    assert bool(faults) == (4096 in places)


def test_places_sum_over_groups() -> None:
    split = pl.concat([places_of(PLACES).with_columns(env=pl.lit(e)) for e in "ab"])
    one, other = (age_by_index(counts).axes[0] for counts in (split, places_of(PLACES)))
    assert line(one, "mean") == line(other, "mean")


def test_places_of_nothing() -> None:
    assert "no token with an age" in words(age_by_index(places_of({})))


# --- mismatch -----------------------------------------------------------------------------------


def error_bars(ax: Axes) -> list[tuple[float, float]]:
    (found,) = (c for c in ax.collections if isinstance(c, LineCollection))
    return [(float(a[1]), float(b[1])) for a, b in found.get_segments()]


def curve(ax: Axes) -> list[float]:
    (found,) = (c for c in ax.containers if str(c.get_label()).startswith("mean"))
    return list(found[0].get_ydata())


FLAT: dict[int | None, float] = {0: 5e-5, 1: 1e-4, 2: 1.7e-4, 3: 2.2e-4}
STEEP: dict[int | None, float] = {0: 5e-5, 1: 1e-4, 2: 1.7e-3}


@pytest.mark.parametrize(("kl", "scale"), [(FLAT, "linear"), (STEEP, "log")])
def test_mismatch_shows_its_table(kl: dict[int | None, float], scale: str) -> None:
    table = mismatch_of(kl).sample(fraction=1, shuffle=True, seed=1)
    ax = mismatch_curve(table).axes[0]
    table = table.sort("age")
    assert ax.get_yscale() == scale
    assert curve(ax) == table["mismatch_kl"].to_list()
    low, high = zip(*error_bars(ax), strict=True)
    assert low == pytest.approx(table["mismatch_kl_low"].to_list())
    assert high == pytest.approx(table["mismatch_kl_high"].to_list())
    bottom, top = ax.get_ylim()
    assert bottom <= min(low)
    assert top >= max(high)
    total = table["tokens"].sum()
    named = [text.get_text().split("\n") for text in ax.get_xticklabels()]
    assert [age for age, _ in named] == [str(age) for age in kl]
    shares = [float(share.strip("%")) / 100 for _, share in named]
    assert shares == pytest.approx([n / total for n in table["tokens"]], abs=5e-4)


def test_an_interval_that_is_not_there_has_no_length() -> None:
    table = mismatch_of(FLAT).with_columns(
        pl.when(pl.col("age") != 2).then(pl.col(f"mismatch_kl_{end}")).alias(f"mismatch_kl_{end}")
        for end in ("low", "high")
    )
    assert error_bars(mismatch_curve(table).axes[0])[2] == pytest.approx((1.7e-4, 1.7e-4))


def floor_of(table: pl.DataFrame) -> list[float]:
    lines = mismatch_curve(table).axes[0].lines
    return [float(np.asarray(a.get_ydata())[0]) for a in lines if "floor" in str(a.get_label())]


def test_the_floor_is_shown_where_it_is_in_sight() -> None:
    assert floor_of(mismatch_of(FLAT, floor=1e-5)) == [1e-5]
    assert floor_of(mismatch_of(FLAT, floor=1e-9)) == []
    assert floor_of(mismatch_of(FLAT)) == []


def test_only_tokens_with_an_age_are_on_the_axis() -> None:
    table = mismatch_of({None: 9.0, **FLAT, 7: 3.0})
    table = table.with_columns(tokens=pl.when(pl.col("age") == 7).then(0).otherwise("tokens"))
    assert curve(mismatch_curve(table).axes[0]) == list(FLAT.values())
    nothing = mismatch_curve(mismatch_of({None: 9.0}))
    assert "no token has both logprobs and an age" in words(nothing)


def test_negative_ages_of_a_mismatch_are_marked() -> None:
    ticks = mismatch_curve(mismatch_of({-2: 1e-4, **FLAT})).axes[0].get_xticklabels()
    assert [tick.get_color() == LIGHT.fault for tick in ticks] == [True, *[False] * 4]
    assert ticks[0].get_text().startswith("−2\n")


def test_many_ages_are_all_drawn() -> None:
    table = mismatch_of({age: 1e-4 + 1e-6 * age for age in range(60)})
    ax = mismatch_curve(table).axes[0]
    assert len(curve(ax)) == len(error_bars(ax)) == 60
    assert len(ax.get_xticklabels()) <= 16


# --- masking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.5, -2.0])
def test_masking_shows_its_table(reward: float) -> None:
    table = masking_of(reward=reward)
    kept, rewards, lengths = masking_curves(table.sample(fraction=1, shuffle=True, seed=3)).axes
    for policy, name in NAMES.items():
        rows = table.filter(pl.col("policy") == policy).to_dicts()
        ages = [row["max_age"] for row in rows]
        assert line(kept, name) == (ages, [row["kept_share"] for row in rows])
        x, y = line(rewards, name)
        assert x == ages
        assert np.isnan(y[0])  # nothing is kept that has a reward
        assert y[1:] == pytest.approx([row["reward/kept"] - reward for row in rows[1:]])
        expected = [row["completion_tokens/kept"] / 100 for row in rows]
        assert line(lengths, name)[1] == pytest.approx(expected)
    assert legend(kept) == list(NAMES.values())
    assert "are there rewards?" not in words(masking_curves(table))
    styles = {(str(item.get_marker()), item.get_linestyle()) for item in kept.lines}
    assert len(styles) == 3  # told apart without colour


def test_masking_without_rewards_says_so() -> None:
    _, rewards, lengths = masking_curves(masking_of(reward=None)).axes
    assert "are there rewards?" in "\n".join(text.get_text() for text in rewards.texts)
    assert not lengths.texts


# --- all of them --------------------------------------------------------------------------------

SPANS = spans_of(BATCH)
Draw = Callable[..., Figure]
ONE_PANEL: list[tuple[Draw, pl.DataFrame, list[str]]] = [
    (age_distribution, counts_of(ten()), ["step", "age", "tokens"]),
    (batch_timeline, SPANS, SPANS.columns),
    (age_by_index, places_of(PLACES), ["index_bin", "age", "tokens"]),
    (mismatch_curve, mismatch_of(FLAT), mismatch_of(FLAT).columns),
]
MASKING = ["policy", "max_age", "kept_share", "completion_tokens/all", "reward/kept"]
ALL: list[tuple[Draw, pl.DataFrame, list[str]]] = [
    *ONE_PANEL,
    (masking_curves, masking_of(), MASKING),
]


@pytest.mark.parametrize(("draw", "table", "columns"), ALL)
def test_what_is_missing_is_named(draw: Draw, table: pl.DataFrame, columns: list[str]) -> None:
    for name in columns:
        with pytest.raises(ValueError, match=f"no column '{name}' to draw; the frame has"):
            draw(table.drop(name))


@pytest.mark.parametrize(("draw", "table", "columns"), ONE_PANEL)
def test_a_figure_is_drawn_into_given_axes(
    draw: Draw, table: pl.DataFrame, columns: list[str]
) -> None:
    figure = Figure()
    before, ax = figure.subplots(1, 2)
    assert draw(table, ax=ax) is figure
    assert ax.get_title(loc="left")
    assert not before.has_data()
    assert figure.axes == [before, ax]


def test_masking_is_drawn_into_three_given_axes() -> None:
    figure = Figure()
    axes = list(figure.subplots(3, 1))
    assert masking_curves(masking_of(), ax=axes) is figure
    assert [len(ax.lines) for ax in axes] == [3, 4, 3]  # and a line at 0
    with pytest.raises(ValueError, match="argument"):
        masking_curves(masking_of(), ax=axes[:2])


def test_several_rows_a_point_are_an_error() -> None:
    with pytest.raises(ValueError, match="one group at a time"):
        mismatch_curve(pl.concat([mismatch_of(FLAT)] * 2))
    with pytest.raises(ValueError, match="one group at a time"):
        masking_curves(pl.concat([masking_of()] * 2))


def test_pyplot_is_never_imported() -> None:
    code = """
import sys, traceage as ta
from test_figures import ALL
for draw, table, _ in ALL:
    draw(table)
assert "matplotlib.figure" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), cwd=here)


HOSTILE_LABELS = ["$\\frac{", NASTY, "default ", "9" * 40]


def test_hostile_labels_can_be_drawn() -> None:
    """Labels that no pattern reads have no version; they are no default and not unlabelled."""
    figure = batch_timeline(spans_of([[[(name, 3)]] for name in HOSTILE_LABELS]))
    assert len(runs_of(figure)) == 4
    figure.savefig(os.devnull, format="svg")


def svg(draw: Callable[[Theme], Figure], theme: Theme | None = None) -> str:
    (drawn,) = inline_svg(draw, key="k", label=NASTY, themes=[theme] if theme else [])
    return drawn


def test_a_second_theme_is_laid_out_as_if_it_were_alone() -> None:
    counts = pl.DataFrame({"step": [1, 2, 2], "age": [0, 0, 1], "tokens": [400, 300, 100]})

    def draw(theme: Theme) -> Figure:
        return draw_heatmap(counts, theme=theme)

    light, dark = inline_svg(draw, key="k", label="x", themes=[LIGHT, DARK])
    (alone,) = inline_svg(draw, key="k", label="x", themes=[DARK])
    assert dark.replace("k-1-", "k-0-") == alone
    assert light != alone


def texts_of(drawn: str) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", drawn, re.DOTALL)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ('x id="y" #0b5a93', 'x id="y" #0b5a93'),
        ('href="#a url(#a) ', 'href="#a url(#a) '),
        ("font: 12px serif", "font: 12px serif"),
        (HOSTILE, HOSTILE.replace("<", "&lt;").replace(">", "&gt;")),
        ("a\nb\x00\x1b$x$", r"a\nb\x00\x1b$x$"),
        ("<!-- --> &amp;", "&lt;!-- --&gt; &amp;amp;"),
    ],
)
def test_a_name_stands_in_the_page_as_it_is(
    name: str, written: str, recwarn: pytest.WarningsRecorder
) -> None:
    frame = metrics_of(by_env(name, "plain"), by_env=True)
    assert written in texts_of(svg(lambda theme: draw_staleness(frame, theme=theme)))
    assert not recwarn.list


# --- colours ------------------------------------------------------------------------------------


def lightness(colour: str) -> float:
    """CIE L* of a colour: how light it is, and what is left of it in a grey copy."""
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)
    )
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


@pytest.mark.parametrize(("theme", "sign"), [(LIGHT, -1), (DARK, 1)])
def test_the_ramps_are_in_order_without_colour(theme: Theme, sign: int) -> None:
    for ramp in (theme.ramp, theme.fault_ramp):
        steps = [b - a for a, b in pairwise(map(lightness, ramp))]
        assert all(sign * step > 5 for step in steps), steps


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_words_can_be_read_on_the_page(theme: Theme) -> None:
    for colour in (theme.ink, theme.muted, theme.fault):
        assert abs(lightness(colour) - lightness(theme.background)) > 40


def test_a_colour_of_the_light_theme_has_one_name() -> None:
    """Or it could not be told which one a drawing meant."""
    named = dict(pair.split(":") for pair in css_variables(LIGHT).split(";"))
    assert len(set(named.values())) == len(named)
    dark = dict(pair.split(":") for pair in css_variables(DARK).split(";"))
    assert named.keys() == dark.keys()


DRAWN: list[Callable[[Theme], Figure]] = [
    lambda theme: draw_distribution(counts_of(negative()), None, theme=theme),
    lambda theme: draw_timeline(SPANS, theme=theme),
    lambda theme: draw_by_index(places_of(PLACES), theme=theme),
    lambda theme: draw_mismatch(mismatch_of(STEEP, floor=1e-4), theme=theme),
    lambda theme: draw_masking(masking_of(), theme=theme),
    lambda theme: draw_staleness(metrics_of(long()), theme=theme),
]


@pytest.mark.parametrize("draw", DRAWN)
def test_a_drawing_takes_the_colours_and_the_font_of_the_page(
    draw: Callable[[Theme], Figure],
) -> None:
    drawn = svg(draw)
    assert set(re.findall(r"var\(--([^)]*)\)", drawn)) <= {
        pair.split(":")[0][2:] for pair in css_variables(LIGHT).split(";")
    }
    assert not re.findall(r"#[0-9a-f]{6}\b", drawn)
    assert "font-family" not in drawn
    assert "font:" not in drawn
    dark = set(re.findall(r"#[0-9a-f]{6}\b", svg(draw, DARK)))
    assert dark <= {pair.split(":")[1] for pair in css_variables(DARK).split(";")}
    assert dark


@pytest.mark.parametrize("draw", DRAWN)
def test_equal_tables_give_equal_bytes(draw: Callable[[Theme], Figure]) -> None:
    assert svg(draw) == svg(draw)


@pytest.mark.parametrize("draw", DRAWN)
def test_ids_are_of_their_figure(draw: Callable[[Theme], Figure]) -> None:
    drawn = svg(draw)
    ids = re.findall(r'\bid="([^"]*)"', drawn)
    assert len(ids) == len(set(ids))
    assert all(name.startswith("k-") for name in ids)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', drawn)) == set(ids)


def test_every_map_can_be_read_in_grey() -> None:
    """The heat map's colours are those of the ramp."""
    image = age_heatmap(counts_of(ten())).axes[0].get_images()[0]
    shades = [lightness(to_hex(image.cmap(x))) for x in np.linspace(0, 1, 64)]
    assert all(a > b for a, b in pairwise(shades))
