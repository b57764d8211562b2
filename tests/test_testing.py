"""Traces made for users' tests: they are what was asked for, and real records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traceage as ta
from traceage.formats.content import stream_content
from traceage.testing import Label, Layout, Record, Runs, make_episode, make_trace, write_run

ROOT = Path(__file__).parent.parent

LAYOUTS: tuple[Layout, ...] = ("store", "steps")
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


# --- by hand --------------------------------------------------------------------------------------


def test_ages_are_those_of_the_runs() -> None:
    trace = make_trace([[("3", 2), (5, 1), ("default", 4), (None, 1)], [], [("6", 1), ("8", 1)]])
    assert ta.token_policy_ages(trace, 7).tolist() == [4, 4, 2, 1, -1]
    answers = trace["nodes"][1::2]
    assert [node.get("weight_versions") for node in answers] == [
        [
            {"version": "3", "start": 0, "end": 2},
            {"version": "5", "start": 2, "end": 3},
            {"version": "default", "start": 3, "end": 7},
        ],
        [],
        [{"version": "6", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}],
    ]
    versions = ta.node_policy_versions(answers[0]).to_list()
    assert versions == [3, 3, 5, *[None] * 5]


def test_a_trace_is_a_chain_of_prompts_and_completions() -> None:
    nodes = make_trace([[("3", 4)], [(None, 2)]], prompt_tokens=3)["nodes"]
    assert [node.get("parent") for node in nodes] == [None, 0, 1, 2]
    assert [node["sampled"] for node in nodes] == [False, True, False, True]
    assert [node["mask"] for node in nodes] == [
        [False] * 3,
        [False] * 2 + [True] * 4,
        [False] * 3,
        [False] * 2 + [True] * 2,
    ]
    for node in nodes:
        assert len(node["token_ids"]) == len(node["mask"])
        assert len(node["logprobs"]) == sum(node["mask"])
        assert all(-3 <= logprob <= -1 for logprob in node["logprobs"])
    # An engine that labels nothing leaves the field out.
    assert "weight_versions" not in nodes[3]


def test_equal_calls_give_equal_records_and_others_other_ids() -> None:
    def made() -> list[Record]:
        runs: list[Runs] = [[("3", 4), (None, 2)]]
        return [
            make_trace(runs),
            make_trace(runs, reward=0.5),
            make_trace(runs, prompt_tokens=9),
            make_trace(runs, agent="judge"),
            make_trace(runs, trainable=False),
            make_trace(runs, mismatch=0.01),
            make_trace(runs, advantage=0.01),
            make_trace(runs, entropy=0.01),
            make_trace([*runs, []]),
            make_trace(runs, id="mine"),
        ]

    first, second = made(), made()
    assert first == second
    assert len({trace["id"] for trace in first}) == len(first)
    assert first[-1]["id"] == "mine"
    # Versions are labels either way.
    assert make_trace([[(3, 4), (None, 2)]]) == first[0]
    sampled = [tuple(trace["nodes"][1]["token_ids"]) for trace in first]
    assert len(set(sampled)) == len(sampled)
    episodes = [make_episode(first[:1], policy=policy) for policy in (None, (1, 2), (1, 2))]
    assert episodes[1] == episodes[2]
    assert episodes[0]["id"] != episodes[1]["id"]


def test_a_process_of_its_own_makes_the_same() -> None:
    """No hash seed, no clock."""
    code = "import json, traceage.testing as t; print(json.dumps(t.make_trace([[('3', 9)]])))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(done.stdout) == make_trace([[("3", 9)]])


@each_layout
def test_streams_reach_the_tokens(tmp_path: Path, layout: Layout) -> None:
    trace = make_trace(
        [[("3", 2)], [("4", 1)]], reward=0.25, mismatch=0.01, advantage=-0.5, entropy=1 / 3
    )
    run = write_run(tmp_path, {5: [trace]}, layout=layout)
    tokens = ta.scan_tokens(run).collect()
    expected = [logprob for node in trace["nodes"] for logprob in node["logprobs"]]
    assert tokens["logprob"].to_list() == pytest.approx(expected)
    difference = (tokens["trainer_logprob"] - tokens["logprob"]).to_list()
    assert difference == pytest.approx([0.01] * 3, abs=1e-6)
    assert tokens["advantage"].to_list() == [-0.5] * 3
    assert tokens["entropy"].to_list() == pytest.approx([0.3333] * 3)
    assert tokens["age"].to_list() == [1, 1, 0]
    assert tokens["reward"].to_list() == [0.25] * 3
    bare = write_run(tmp_path / "bare", {5: [make_trace([[("3", 2)]])]}, layout=layout)
    stamped = ta.scan_tokens(bare, ["trainer_logprob", "advantage", "entropy", "reward"]).collect()
    assert stamped.null_count().row(0) == (2, 2, 2, 2)


@each_layout
def test_a_run_holds_what_its_records_say(tmp_path: Path, layout: Layout) -> None:
    trace = make_trace([[("3", 2)]], id="t", agent="solver")
    judge = make_trace([[("default", 3)]], id="j", agent="judge", trainable=False)
    episode = make_episode([trace, judge], policy=(3, 4), id="e", env="math", group="g")
    run = write_run(tmp_path / "run", {6: [episode]}, layout=layout)
    assert run == tmp_path / "run"
    rows = ta.scan_spans(run, include_frozen=True).collect()
    columns = ("step", "training_version", "kind", "env", "group_id", "episode_id", "trace_id")
    assert rows.select(columns).rows() == [
        (6, 5, "train", "math", "g", "e", "t"),
        (6, 5, "train", "math", "g", "e", "j"),
    ]
    assert rows.select("agent", "trainable", "policy_start", "policy_end").rows() == [
        ("solver", True, 3, 4),
        ("judge", False, 3, 4),
    ]
    (row,) = ta.off_policy_metrics(ta.scan_spans(run)).to_dicts()
    # Trained at version 5, it started at 3: one step in flight, one in the queue.
    staleness = ("off_policy/mean", "off_policy/in_flight/mean", "off_policy/in_queue/mean")
    assert [row[name] for name in staleness] == [2, 1, 1]


@each_layout
def test_evals_stand_at_their_step_and_train_nowhere(tmp_path: Path, layout: Layout) -> None:
    evaluated = make_episode([make_trace([[("2", 3)]])], policy=(2, 2), kind="eval")
    trained = make_trace([[("2", 5)]])
    run = write_run(tmp_path, {3: [trained, evaluated]}, layout=layout)
    assert ta.scan_spans(run).collect()["length"].to_list() == [5]
    rows = ta.scan_spans(run, kind="eval").select("step", "kind", "length").collect()
    assert rows.rows() == [(3, "eval", 3)]


def test_a_store_says_of_what_trained_alone_that_it_did(tmp_path: Path) -> None:
    judge = make_trace([[("0", 1)]], id="judge", trainable=False)
    episode = make_episode([make_trace([[("0", 1)]], id="solver"), judge])
    evaluated = make_episode([make_trace([[("0", 1)]], id="evaluated")], kind="eval")
    lost = make_trace([[("0", 1)]], id="lost")
    run = write_run(tmp_path, {3: [episode, evaluated]}, not_shipped={3: [lost]})
    index = run / "monitors/file/traces/annotations/orch.index.jsonl"
    words = [json.loads(line) for line in index.read_text().splitlines()]
    assert [(word["trace_id"], word["info"]["ship"]["step"]) for word in words] == [("solver", 3)]


def test_what_no_batch_took(tmp_path: Path) -> None:
    def arrivals() -> dict[str, Any]:
        late = make_episode([make_trace([[("1", 4)]], id="late")], policy=(1, 1))
        return {
            "batches": {1: [make_trace([[("0", 2)]])], 2: [make_trace([[("1", 2)]])]},
            "not_shipped": {2: [late], 4: [make_trace([[("1", 7)]], id="last")]},
        }

    store = write_run(tmp_path / "store", **arrivals())
    figures = ta.off_policy_metrics(ta.scan_spans(store))
    assert figures.select("step", "episodes", "not_shipped", "sampled_tokens").rows() == [
        (1, 1, 0, 2),
        (2, 1, 1, 2),
        (4, 0, 1, 0),
    ]
    steps = write_run(tmp_path / "steps", layout="steps", **arrivals())
    trained = ta.off_policy_metrics(ta.scan_spans(steps))
    assert trained.select("step", "sampled_tokens").rows() == [(1, 2), (2, 2)]
    for run in (store, steps):
        arrived = ta.scan_spans(run, subset="all").group_by("step").agg(pl.col("length").sum())
        assert arrived.sort("step").collect().rows() == [(1, 2), (2, 2 + 4), (4, 7)]


def test_the_records_given_stay_as_they_are(tmp_path: Path) -> None:
    trace = make_trace([[("0", 2)]], mismatch=0.5)
    episode = make_episode([trace])
    before = json.dumps(episode)
    write_run(tmp_path, {1: [episode]})
    assert json.dumps(episode) == before
    assert episode["traces"][0] is trace


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completions",
    [[("3", 10), ("4", 5)], [("10", 5)], [[("3", "10")]], [[("3",)]], [[(3.0, 1)]], [5]],
)
def test_completions_that_are_no_lists_of_runs(completions: Any) -> None:
    with pytest.raises(TypeError, match=r"completion 0 is .*not a list of \(label, tokens\)"):
        make_trace(completions)


def test_fewer_than_no_tokens() -> None:
    with pytest.raises(ValueError, match="completion 1: run '4' has -2 tokens"):
        make_trace([[("3", 1)], [("4", -2)]])
    with pytest.raises(ValueError, match="prompt_tokens is -1"):
        make_trace([], prompt_tokens=-1)


def test_a_policy_that_ends_before_it_starts() -> None:
    with pytest.raises(ValueError, match=r"policy \(5, 4\) ends before it starts"):
        make_episode([], policy=(5, 4))


@each_layout
def test_a_run_is_not_mixed_with_another(tmp_path: Path, layout: Layout) -> None:
    for other in LAYOUTS:
        folder = tmp_path / other
        write_run(folder, {1: [make_trace([[("0", 1)]])]}, layout=other)
        before = sorted(folder.rglob("*"))
        with pytest.raises(FileExistsError, match=f"{other}/.*a run is there"):
            write_run(folder, {2: [make_trace([[("1", 1)]])]}, layout=layout)
        assert sorted(folder.rglob("*")) == before


@each_layout
def test_runs_that_no_run_could_write(tmp_path: Path, layout: Layout) -> None:
    trace = make_trace([[("0", 1)]], id="t")
    frozen = make_episode([make_trace([[("0", 1)]], trainable=False)], id="e")
    other = make_trace([[("1", 1)]])
    cases: list[tuple[dict[int, list[Record]], str]] = [
        ({1: [trace], 2: [make_episode([trace])]}, "trace t stands at step 1 and again at step 2"),
        ({1: [make_episode([trace, trace])]}, "trace t stands at step 1 and again at step 1"),
        (
            {1: [make_episode([one], id="e") for one in (trace, other)]},
            "episode e stands at step 1 and again at step 1",
        ),
        ({3: [frozen]}, "step 3: episode e has no trace of a trainable agent"),
        ({3: [make_episode([], id="e")]}, "step 3: episode e has no trace of a trainable agent"),
    ]
    for batches, message in cases:
        with pytest.raises(ValueError, match=message):
            write_run(tmp_path / "run", batches, layout=layout)
    with pytest.raises(ValueError, match="layout 'other' is not known"):
        write_run(tmp_path / "run", {}, layout="other")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    # What no batch took may well be of a frozen agent.
    write_run(tmp_path / "run", {}, not_shipped={3: [frozen]}, layout=layout)


# --- any runs -------------------------------------------------------------------------------------

labels: st.SearchStrategy[Label] = st.one_of(
    st.none(), st.just("default"), st.integers(0, 12), st.integers(0, 12).map(str)
)
run_lists = st.lists(st.tuples(labels, st.integers(0, 5)), max_size=4)
completion_lists = st.lists(run_lists, max_size=3)
policies = st.one_of(
    st.none(), st.tuples(st.integers(0, 6), st.integers(0, 3)).map(lambda p: (p[0], p[0] + p[1]))
)


class Asked:
    """Batches as they were asked for: the completions of each trace by its id, and the records."""

    def __init__(self) -> None:
        self.completions: dict[str, list[list[tuple[Label, int]]]] = {}
        self.batches: dict[int, list[Record]] = {}
        self.not_shipped: dict[int, list[Record]] = {}

    def trace(self, completions: list[list[tuple[Label, int]]]) -> Record:
        name = f"t{len(self.completions)}"
        self.completions[name] = completions
        return make_trace(completions, id=name)

    def runs(self, records: Sequence[Record]) -> set[tuple[Any, ...]]:
        """(trace, node, start, end, label) of every run of the records."""
        found: set[tuple[Any, ...]] = set()
        for trace_id in (one["id"] for record in records for one in record.get("traces", [record])):
            completions = self.completions[trace_id]
            if not completions:
                found.add((trace_id, None, 0, 0, None))
            for turn, completion in enumerate(completions):
                found |= {(trace_id, 2 * turn + 1, *run) for run in expected_runs(completion)}
        return found


def expected_runs(completion: list[tuple[Label, int]]) -> list[tuple[int, int, str | None]]:
    """One label a token, and neighbours of one label joined."""
    tokens = [
        None if label is None else str(label) for label, count in completion for _ in range(count)
    ]
    runs: list[tuple[int, int, str | None]] = []
    for label, group in groupby(tokens):
        start = runs[-1][1] if runs else 0
        runs.append((start, start + len(list(group)), label))
    return runs or [(0, 0, None)]


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    made = Asked()

    def record() -> Record:
        traces = [
            made.trace(drawn) for drawn in draw(st.lists(completion_lists, min_size=1, max_size=3))
        ]
        if len(traces) == 1 and draw(st.booleans()):
            return traces[0]
        return make_episode(traces, policy=draw(policies), env=draw(st.sampled_from("ab")))

    for step in draw(st.lists(st.integers(1, 12), unique=True, min_size=1, max_size=3)):
        made.batches[step] = [record() for _ in range(draw(st.integers(1, 3)))]
    for step in draw(st.lists(st.integers(1, 12), unique=True, max_size=2)):
        made.not_shipped[step] = [record()]
    return made


@each_layout
@settings(max_examples=60, deadline=None)
@given(made=asked())
def test_runs_in_are_runs_out(layout: Layout, made: Asked) -> None:
    with TemporaryDirectory() as folder:
        run = write_run(folder, made.batches, not_shipped=made.not_shipped, layout=layout)
        spans = ta.scan_spans(run).collect()
        everything = ta.scan_spans(run, subset="all").collect()
    place = ("trace_id", "node", "start", "end", "label")
    for step, records in made.batches.items():
        taken = spans.filter(pl.col("trace_id").is_not_null(), step=step)
        assert set(taken.select(place).rows()) == made.runs(records)
        assert taken.height == len(made.runs(records))
    steps = made.batches.keys() | made.not_shipped.keys()
    assert set(everything["step"]) == steps
    for step in steps:
        arrived = everything.filter(step=step)
        here = [one for batch in (made.batches, made.not_shipped) for one in batch.get(step, [])]
        assert set(arrived.select(place).rows()) == made.runs(here)


@each_layout
@settings(max_examples=60, deadline=None)
@given(made=asked())
def test_live_figures_are_those_of_the_written_run(layout: Layout, made: Asked) -> None:
    with TemporaryDirectory() as folder:
        run = write_run(folder, made.batches, not_shipped=made.not_shipped, layout=layout)
        spans = ta.scan_spans(run).collect()
    rows = {row["step"]: row for row in ta.off_policy_metrics(spans).to_dicts()}
    for step, records in made.batches.items():
        live = ta.batch_metrics(records, step=step)
        live["coverage"] = live.pop("off_policy/token/coverage")
        assert live == {name: rows[step][name] for name in live}
        ages = [
            age
            for record in records
            for trace in record.get("traces", [record])
            for age in ta.token_policy_ages(trace, step - 1).tolist()
        ]
        assert len(ages) == rows[step]["labelled_tokens"]
        assert rows[step]["off_policy/token/mean"] == (sum(ages) / len(ages) if ages else None)
        assert rows[step]["off_policy/token/max"] == max(ages, default=None)


# --- real records ---------------------------------------------------------------------------------


def stored_episodes(run: Path) -> list[Record]:
    """The lines of episodes that a run's directory holds."""
    paths = [*run.glob("rollouts/*/*/*/traces.jsonl"), *run.glob("monitors/file/traces/stream/*")]
    contents = [b"".join(stream_content(str(path))) for path in paths]
    return [json.loads(line) for content in contents for line in content.splitlines()]


