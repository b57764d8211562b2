"""The figures, the page and the plain-text table, from frames built by hand in plain Python."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from traceage.figures import age_heatmap, staleness
from traceage.figures.ages import age_row_edges, draw_heatmap
from traceage.figures.style import percent
from traceage.report import summary_table, write_report
from traceage.study import Study

HOSTILE = "<script>alert(1)</script>"
NASTY = f"""{HOSTILE}"'&<!--]]></title></style>\u2028\x00\x1b[31m</SCRIPT >"""


# --- frames -------------------------------------------------------------------------------------


@dataclass
class Step:
    """What one row of the metrics is made from."""

    step: int
    ages: dict[int, int] = field(default_factory=dict)
    unlabelled: int = 0
    flight: Sequence[int] | None = (0, 1, 2, 1)
    queue: Sequence[int] = (0, 0, 1, 1)
    not_shipped: int | None = 0
    mixed: int = 6
    env: str | None = None


def quantile(ages: dict[int, int], share: float) -> int:
    total = sum(ages.values())
    return next(
        age
        for age in sorted(ages)
        if sum(n for a, n in ages.items() if a <= age) >= share * total - 1e-9
    )


def metrics_of(steps: Iterable[Step], *, by_env: bool = False) -> pl.DataFrame:
    """A frame with the columns and types of `off_policy_metrics`."""
    rows: list[dict[str, Any]] = []
    for s in steps:
        labelled = sum(s.ages.values())
        sampled = labelled + s.unlabelled
        row: dict[str, Any] = {"step": s.step}
        if by_env:
            row["env"] = s.env
        row |= {
            "training_version": s.step - 1,
            "episodes": 4,
            "traces": 4,
            "sampled_tokens": sampled,
            "labelled_tokens": labelled,
            "default_tokens": 0,
            "unlabelled_tokens": s.unlabelled,
            "coverage": labelled / sampled if sampled else None,
            "not_shipped": s.not_shipped,
            "mixed_nodes": s.mixed,
            "sampled_nodes": 12,
        }
        mean = sum(a * n for a, n in s.ages.items()) / labelled if labelled else None
        row |= {"off_policy/token/mean": mean}
        row |= {"off_policy/token/max": max(s.ages, default=None)}
        row |= {"off_policy/token/min": min(s.ages, default=None)}
        for q in (50, 95, 99):
            row[f"off_policy/token/p{q}"] = quantile(s.ages, q / 100) if labelled else None
        total = (
            None if s.flight is None else [a + b for a, b in zip(s.flight, s.queue, strict=True)]
        )
        for name, values in (("", total), ("in_flight/", s.flight), ("in_queue/", s.queue)):
            known = values if s.flight is not None else None
            row[f"off_policy/{name}mean"] = sum(known) / len(known) if known else None
            row[f"off_policy/{name}max"] = max(known) if known else None
        rows.append(row)
    small, big, real = pl.Int32(), pl.Int64(), pl.Float64()
    schema: dict[str, pl.DataType] = {"step": small}
    if by_env:
        schema["env"] = pl.String()
    schema["training_version"] = small
    for name in ("episodes", "traces", "sampled_tokens", "labelled_tokens", "default_tokens"):
        schema[name] = big
    schema |= {"unlabelled_tokens": big, "coverage": real, "not_shipped": big}
    schema |= {"mixed_nodes": big, "sampled_nodes": big}
    for name in ("mean", "max", "min", "p50", "p95", "p99"):
        schema[f"off_policy/token/{name}"] = real if name == "mean" else small
    for name in ("", "in_flight/", "in_queue/"):
        schema |= {f"off_policy/{name}mean": real, f"off_policy/{name}max": small}
    return pl.DataFrame(rows, schema=schema)


