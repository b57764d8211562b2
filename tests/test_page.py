"""The page of a whole study and of two, from stored runs and from runs written for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from test_report import (
    CHROMIUM,
    HOSTILE,
    LINKS,
    NASTY,
    Page,
    Step,
    browse,
    counts_of,
    environment,
    metrics_of,
    negative,
    ten,
    unlabelled,
)

from traceage.cli import main
from traceage.figures.costs import NAMES
from traceage.report import write_report
from traceage.report.words import NO_TRAINER, findings
from traceage.study import Study, read_study
from traceage.testing import Record, make_episode, make_trace, write_run

DATA = Path(__file__).parent.parent / "data"
RUN, OTHER = DATA / "capture", DATA / "real-dump"


class Tree(Page):
    """A page that also knows what each tag stands in."""

    def __init__(self, source: str) -> None:
        self.above: list[list[str]] = []
        super().__init__(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.above.append([self.tags[index][0] for index in self.open])
        super().handle_starttag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.above.append([self.tags[index][0] for index in self.open])
        super().handle_startendtag(tag, attrs)

    def section(self, key: str) -> Tree:
        """One section of the page."""
        start = self.source.index(f'<section aria-labelledby="{key}">')
        return Tree(self.source[start : self.source.index("</section>", start) + 10])

    def fold(self, key: str) -> list[list[str]]:
        """The rows of the table whose fold has that id."""
        start = self.source.rindex("<details", 0, self.source.index(f'id="{key}"'))
        return Tree(self.source[start : self.source.index("</details>", start) + 10]).rows()

    @property
    def missing(self) -> list[str]:
        return self.all("p", class_="missing")

    @property
    def labels(self) -> list[str]:
        """The text alternatives of the drawings."""
        return [attrs["aria-label"] or "" for tag, attrs in self.tags if tag == "svg"]


def page_of(folder: Path, study: Study, compare: Study | None = None, title: str = "t") -> Tree:
    path = folder / "report.html"
    write_report(path, study, compare, title=title)
    return Tree(path.read_text(encoding="utf-8"))


def bare() -> Study:
    return Study(metrics_of(ten()), counts_of(ten()))


@pytest.fixture(scope="module")
def study() -> Study:
    return read_study(RUN, quiet=True)


@pytest.fixture(scope="module")
def other() -> Study:
    return read_study(OTHER, quiet=True)


def hostile(number: int = 0) -> list[Record]:
    """A batch of step 5 whose every name is hostile, of two environments and two agents."""
    names = [f'{NASTY} x id="kl" #0b5a93', f"{HOSTILE}$\\frac{{", '"><b>&amp;']
    return [
        make_episode(
            [
                make_trace(
                    [[(k, 40), (4, 7), ("default", 2), (None, 1)], [(5, 3)]],
                    reward=k / 3,
                    agent=names[k % 2],
                    mismatch=0.01 * k,
                    id=f"{name} {k} {number}",
                )
            ],
            policy=(k, 4),
            env=name,
            group=name,
            id=f"{name} {k} episode {number}",
        )
        for k, name in enumerate([*names, names[0]])
    ]


# --- sections -----------------------------------------------------------------------------------

SECTIONS = {
    "ages": "How old the tokens were",
    "whence": "Where the age comes from",
    "mismatch": "Does staleness hurt",
    "limits": "What a limit would do",
    "envs": "By environment",
    "read": "What was read",
    "how": "How to read this",
}


def test_a_study_fills_every_section(tmp_path: Path, study: Study) -> None:
    page = page_of(tmp_path, study)
    assert page.all("h2") == list(SECTIONS.values())
    assert not page.missing
    figures = {"ages": 5, "whence": 1, "mismatch": 1, "limits": 1, "envs": 0, "read": 0}
    assert {key: len(page.section(key).labels) for key in figures} == figures
    tables = {
        "ages": ["Table by step"],
        "whence": [
            "Table by place in the completion",
            "Table by length of the completion",
            "Table by turn",
            "Table by agent",
            "Table by reward of the trace",
            "Table versions a trace",
        ],
        "mismatch": ["Table mismatch by age"],
        "limits": ["Table by policy and threshold"],
        "envs": ["Table by environment"],
    }
    assert {key: page.section(key).all("summary") for key in tables} == tables


def test_the_answers_stand_before_the_figures(tmp_path: Path, study: Study) -> None:
    page = page_of(tmp_path, study)
    answers = re.findall(r'<dl class="answers">(.*?)</dl>', page.source, re.DOTALL)
    (found,) = answers
    assert Page(found).all("dd") == [f"{f.answer} {f.why}" for f in findings(study)]
    assert page.source.index(found) < page.source.index("<svg")
    assert page.data["findings"] == [f"{f.question} {f.answer} {f.why}" for f in findings(study)]


@pytest.mark.parametrize(("steps", "marked"), [(ten(), 0), (negative(), 1), (unlabelled(), 1)])
def test_an_answer_that_tells_of_a_fault_is_marked(
    tmp_path: Path, steps: list[Step], marked: int
) -> None:
    page = page_of(tmp_path, Study(metrics_of(steps), counts_of(steps)))
    assert len(page.all("div", class_="bad")) == marked


def test_sections_say_what_is_missing(tmp_path: Path) -> None:
    page = page_of(tmp_path, bare())
    assert page.all("h2") == list(SECTIONS.values())
    said = {key: page.section(key).missing for key in SECTIONS}
    assert said == {
        "ages": [],
        "whence": ["Nothing but the steps was counted."],
        "mismatch": [NO_TRAINER],
        "limits": ["No tokens that a batch trained on were counted by trace."],
        "envs": ["Nothing was counted by environment."],
        "read": [],
        "how": [],
    }
    assert page.section("read").all("p") == ["Nothing named."]


def test_any_table_may_be_missing(tmp_path: Path, other: Study) -> None:
    parts = (
        replace(other, by_env=None, by_reward=None, trend=None, sources=()),
        replace(other, versions=None, index_counts=None, masking=None),
        replace(other, batch=None, mismatch=None, breakdowns={}),
    )
    for part in parts:
        page = page_of(tmp_path, part)
        assert page.all("h2") == list(SECTIONS.values())
        assert len(page.labels) >= 5


def test_traces_without_rewards_and_policies_are_said_to_be(tmp_path: Path) -> None:
    trace = make_trace([[(0, 5)]])
    page = page_of(tmp_path, read_study(write_run(tmp_path / "run", {2: [trace]})))
    assert page.section("whence").missing == [
        "In flight and in queue: no episode tells its policies.",
        "Ages by reward: no rewards, or all traces have the same.",
    ]


def test_the_tables_are_those_of_the_study(tmp_path: Path, study: Study) -> None:
    page = page_of(tmp_path, study)
    mismatch, masking, versions = study.mismatch, study.masking, study.versions
    assert mismatch is not None
    assert masking is not None
    assert versions is not None
    rows = page.section("mismatch").rows()
    assert [row[1] for row in rows] == [f"{n:,}" for n in mismatch["tokens"]]
    assert [row[3] for row in rows] == [f"{kl:.3g}" for kl in mismatch["mismatch_kl"]]
    rows = page.section("limits").rows()
    assert [row[:3] for row in rows] == [
        [NAMES[policy], str(k), f"{kept:,}"]
        for policy, k, kept in masking.select("policy", "max_age", "kept_tokens").rows()
    ]
    rows = page.fold("versions")
    assert [row[:2] for row in rows] == [[str(v), f"{n:,}"] for v, n in versions.rows()]
    assert page.data["mismatch"] == json.loads(json.dumps(mismatch.to_dicts()))
    assert page.data["masking"] == json.loads(json.dumps(masking.to_dicts()))


# --- its make -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["full", "bare", "two", "twice", "half", "hostile"])
def page(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    study: Study,
    other: Study,
) -> Tree:
    """Pages of every make."""
    folder = tmp_path_factory.mktemp(request.param)
    half = replace(other, mismatch=None, trend=None, masking=None, batch=None, by_env=None)
    pages: dict[str, tuple[Study, Study | None]] = {
        "full": (study, None),
        "bare": (bare(), None),
        "two": (study, other),
        "twice": (other, other),
        "half": (half, study),
        "hostile": (read_study(write_run(folder, {5: hostile()})), study),
    }
    return page_of(folder, *pages[request.param])


def test_headings_are_in_order(page: Tree) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


def test_the_links_name_the_sections(page: Tree) -> None:
    links = [
        (attrs["href"], text)
        for (tag, attrs), text in zip(page.tags, map("".join, page.texts), strict=True)
        if tag == "a"
    ]
    headings = [
        (f"#{attrs['id']}", text)
        for (tag, attrs), text in zip(page.tags, map("".join, page.texts), strict=True)
        if tag == "h2"
    ]
    assert links == headings


def targets(page: Tree) -> Iterator[str]:
    """The ids that something on the page points to."""
    for _, attrs in page.tags:
        for name, value in attrs.items():
            if name in ("aria-labelledby", "aria-describedby", "for"):
                yield from (value or "").split()
            elif name == "href" and (value or "").startswith("#"):
                yield (value or "")[1:]
            yield from re.findall(r"url\(#([^)]*)\)", value or "")


def test_ids_are_unique_and_there(page: Tree) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert set(targets(page)) <= set(ids)


def test_figures_have_words_and_tables_stand_behind_folds(page: Tree) -> None:
    tags = [(*tag, above) for tag, above in zip(page.tags, page.above, strict=True)]
    drawings = [(attrs, above) for tag, attrs, above in tags if tag == "svg"]
    assert len(drawings) >= 4
    for attrs, above in drawings:
        assert attrs["role"] == "img"
        assert len(attrs["aria-label"] or "") > 20
        assert "figure" in above
    open_tables = [above for tag, _, above in tags if tag == "table" and "details" not in above]
    assert len(open_tables) == ("Two runs side by side" in page.all("h2"))  # the answers
    assert len(page.all("figcaption")) == len(page.all("figure"))
    assert all(page.all("figcaption"))
    assert len(page.all("summary")) == len(page.all("details"))


def test_nothing_runs_and_nothing_is_requested(page: Tree) -> None:
    for tag, attrs in page.tags:
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        if tag == "script":
            assert attrs == {"type": "application/json", "id": "traceage-data"}
        for name, value in attrs.items():
            assert not name.startswith("on")
            if name in LINKS:
                assert (value or "").startswith(("#", "data:"))
    assert not re.search(r"https?:|@import|//www", page.source)
    assert "default-src 'none'" in page.source
    assert page.source.count("<script") == page.source.count("</script") == 1


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path to render the page with")
def test_a_browser_shows_two_hostile_runs_and_asks_for_nothing(tmp_path: Path) -> None:
    notes = [HOSTILE, '<img src="http://127.0.0.1:9/note.png">']
    one, two = (
        replace(read_study(write_run(tmp_path / name, {5: hostile(k)})), notes=notes)
        for k, name in enumerate(("a<b>", "b"))
    )
    page = page_of(tmp_path, one, two, title=NASTY)
    document, asked = browse(tmp_path / "report.html", tmp_path)
    assert not asked
    assert document.count("<script") == 1
    assert document.count("<svg") == len(page.labels) > 12
    assert document.count("<table") == len(page.all("table"))
    assert "<img" not in document
    assert "<b>" not in document


# --- hostile names ------------------------------------------------------------------------------


def test_hostile_names_stay_text_everywhere(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>&'\"", {5: hostile(), 6: hostile(1)})
    study = replace(read_study(run), notes=[NASTY])
    page = page_of(tmp_path, study, read_study(run), title=NASTY)
    assert not page.all("b")
    assert len(page.all("title")) == 1
    assert len(page.all("style")) > 1  # the page's, and those that matplotlib puts in drawings
    assert str(run) in page.all("code")
    shown = NASTY.replace("\u2028", r"\u2028").replace("\0", r"\x00").replace("\x1b", r"\x1b")
    name = f'{shown} x id="kl" #0b5a93'
    headings = page.section("envs").all("th", scope="row")
    assert sorted(headings) == sorted([name, f"{HOSTILE}$\\frac{{", '"><b>&amp;'])
    agents = page.section("whence").all("th", scope="row")
    assert {name, f"{HOSTILE}$\\frac{{"} <= set(agents)
    assert {f"{name[:27]}…", '"><b>&amp;'} <= set(page.section("envs").all("text"))
    assert "\0" not in page.source
    assert "\x1b" not in page.source
    assert page.section("compare").all("th", scope="col")[0].endswith("(first)")


# --- two runs -----------------------------------------------------------------------------------


def test_two_runs_stand_side_by_side(tmp_path: Path, study: Study, other: Study) -> None:
    page = page_of(tmp_path, study, other)
    assert page.all("h2") == ["Two runs side by side", *SECTIONS.values()]
    part = page.section("compare")
    assert part.all("th", class_="text")[:2] == ["capture", "real-dump"]
    for one, two in zip(findings(study), findings(other), strict=True):
        said = [f"{f.answer} {f.why}" for f in (one, two)]
        row = [one.question, *said]
        assert all(text in part.all("tr")[findings(study).index(one) + 1] for text in row)
    assert part.all("h3") == [
        "Mismatch by age: capture",
        "Mismatch by age: real-dump",
        "What a limit would do: capture",
        "What a limit would do: real-dump",
    ]
    assert len(part.labels) == 5
    assert {"capture", "real-dump"} <= set(part.all("text"))  # the legend of the first figure
    for name, label in zip((study, other), part.labels[1:3], strict=True):
        assert name.mismatch is not None
        first = name.mismatch.filter(pl.col("age") == 0)["mismatch_kl"].item()
        assert f"age 0: {first:.3g};" in label
    assert part.all("summary") == [
        "Table by step and run",
        *["Table mismatch by age"] * 2,
        *["Table by policy and threshold"] * 2,
    ]
    rows = part.rows()
    assert len(rows) >= 5


def test_the_table_of_two_runs_has_the_steps_of_both(
    tmp_path: Path, study: Study, other: Study
) -> None:
    rows = page_of(tmp_path, study, other).fold("two-table")
    assert len(rows) == study.metrics.height + other.metrics.height
    assert [row[:2] for row in rows[:4]] == [
        ["1", "capture"],
        ["1", "real-dump"],
        ["2", "capture"],
        ["2", "real-dump"],
    ]


def test_a_run_beside_one_without_a_trainer(tmp_path: Path, study: Study) -> None:
    plain = read_study(write_run(tmp_path / "plain", {5: [make_trace([[(3, 4)]])]}))
    part = page_of(tmp_path, plain, study).section("compare")
    assert part.missing == [NO_TRAINER]
    assert len(part.labels) == 4
    assert "Not told. " + NO_TRAINER in part.all("td", class_="text words")


def test_a_run_beside_itself_has_two_names(tmp_path: Path, other: Study) -> None:
    part = page_of(tmp_path, other, other).section("compare")
    assert part.all("th", class_="text")[:2] == [f"{OTHER} (first)", f"{OTHER} (second)"]
    cells = part.all("td", class_="text words")
    assert cells[::2] == cells[1::2]


@pytest.mark.parametrize(
    ("one", "two", "names"),
    [
        (["runs/a"], ["runs/b"], ["a", "b"]),
        (["/x/runs/a/"], ["/x/runs/a/b"], ["a", "a/b"]),
        (["runs/a/x"], ["runs/b/x"], ["a/x", "b/x"]),
        (["/x/a"], ["b"], ["/x/a", "b"]),
        (["r/a", "r/b"], ["r/a"], ["r/a, r/b", "r/a"]),
        ([], [], ["- (first)", "- (second)"]),
        ([Path("r/a")], ["./r/a"], ["r/a (first)", "r/a (second)"]),
    ],
)
def test_what_two_runs_are_called(
    tmp_path: Path, one: list[str], two: list[str], names: list[str]
) -> None:
    part = page_of(tmp_path, replace(bare(), sources=one), replace(bare(), sources=two))
    assert part.section("compare").all("th", class_="text")[:2] == names


# --- equal bytes, and few -----------------------------------------------------------------------


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    """However they are read, and in a process with another hash seed."""
    code = """