@each_layout
def test_verifiers_take_every_record_as_theirs(tmp_path: Path, layout: Layout) -> None:
    episodes = pytest.importorskip("verifiers.v1.episode")
    solver = make_trace(
        [[("3", 2), ("4", 1), (None, 2)], [], [(None, 3)]],
        reward=0.5,
        mismatch=0.01,
        advantage=1,
        entropy=0.25,
    )
    judge = make_trace([[("default", 3)]], agent="judge", trainable=False, prompt_tokens=0)
    batches = {
        5: [
            make_episode([solver, judge], policy=(3, 4), group="g", env="math"),
            make_episode([make_trace([[(3, 2)]])], policy=(2, 2), kind="eval"),
            make_trace([[("4", 6)]]),
        ]
    }
    lost = {5: [make_episode([make_trace([])])]}
    written = stored_episodes(write_run(tmp_path, batches, not_shipped=lost, layout=layout))
    # The directories a step hold what trained twice.
    assert len(written) == (4 if layout == "store" else 4 + 3)
    for record in written:
        validated = episodes.WireEpisode.model_validate(record)
        again = json.loads(json.dumps(validated.to_record()))
        for trace, kept, wire in zip(
            record["traces"], again["traces"], validated.traces, strict=True
        ):
            for node, node_kept in zip(trace["nodes"], kept["nodes"], strict=True):
                assert {name: node_kept.get(name) for name in node} == node
            assert len(wire.branches) == bool(trace["nodes"])
            assert ta.token_policy_ages(wire, 4).tolist() == ta.token_policy_ages(trace, 4).tolist()
        assert ta.batch_metrics([validated], 5) == ta.batch_metrics([record], 5)