def counts_of(steps: Iterable[Step]) -> pl.DataFrame:
    """A frame with the columns and types of `age_counts` by step."""
    tokens: dict[tuple[int, int], int] = {}
    for s in steps:
        for age, n in s.ages.items():
            tokens[s.step, age] = tokens.get((s.step, age), 0) + n
    rows = [(step, age, n) for (step, age), n in sorted(tokens.items())]
    schema = {"step": pl.Int32, "age": pl.Int32, "tokens": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def ten() -> list[Step]:
    return [
        Step(n, {age: 1000 // (age + 1) + 7 * n for age in range(min(n, 5))}) for n in range(1, 11)
    ]


def long() -> list[Step]:
    """400 steps: some without a label, some missing, a straggler of age 300."""
    steps = []
    for n in range(1, 401):
        if 340 <= n < 350:
            continue
        ages = {age: 90_000 // (1 + age * age) for age in range(3 + n % 5)}
        if n == 222:
            ages[300] = 11
        if 90 <= n < 97:
            steps.append(Step(n, unlabelled=1000, flight=None, not_shipped=None))
        else:
            steps.append(Step(n, ages, unlabelled=500 if n > 380 else 0))
    return steps


def unlabelled() -> list[Step]:
    return [Step(n, unlabelled=3000 + n, flight=None, not_shipped=None) for n in range(1, 6)]


def negative() -> list[Step]:
    return [
        Step(n, {0: 500, 1: 300} | ({-2: 5, -1: 40} if n in (4, 5) else {})) for n in range(1, 9)
    ]


def by_env(*names: str | None) -> list[Step]:
    return [
        Step(n, {0: 100 + i, 1 + i: 50}, env=name)
        for n in range(1, 7)
        for i, name in enumerate(names)
    ]


# --- reading a page back ------------------------------------------------------------------------

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A parsed page: every tag with its attributes and its text; unbalanced tags fail."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[list[str]] = []
        self.open: list[int] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.append([])
        if tag not in VOID:
            self.open.append(len(self.tags) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.tags[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for index in self.open:
            self.texts[index].append(data)

    def all(self, tag: str, **attributes: str) -> list[str]:
        """The texts of the elements of that tag and those attributes."""
        return [
            "".join(text)
            for (name, attrs), text in zip(self.tags, self.texts, strict=True)
            if name == tag and all(attrs.get(k.rstrip("_")) == v for k, v in attributes.items())
        ]

    def rows(self) -> list[list[str]]:
        """The cells of the table's body."""
        body = self.source[self.source.index("<tbody>") : self.source.index("</tbody>")]
        cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("<tr>")[1:])
        return [list(row) for row in cells]

    @property
    def data(self) -> dict[str, Any]:
        (text,) = self.all("script", id="traceage-data")
        return json.loads(text, parse_constant=pytest.fail)  # type: ignore[no-any-return]


def report(folder: Path, steps: list[Step], name: str = "report.html", **options: Any) -> Page:
    envs = any(s.env is not None for s in steps)
    path = folder / name
    options = {"sources": ["runs/a"], **options}
    title = options.pop("title", "A run")
    study = Study(metrics_of(steps, by_env=envs), counts_of(steps), **options)
    write_report(path, study, title=title)
    return Page(path.read_text(encoding="utf-8"))


# --- the heat map -------------------------------------------------------------------------------


def shares(figure: Figure) -> dict[tuple[int, int], float]:
    """(row, column) -> share, over the images of a heat map."""
    cells: dict[tuple[int, int], float] = {}
    for image in figure.axes[0].get_images():
        array: Any = np.ma.asarray(image.get_array())
        for row, column in zip(*np.nonzero(~np.ma.getmaskarray(array)), strict=True):
            assert (row, column) not in cells
            cells[int(row), int(column)] = float(array[row, column])
    return cells


def words(figure: Figure) -> str:
    """Everything written on a figure."""
    found = figure.findobj(matplotlib.text.Text)
    return "\n".join(text.get_text() for text in found)


@pytest.mark.parametrize("steps", [ten(), negative()])
def test_heatmap_shows_each_share(steps: list[Step]) -> None:
    low = min(0, *(age for s in steps for age in s.ages))
    expected = {
        (age - low, s.step - 1): n / sum(s.ages.values())
        for s in steps
        for age, n in s.ages.items()
    }
    assert shares(age_heatmap(counts_of(steps))) == pytest.approx(expected)


def test_heatmap_sums_over_groups() -> None:
    steps = by_env("a", "b")
    split = pl.concat(
        [counts_of([s for s in steps if s.env == e]).with_columns(env=pl.lit(e)) for e in "ab"]
    )
    assert shares(age_heatmap(split)) == shares(age_heatmap(counts_of(steps)))


def test_heatmap_of_a_long_run_drops_nothing() -> None:
    steps = long()
    figure = age_heatmap(counts_of(steps))
    cells = shares(figure)
    columns = {column for _, column in cells}
    assert columns == {s.step - 1 for s in steps if s.ages}
    sums = np.zeros(400)
    for (_, column), share in cells.items():
        sums[column] += share
    assert sums[sorted(columns)] == pytest.approx(1)
    top = max(row for row, _ in cells)  # the straggler has a row of its own, and no one else
    assert [column for row, column in cells if row == top] == [221]
    edges = age_row_edges(0, 300)
    assert edges[top] <= 300 < edges[top + 1]
    assert "several a row" in figure.axes[0].get_ylabel()
    assert "grey: no token with an age" in figure.axes[0].get_xlabel()


def test_heatmap_pools_steps_and_says_so() -> None:
    steps = [Step(n, {0: n, 1: 100}) for n in range(1, 1501)]
    figure = age_heatmap(counts_of(steps))
    assert figure.axes[0].get_xlabel() == "training step (a column is 3 steps)"
    cells = shares(figure)
    # The first column is centred on the first step: it pools the steps 1 and 2.
    assert cells[0, 0] == pytest.approx((1 + 2) / (1 + 2 + 200))
    assert cells[0, 1] == pytest.approx((3 + 4 + 5) / (3 + 4 + 5 + 300))


def test_heatmap_marks_negative_ages() -> None:
    figure = age_heatmap(counts_of(negative()))
    above, below = figure.axes[0].get_images()
    assert not np.array_equal(above.cmap(1.0), below.cmap(1.0))
    assert np.ma.count(np.ma.asarray(below.get_array())) == 4
    assert "90 of 6,490 tokens (1.4%) have a negative age, a fault in the labelling" in words(
        figure
    )
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["−2", "−1", "0", "1"]
    assert "fault" not in words(age_heatmap(counts_of(ten())))


@pytest.mark.parametrize(("ages", "rows"), [((-5, -3), 6), ((-90, -40), 26)])
def test_heatmap_of_negative_ages_alone(ages: tuple[int, int], rows: int) -> None:
    figure = age_heatmap(counts_of([Step(1, dict.fromkeys(ages, 10))]))
    above, below = figure.axes[0].get_images()
    assert np.ma.count(np.ma.asarray(above.get_array())) == 0
    assert np.ma.asarray(below.get_array()).shape == (rows, 1)
    assert set(shares(figure).values()) == {0.5}
    (boundary,) = figure.axes[0].lines
    assert -0.5 < float(np.asarray(boundary.get_ydata())[0]) <= rows - 0.5


def test_heatmap_without_a_labelled_token() -> None:
    assert "no token with an age" in words(age_heatmap(counts_of(unlabelled())))
    assert "no token with an age" in words(age_heatmap(counts_of([])))


def test_heatmap_spans_the_steps_it_is_given() -> None:
    counts = counts_of([Step(3, {0: 5})])
    ax = draw_heatmap(counts, steps=pl.Series([1, 2, 3, 4])).axes[0]
    assert ax.get_xlim() == (0.5, 4.5)


@given(st.integers(-400, 2000), st.integers(0, 2000))
def test_age_rows_tile_the_ages(low: int, span: int) -> None:
    high = low + span
    edges = age_row_edges(low, high)
    assert edges == sorted(set(edges))
    assert edges[0] <= low
    assert high < edges[-1]
    assert len(edges) <= 90
    if edges[0] < 0 < edges[-1]:
        assert 0 in edges
    if span < 32:
        assert set(range(low, high + 2)) <= set(edges)


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(st.tuples(st.integers(1, 40), st.integers(-60, 400)), st.integers(1, 10**9)))
def test_heatmap_rows_hold_every_token(tokens: dict[tuple[int, int], int]) -> None:
    steps = [Step(step, {age: n}) for (step, age), n in tokens.items()]
    cells = shares(age_heatmap(counts_of(steps)))
    columns = {column for _, column in cells}
    assert sum(cells.values()) == pytest.approx(len(columns))
    assert bool(cells) == bool(tokens)


# --- staleness ----------------------------------------------------------------------------------


def line(ax: Axes, label: str) -> tuple[list[float], list[float]]:
    (found,) = (item for item in ax.lines if item.get_label() == label)
    return list(np.asarray(found.get_xdata())), list(np.asarray(found.get_ydata()))


def legend(ax: Axes) -> list[str]:
    box = ax.get_legend()
    assert box is not None
    return [text.get_text() for text in box.get_texts()]


def patch(ax: Axes, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Upper and lower edge of an area; NaN where there is none."""
    (found,) = (p for p in ax.patches if isinstance(p, StepPatch) and p.get_label() == label)
    values, _, baseline = found.get_data()
    lower = np.full(len(values), np.nan) if baseline is None else np.asarray(baseline, float)
    return np.asarray(values, float), np.broadcast_to(lower, len(values))


def test_staleness_shows_the_metrics() -> None:
    frame = metrics_of(ten())
    tokens, episodes = staleness(frame).axes

    def column(name: str) -> Any:
        return pytest.approx(frame[f"off_policy/{name}"].to_list())

    assert line(tokens, "mean") == (list(range(1, 11)), column("token/mean"))
    upper, lower = patch(tokens, "p50 to p95")
    assert list(upper) == column("token/p95")
    assert list(lower) == column("token/p50")
    assert list(patch(tokens, "max")[0]) == column("token/max")
    assert line(episodes, "mean")[1] == column("mean")
    flight, ground = patch(episodes, "in flight")
    whole, floor = patch(episodes, "in queue")
    assert list(flight) == column("in_flight/mean")
    assert not ground.any()
    assert list(whole - floor) == column("in_queue/mean")
    assert list(floor) == column("in_flight/mean")
    assert tokens.get_ylabel() == "age (policy versions)"
    assert episodes.get_xlabel() == "training step"


def test_null_values_and_missing_steps_are_gaps() -> None:
    steps = [Step(n, {1: 10}) for n in (1, 2, 6, 7)] + [
        Step(3, unlabelled=5, flight=None),
        Step(4, {2: 10}, flight=None),
        Step(5, unlabelled=5),
    ]
    steps += [Step(n, {3: 10}) for n in (11, 12, 13)]  # 8, 9 and 10 are not there
    tokens, episodes, coverage = staleness(metrics_of(steps)).axes
    x, y = line(tokens, "mean")
    drawn = {step: age for step, age in zip(x, y, strict=True) if not math.isnan(age)}
    assert drawn == {1: 1, 2: 1, 4: 2, 6: 1, 7: 1, 11: 3, 12: 3, 13: 3}
    assert any(7 < step < 11 and math.isnan(age) for step, age in zip(x, y, strict=True))
    assert np.isnan(patch(episodes, "in flight")[0]).sum() == 3
    assert list(patch(coverage, "coverage")[0][:5]) == [1, 1, 0, 1, 0]


def test_a_lone_value_of_a_long_run_is_a_dot() -> None:
    steps = [Step(n, {1: 10} if n == 50 or n > 60 else {}, unlabelled=5) for n in range(1, 101)]
    axes = staleness(metrics_of(steps)).axes[0]
    (mean,) = (item for item in axes.lines if item.get_label() == "mean")
    assert mean.get_marker() != "None"
    assert mean.get_markevery() == [49]


def test_coverage_has_a_panel_only_below_one() -> None:
    assert len(staleness(metrics_of(ten())).axes) == 2
    frame = metrics_of([Step(1, {0: 75}, unlabelled=25), Step(2, {0: 10})])
    figure = staleness(frame)
    assert list(patch(figure.axes[2], "coverage")[0]) == [0.75, 1.0]
    own = Figure()
    tokens = own.add_subplot()
    assert staleness(frame, ax=tokens) is own
    assert "coverage 75.0% to 100%" in tokens.get_title(loc="left")


def test_negative_ages_are_marked() -> None:
    axes = staleness(metrics_of(negative())).axes[0]
    x, y = line(axes, "min below 0: labelling fault")
    marked = {step: age for step, age in zip(x, y, strict=True) if not math.isnan(age)}
    assert marked == {4: -2, 5: -2}
    assert axes.get_ylim()[0] < -2


def test_a_straggler_does_not_flatten_the_rest() -> None:
    axes = staleness(metrics_of(long())).axes[0]
    assert axes.get_yscale() == "symlog"
    assert "log scale above" in "\n".join(text.get_text() for text in axes.texts)


def test_groups_are_lines() -> None:
    steps = by_env("a$b$", "_hidden", None)
    figure = staleness(metrics_of(steps, by_env=True))
    names = legend(figure.axes[0])
    assert [name.strip() for name in names] == ["-", "_hidden", "a$b$"]
    for name, env in zip(names, (None, "_hidden", "a$b$"), strict=True):
        part = metrics_of([s for s in steps if s.env == env])
        assert line(figure.axes[0], name)[1] == pytest.approx(
            part["off_policy/token/mean"].to_list()
        )
    figure.savefig(os.devnull, format="svg")  # a `$` must not be read as mathematics


def test_the_title_says_when_groups_are_left_out() -> None:
    frame = metrics_of(by_env(*(f"env-{i:02}" for i in range(11))), by_env=True)
    figure = staleness(frame)
    assert "8 largest of 11 groups" in figure.axes[0].get_title(loc="left")
    assert len(legend(figure.axes[0])) == 8


@pytest.mark.parametrize("steps", [unlabelled(), [], [Step(7, {0: 1})], long(), negative()])
def test_every_figure_can_be_drawn(steps: list[Step]) -> None:
    for figure in (age_heatmap(counts_of(steps)), staleness(metrics_of(steps))):
        figure.savefig(os.devnull, format="svg")


def test_figures_name_what_is_missing() -> None:
    with pytest.raises(ValueError, match="'step'"):
        age_heatmap(pl.DataFrame({"age": [1], "tokens": [1]}))
    with pytest.raises(ValueError, match="'step'"):
        staleness(metrics_of(ten()).drop("step"))
    with pytest.raises(ValueError, match="more than one row a step"):
        staleness(metrics_of([Step(1), Step(1)]))


def test_figures_draw_into_given_axes() -> None:
    figure = Figure()
    upper, lower = figure.subplots(2, 1)
    assert staleness(metrics_of(ten()), ax=[upper, lower]) is figure
    assert upper.lines
    assert lower.lines
    other = Figure()
    assert age_heatmap(counts_of(ten()), ax=other.add_subplot()) is other


def test_matplotlib_is_imported_late_and_pyplot_never() -> None:
    code = """
import sys, traceage.figures, traceage.report
assert "matplotlib" not in sys.modules
import polars as pl
traceage.figures.age_heatmap(pl.DataFrame({"step": [1], "age": [0], "tokens": [3]}))
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def environment(**more: str) -> dict[str, str]:
    """The environment of a child that imports the same traceage."""
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path]), **more}


# --- the page -----------------------------------------------------------------------------------


def test_page_says_what_was_read_and_how_to_read_it(tmp_path: Path) -> None:
    page = report(tmp_path, ten(), notes=["2 lines skipped: not JSON"], sources=["runs/a", "b.zst"])
    assert page.source.startswith("<!doctype html>\n")
    assert page.all("title") == page.all("h1") == ["A run"]
    assert page.all("code") == ["runs/a", "b.zst"]
    assert page.all("ul", class_="notes") == ["2 lines skipped: not JSON"]
    (text,) = page.all("section", **{"aria-labelledby": "how"})
    for term in ("age", "Coverage", "in flight", "in queue", "mixed"):
        assert term in text
    assert len(page.all("figure")) == len(page.all("figcaption")) == 3
    labels = [attrs["aria-label"] or "" for tag, attrs in page.tags if tag == "svg"]
    light, dark, steps, last = labels  # a map is an image, and stands there in both themes
    assert light == dark
    assert "steps 1 to 10, ages 0 to 4" in light
    assert "mean episode staleness: 1.50" in steps
    assert last == (
        "Share of the labelled tokens of step 10 by age. age 0: 40.6%; age 1: 21.6%; age 2: 15.3%;"
        " age 3: 12.2%; age 4: 10.3%."
    )


def test_many_sources_fold(tmp_path: Path) -> None:
    page = report(tmp_path, ten(), sources=[f"runs/{n}" for n in range(30)])
    assert page.all("summary") == ["Table by step", "30 sources"]
    assert len(page.all("code")) == 30
    assert report(tmp_path, ten(), sources=["runs/0"]).all("summary") == ["Table by step"]


def test_table_holds_the_metrics(tmp_path: Path) -> None:
    steps = [*ten(), Step(11, unlabelled=12_345, flight=None, not_shipped=None, mixed=0)]
    rows = report(tmp_path, steps).rows()
    assert len(rows) == 11
    assert rows[1] == [
        *("2", "4", "0", "1,528", "100%"),
        *("0.34", "0", "1", "1"),
        *("1.50", "3", "66.7%", "33.3%", "50.0%"),
    ]
    assert rows[10] == ["11", "4", "-", "12,345", "0%", *"---------"[:8], "0%"]


def test_text_table_and_page_say_the_same(tmp_path: Path) -> None:
    for steps in (ten(), negative(), long(), by_env("math", "code")):
        text = summary_table(metrics_of(steps, by_env=steps[0].env is not None))
        cells = [text_row.split() for text_row in text.splitlines()[2:]]
        assert cells == report(tmp_path, steps).rows()


def test_totals_are_exact(tmp_path: Path) -> None:
    steps = ten()
    page = report(tmp_path, steps)
    tokens = [age for s in steps for age, n in s.ages.items() for _ in range(n)]
    (shown,) = re.findall(r'<dl class="tiles">.*?</dl>', page.source, re.DOTALL)
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", shown)) == {
        "steps": "10",
        "sampled tokens": f"{len(tokens):,}",
        "coverage": "100%",
        "token age, mean": f"{sum(tokens) / len(tokens):.2f}",
        "token age, p95": str(sorted(tokens)[math.ceil(0.95 * len(tokens)) - 1]),
        "token age, max": "4",
    }


def test_negative_ages_are_said_before_the_figures(tmp_path: Path) -> None:
    page = report(tmp_path, negative())
    (fault,) = page.all("p", role="note")
    assert "90 tokens in 2 steps have a negative age (lowest -2)" in fault
    assert page.source.index('role="note"') < page.source.index("<svg")
    assert page.all("td", class_="bad") == ["-2", "-2"]
    assert "min" not in report(tmp_path, ten()).all("th")


def test_no_labelled_token(tmp_path: Path) -> None:
    page = report(tmp_path, unlabelled())
    assert "No token carries a policy version" in page.all("p", role="note")[0]
    assert all(set(row[5:13]) == {"-"} for row in page.rows())


def test_nothing_read(tmp_path: Path) -> None:
    page = report(tmp_path, [], sources=[])
    assert page.all("td") == ["Nothing was read."]
    assert page.data["metrics"] == []


def test_without_steps_the_table_stands_alone(tmp_path: Path) -> None:
    metrics = metrics_of([Step(1, {0: 3}, env="math")], by_env=True)
    metrics = metrics.drop("step", "training_version")
    counts = pl.DataFrame({"env": ["math"], "age": [0], "tokens": [3]})
    write_report(tmp_path / "r.html", Study(metrics, counts), title="t")
    page = Page((tmp_path / "r.html").read_text())
    assert not page.all("svg")
    assert page.rows()[0][0] == "math"


def test_a_long_table_scrolls_under_its_head(tmp_path: Path) -> None:
    page = report(tmp_path, long())
    assert len(page.rows()) == 390
    assert page.all("div", class_="scroll tall")
    assert "thead{position:sticky;top:0" in page.source
    assert not report(tmp_path, ten()).all("div", class_="scroll tall")
    assert len(page.source) < 2_000_000


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    steps = [Step(1, {0: 5}, env=NASTY), Step(2, {0: 5}, env=NASTY), Step(1, {0: 5}, env="plain")]
    source = "runs/\"a'<b>&amp;\udc80"
    page = report(tmp_path, steps, title=NASTY, sources=[source], notes=[NASTY, HOSTILE])
    assert not page.all("b")
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "traceage-data"}]
    assert page.source.count("<script") == page.source.count("</script") == 1
    shown = NASTY.replace("\u2028", r"\u2028").replace("\0", r"\x00").replace("\x1b", r"\x1b")
    assert page.all("title") == page.all("h1") == [shown]
    assert page.all("code") == [r"""runs/"a'<b>&amp;\udc80"""]
    assert page.all("li")[-3:] == [r"""runs/"a'<b>&amp;\udc80""", shown, HOSTILE]
    assert shown in page.all("th", scope="row", class_="text")
    data = page.data
    assert data["title"] == NASTY
    assert data["notes"] == [NASTY, HOSTILE]
    assert data["sources"] == [source]
    assert data["metrics"][0]["env"] == NASTY


