"""The command line as a user and as another program meets it."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

import traceage as ta
from traceage.cli import main

DATA = Path(__file__).parent.parent / "data"
STORE, STEPS = str(DATA / "real-dump"), str(DATA / "real-dump-steps")

KEYS = [
    "step",
    "training_version",
    "episodes",
    "traces",
    "sampled_tokens",
    "labelled_tokens",
    "default_tokens",
    "unlabelled_tokens",
    "coverage",
    "not_shipped",
    "mixed_nodes",
    "sampled_nodes",
    "off_policy/token/mean",
    "off_policy/token/max",
    "off_policy/token/min",
    "off_policy/token/p50",
    "off_policy/token/p95",
    "off_policy/token/p99",
    "off_policy/token/in_flight/mean",
    "off_policy/token/in_flight/max",
    "off_policy/token/in_queue/mean",
    "off_policy/token/in_queue/max",
    "off_policy/mean",
    "off_policy/max",
    "off_policy/in_flight/mean",
    "off_policy/in_flight/max",
    "off_policy/in_queue/mean",
    "off_policy/in_queue/max",
]


def traceage(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "traceage", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_metrics_as_json() -> None:
    done = traceage("metrics", STORE, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert all(list(row) == KEYS for row in rows)
    assert rows == ta.off_policy_metrics(ta.scan_spans(STORE)).to_dicts()


def test_json_says_null_for_what_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"id": "t", "nodes": [{"sampled": True, "mask": [True]}]}) + "\n")
    [row] = json.loads(traceage("metrics", str(path), "--step", "4", "--format", "json").stdout)
    assert (row["sampled_tokens"], row["coverage"]) == (1, 0.0)
    absent = [key for key in KEYS if row[key] is None]
    assert absent == ["not_shipped", *(key for key in KEYS if key.startswith("off_policy"))]


@pytest.mark.parametrize("by", ["env", "step,env", "kind,agent", "version"])
def test_metrics_by_other_groups(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", STEPS, "--by", by, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = by.split(",")
    assert list(rows[0])[: len(names)] == names
    assert ("training_version" in rows[0]) == ("step" in names)
    assert sum(row["sampled_tokens"] for row in rows) == 68_927


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", STEPS, "--by", "planet"]) == 2
    assert "no column 'planet'" in capsys.readouterr().err


def test_csv_and_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ta.off_policy_metrics(ta.scan_spans(STEPS))
    assert main(["metrics", STEPS, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(rows[0]) == KEYS
    assert [int(row["sampled_tokens"]) for row in rows] == expected["sampled_tokens"].to_list()
    out = tmp_path / "m.parquet"
    assert main(["metrics", STEPS, "--format", "parquet", "-o", str(out)]) == 0
    assert pl.read_parquet(out).equals(expected)
    assert os.listdir(tmp_path) == ["m.parquet"]
    assert main(["metrics", STEPS, "--format", "parquet"]) == 2
    assert "-o FILE" in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    out.write_text("old")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    command = ["metrics", str(bad), "--step", "1", "--format", "json", "-o", str(out)]
    assert main(command) == 2
    assert out.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["bad.jsonl", "m.json"]


def test_report_prints_its_table_and_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = traceage("report", STORE, "-o", str(page))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[-10].split()[:4] == ["1", "8", "0", "4,151"]
    assert len(lines) == 12
    assert "<svg" in page.read_text()
    assert done.stderr == f"traceage: wrote {page}\n"


def test_skipping_is_counted_said_and_shown_in_the_status(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = json.dumps({"id": "t", "nodes": [{"sampled": True, "mask": [True]}]})
    path.write_text("nonsense\n" + good + "\n[]\n")
    done = traceage("metrics", str(path), "--step", "4")
    assert done.returncode == 2
    assert done.stderr.startswith(f"traceage: error: {path}:1: not JSON")
    assert done.stdout == ""
    done = traceage("metrics", str(path), "--step", "4", "--on-error", "skip", "--quiet")
    assert done.returncode == 3
    assert "skipped 1 x not JSON" in done.stderr
    assert "skipped 1 x not a record" in done.stderr


def test_no_sampled_tokens_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"id": "t", "nodes": [{"sampled": True}]}) + "\n")
    done = traceage("metrics", str(path), "--step", "4")
    assert done.returncode == 2
    assert "no sampled tokens at all in 1 episodes" in done.stderr


def test_reading_options_reach_the_reader(capsys: pytest.CaptureFixture[str]) -> None:
    def token_ages(*options: str) -> list[float]:
        assert main(["metrics", STORE, "--format", "json", *options]) == 0
        return [row["off_policy/token/mean"] for row in json.loads(capsys.readouterr().out)]

    plain = token_ages()
    assert token_ages("--training-version", "step") == pytest.approx([a + 1 for a in plain])
    constant = token_ages("--training-version", "9")
    assert constant == pytest.approx([a + 9 - step for step, a in enumerate(plain)])
    assert token_ages("--training-version", "policy_start") != plain
    assert token_ages("--weighting", "branches") == plain


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m traceage metrics {STORE} --by episode_id --format csv | head -1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("episode_id,")
    assert done.stderr == ""


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see processes")
def test_interrupting_ends_workers_and_leaves_no_file(tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"
    line = json.dumps({"id": "t", "nodes": [{"sampled": True, "mask": [True] * 50_000}]}) + "\n"
    source.write_text(line * 1_200)
    command = ["metrics", str(source), "--step", "1", "--on-error", "skip", "-o"]
    process = subprocess.Popen(
        [sys.executable, "-m", "traceage", *command, str(tmp_path / "out.txt")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (workers := children(process.pid)):
        assert process.poll() is None, "it ended before it was interrupted"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said == "traceage: interrupted\n"
    assert os.listdir(tmp_path) == ["long.jsonl"]
    until = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < until, "workers outlive the command"
        time.sleep(0.05)


def test_help_names_every_command() -> None:
    done = traceage("--help")
    assert "report" in done.stdout
    assert "metrics" in done.stdout
    assert traceage().returncode == 2


# As where the extra is not installed.
BLOCKING = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "vllm" else find_spec(name, *more)
from traceage.cli import main
sys.exit(main())
"""


def test_capture_says_what_it_needs(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", BLOCKING, *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    done = run("capture", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--model, --policies" in done.stderr
    done = run("capture", "--model", ".", "--policies", ".", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "vllm cannot be imported: pip install 'traceage[capture]'" in done.stderr
    done = run("capture", "probe", "--model", ".")
    assert done.returncode == 2
    assert "vllm cannot be imported" in done.stderr
    assert not (tmp_path / "run").exists()
    done = run("capture", "--help")
    assert done.returncode == 0
    assert "probe" in done.stdout
    assert "--max-off-policy-steps" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["report", STEPS, "-o", "nowhere/r.html"], "no directory"),
        (["report", STEPS, "-o", "."], "is a directory"),
        (["report", STEPS, "-o", "r.html", "--compare", "nowhere"], "no such file"),
        (["metrics", STEPS, "-o", "nowhere/m.json", "--format", "json"], "no directory"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_read(
    flags: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read(*_: object, **__: object) -> None:
        pytest.fail("it reads first")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("traceage.scan.register_io_source", read)
    assert main(flags) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