# --- the plugin -----------------------------------------------------------------------------------


def readme_tests() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n((?:(?!```).)*def test_.*?)```", readme, re.DOTALL)
    assert isinstance(block, str)
    return block


def installed(folder: Path) -> Path:
    """A directory that says of itself what an installation of this project does."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["pytest11"]
    about = folder / "traceage-0.1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: traceage\nVersion: 0.1.0\n")
    lines = [f"{name} = {target}\n" for name, target in points.items()]
    (about / "entry_points.txt").write_text("".join(["[pytest11]\n", *lines]))
    return folder


def run_pytest(folder: Path, *arguments: str, path: Sequence[Path]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir=.", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("loaded", ["installed", "option", "conftest", "all of them"])
def test_the_readmes_tests_pass_however_the_plugin_is_loaded(tmp_path: Path, loaded: str) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "test_logging.py").write_text(readme_tests(), encoding="utf-8")
    path, arguments = [ROOT], []
    if loaded in ("installed", "all of them"):
        path.append(installed(tmp_path / "site"))
    if loaded in ("option", "all of them"):
        arguments = ["-p", "traceage.pytest_plugin"]
    if loaded in ("conftest", "all of them"):
        (folder / "conftest.py").write_text('pytest_plugins = ["traceage.pytest_plugin"]\n')
    assert "2 passed" in run_pytest(folder, *arguments, path=path)


RUNS_OF_THEIR_OWN = """
import traceage as ta
from traceage import testing


def test_each_call_writes_a_run_of_its_own(make_trace, make_episode, trace_run, tmp_path):
    assert (make_trace, make_episode) == (testing.make_trace, testing.make_episode)
    batches = {2: [make_trace([[("1", 4)]])]}
    runs = trace_run(batches), trace_run(batches, layout="steps", not_shipped={3: []})
    assert {run.parent for run in runs} == {tmp_path}
    assert (runs[0] / "monitors").is_dir() and (runs[1] / "rollouts").is_dir()
    assert [ta.scan_spans(run).collect()["length"].sum() for run in runs] == [4, 4]
"""


def test_runs_that_the_fixture_writes_stand_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "test_runs.py").write_text(RUNS_OF_THEIR_OWN)
    assert "1 passed" in run_pytest(tmp_path, "-p", "traceage.pytest_plugin", path=[ROOT])


def test_pytest_starts_without_what_takes_long() -> None:
    code = (
        "import sys, traceage.pytest_plugin; from traceage.testing import make_trace, make_episode;"
        "make_episode([make_trace([[('3', 4)]])]);"
        "print(sorted({'numpy', 'polars', 'pyarrow', 'msgspec', 'torch'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "[]\n"