def test_a_column_name_is_text_too(tmp_path: Path) -> None:
    metrics = metrics_of([Step(1, {0: 3}, env="x")], by_env=True).rename({"env": HOSTILE})
    write_report(tmp_path / "r.html", Study(metrics, counts_of([Step(1, {0: 3})])), title="t")
    page = Page((tmp_path / "r.html").read_text())
    assert HOSTILE in page.all("th")
    assert len(page.all("script")) == 1


LINKS = {"src", "href", "xlink:href", "srcset", "action", "formaction", "poster", "data", "ping"}


@pytest.mark.parametrize("steps", [ten(), long(), negative(), by_env("a", HOSTILE)])
def test_page_stands_alone(tmp_path: Path, steps: list[Step]) -> None:
    page = report(tmp_path, steps)
    assert not re.search(r"https?:|@import|//www|<!DOCTYPE svg", page.source)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in page.tags:
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in LINKS:
                assert value is not None
                assert value.startswith("data:") or (value[1:] in ids and value[0] == "#")
            for target in re.findall(r"url\(([^)]*)\)", value or ""):
                assert target[0] == "#"
                assert target[1:] in ids
    (style, *more) = [text for text in page.all("style") if "--page" in text]
    assert not more
    assert "url(" not in style
    policy = page.tags[[tag for tag, _ in page.tags].index("meta") + 1][1]
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert (policy["content"] or "").startswith("default-src 'none';")