import pathlib, sys
from test_page import RUN, page_of
from traceage.study import read_study
page_of(pathlib.Path(sys.argv[1]), read_study(RUN, workers=1, quiet=True))
"""
    here, environ = str(Path(__file__).parent), environment(PYTHONHASHSEED="77")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environ, cwd=here, check=True)
    there = (tmp_path / "report.html").read_bytes()
    page_of(tmp_path, read_study(RUN, workers=2, quiet=True))
    assert (tmp_path / "report.html").read_bytes() == there


def test_a_long_run_makes_a_page_that_can_be_mailed(tmp_path: Path) -> None:
    """A thousand steps, four environments, forty ages."""

    def batch(step: int) -> list[Record]:
        return [
            make_episode(
                [
                    make_trace(
                        [[(step - 1 - age, 3) for age in range(39 - k, -1, -4)]],
                        id=f"{step} {k}",
                        reward=k / 4,
                        mismatch=0.01,
                    )
                ],
                policy=(step - 40, step - 1),
                env=f"environment-{k}",
                id=f"episode {step} {k}",
            )
            for k in range(4)
        ]

    study = read_study(write_run(tmp_path / "run", {step: batch(step) for step in range(99, 1099)}))
    assert study.counts.height == 40 * 1000
    page = page_of(tmp_path, study)
    assert len(page.source.encode()) < 3_000_000
    assert len(page.section("ages").rows()) == len(page.data["metrics"]) == 1000


# --- the command --------------------------------------------------------------------------------


def test_a_report_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.html"
    assert main(["report", str(RUN), "-o", str(path), "--compare", str(OTHER), "--quiet"]) == 0
    assert "(first)" not in path.read_text()
    assert Tree(path.read_text()).section("compare").all("th", class_="text")[1] == "real-dump"
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "40"  # the table is of the first
    assert main(["report", str(OTHER), "-o", str(path), "--compare", str(OTHER), "--quiet"]) == 0
    assert "(second)" in path.read_text()


def test_compare_needs_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RUN), "--compare", str(OTHER)]) == 2
    assert "-o FILE.html" in capsys.readouterr().err


@pytest.mark.parametrize(("faulty", "mismatch"), [([], 0.01), ([0], 0.01), ([1], None)])
def test_the_status_tells_of_faults_in_either_run(
    tmp_path: Path,
    faulty: list[int],
    mismatch: float | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = []
    for k in range(2):
        trace = make_trace([[(0, 5)]], mismatch=mismatch)
        run = write_run(tmp_path / f"run-{k}", {2: [trace]}, layout="steps")
        if k in faulty:
            (stored,) = run.rglob("effective/traces.jsonl")
            stored.write_text("no json\n" + stored.read_text())
        runs.append(str(run))
    path = tmp_path / "r.html"
    command = ["report", runs[0], "-o", str(path), "--compare", runs[1]]
    assert main([*command, "--quiet", "--on-error", "skip"]) == (3 if faulty else 0)
    said = capsys.readouterr().err.splitlines()
    assert ["skipped 1 x" in line for line in said] == [True] * len(faulty)
    assert len(Tree(path.read_text()).all("ul", class_="notes")) == (0 in faulty)
    if faulty:
        before = path.read_bytes()
        assert main([*command, "--quiet"]) == 2
        assert path.read_bytes() == before