def test_data_is_the_metrics(tmp_path: Path) -> None:
    steps = long()
    data = report(tmp_path, steps).data
    frame = metrics_of(steps)
    assert pl.DataFrame(data["metrics"], schema=frame.schema).equals(frame)
    counts = counts_of(steps)
    assert pl.DataFrame(data["age_counts"], schema=counts.schema).equals(counts)


def test_data_is_strict_json(tmp_path: Path) -> None:
    metrics = metrics_of([Step(1, {0: 3})]).with_columns(
        extra=pl.lit(math.nan), when=pl.date(2026, 1, 2)
    )
    write_report(tmp_path / "r.html", Study(metrics, counts_of([Step(1, {0: 3})])), title="t")
    row = Page((tmp_path / "r.html").read_text()).data["metrics"][0]
    assert row["extra"] is None
    assert row["when"] == "2026-01-02"


# --- writing ------------------------------------------------------------------------------------


def test_write_leaves_only_the_page(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        report(tmp_path, ten())
    finally:
        os.umask(old)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o644


def test_a_reader_keeps_the_page_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with path.open() as reader:
        report(tmp_path, ten())
        assert reader.read() == "old"
    assert path.read_text().startswith("<!doctype html>")


def test_write_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "latest.html").symlink_to(tmp_path / "kept" / "a.html")
    report(tmp_path, ten(), name="latest.html")
    assert (tmp_path / "latest.html").is_symlink()
    assert (tmp_path / "kept" / "a.html").read_text().startswith("<!doctype")


def test_a_failure_keeps_the_old_file(tmp_path: Path) -> None:
    """The disk limit of the child is smaller than the page: the write fails half-way."""
    pytest.importorskip("resource")
    path = tmp_path / "report.html"
    path.write_text("old")
    code = """
import resource, sys
import polars as pl
from traceage.report import write_report
from traceage.study import Study
import matplotlib.figure, matplotlib.backends.backend_svg, matplotlib.style
from test_report import Step, counts_of, metrics_of
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
steps = [Step(1, {0: 3})]
try:
    write_report(sys.argv[1], Study(metrics_of(steps), counts_of(steps)), title="t")
except OSError:
    sys.exit(7)
"""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(path)], env=environment(), cwd=here, check=False
    )
    assert done.returncode == 7
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_bad_input_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(ValueError, match="more than one row a step"):
        report(tmp_path, [Step(1, {0: 1}), Step(1, {0: 1})])
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_unwritable_targets_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        report(tmp_path, ten(), name="missing/report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        report(tmp_path, ten(), name="folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    """In this process, under another matplotlib style, and in a process with another hash seed."""
    report(tmp_path, negative(), name="a.html")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "savefig.dpi": 300}):
        report(tmp_path, negative(), name="b.html")
    code = """
import sys, pathlib
from test_report import negative, report
report(pathlib.Path(sys.argv[1]), negative(), name="c.html")
"""
    here = str(Path(__file__).parent)
    env = environment(PYTHONHASHSEED="77")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, cwd=here, check=True)
    first, *others = ((tmp_path / f"{name}.html").read_bytes() for name in "abc")
    assert others == [first, first]


# --- plain text ---------------------------------------------------------------------------------


def test_summary_table_fits() -> None:
    steps = [Step(10_000 + n, {n % 7: 12_345_678}, not_shipped=99) for n in range(5)]
    lines = summary_table(metrics_of(steps)).splitlines()
    assert len(lines) == 7
    assert max(map(len, lines)) <= 110
    assert "12,345,678" in lines[2]


def test_summary_table_is_one_line_a_row() -> None:
    steps = [Step(1, {0: 1}, env="a\nb\x1b[31m"), Step(1, {0: 1}, env="数学"), Step(1, env=None)]
    lines = summary_table(metrics_of(steps, by_env=True)).splitlines()
    assert len(lines) == 5
    assert r"a\nb\x1b[31m" in lines[2]
    assert lines[4].split()[:2] == ["1", "-"]
    # A wide character takes two columns of a terminal.
    assert lines[2].index("100%") == lines[3].index("100%") + 2


def test_summary_table_of_nothing() -> None:
    assert len(summary_table(metrics_of([])).splitlines()) == 2


@given(st.floats(0, 1))
def test_percent_keeps_none_and_all_apart_from_nearly(share: float) -> None:
    text = percent(share)
    assert (text == "100%") == (share == 1)
    assert (text == "0%") == (share == 0)
    assert not text.startswith(("100.", "0.0"))


# --- a browser ----------------------------------------------------------------------------------

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


def browse(page: Path, folder: Path) -> tuple[str, list[str]]:
    """The document as the browser built it, and the addresses that the page asked for."""
    assert CHROMIUM is not None
    log = folder / "net.json"
    done = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser's own calls stay here, too
            f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={log}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    content = json.loads(log.read_text())
    started = content["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    asked = []
    for event in content["events"]:
        parameters = event.get("params", {})
        # What the browser asks for itself has no origin; what a page asks for has one.
        if event["type"] == started and parameters.get("initiator") not in (None, "not an origin"):
            asked.append(parameters["url"])
    return done.stdout, asked


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path to render the page with")
def test_a_browser_renders_the_page_and_asks_for_nothing(tmp_path: Path) -> None:
    steps = [*by_env("math", HOSTILE), Step(9, unlabelled=5, env="math")]
    report(tmp_path, steps, title=NASTY, notes=[HOSTILE, '<img src="http://127.0.0.1:9/note.png">'])
    document, asked = browse(tmp_path / "report.html", tmp_path)
    assert document.count("<svg") == 4
    assert document.count("<tr>") == 2 + len(steps)
    assert document.count("<script") == 1
    assert not asked

    leaky = tmp_path / "leaky.html"  # the check sees a request where there is one
    leaky.write_text('<!doctype html><img src="http://127.0.0.1:9/seen.png">')
    assert browse(leaky, tmp_path)[1] == ["http://127.0.0.1:9/seen.png"]
