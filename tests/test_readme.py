"""The README's own code, run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

import traceage as ta

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_on_the_sample_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    ran = [block for block in blocks("python") if "data/real-dump" in block]
    assert len(ran) == 2
    for block in ran:
        exec(block, names)
    assert names["late"]["step"].unique().to_list() == [9]
    assert len(names["masks"]) == 80


def test_python_on_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"ta": ta, "pl": pl, "spans": ta.scan_spans("data/real-dump")}
    [block] = [block for block in blocks("python") if "data/capture" in block]
    exec(block, names)
    assert names["limits"]["max_age"].unique().to_list() == [0, 1, 2]
    assert (tmp_path / "report.html").stat().st_size > 100_000

    # The table of mismatch by age is what the function gives.
    shown = re.findall(
        r"^\| (\d+) \| ([\d,]+) \| (\S+) \| (\S+) to (\S+) \|$", README, re.MULTILINE
    )
    given = names["mismatch"].select(
        "age", "tokens", "mismatch_kl", "mismatch_kl_low", "mismatch_kl_high"
    )
    assert shown == [
        (f"{age}", f"{tokens:,}", *(f"{value:.4f}" for value in values))
        for age, tokens, *values in given.iter_rows()
    ]


def test_queries_of_a_dump_by_other_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ta.write_dump(ROOT / "data/real-dump", tmp_path / "dump")
    monkeypatch.chdir(tmp_path)
    [query] = blocks("sql")
    relation = duckdb.sql(query)
    assert relation is not None
    by_duckdb = relation.pl()
    [block] = [block for block in blocks("python") if "scan_parquet" in block]
    names: dict[str, Any] = {"pl": pl}
    setup, query = block.split("(\n", 1)
    exec(f"{setup}result = (\n{query}", names)
    by_polars = names["result"]
    assert by_duckdb["tokens"].cast(pl.Int64).to_list() == by_polars["tokens"].to_list()
    spans = ta.scan_spans(ROOT / "data/real-dump")
    ours = spans.group_by("step", "label").agg(pl.col("length").sum()).sort("step", "label")
    assert by_polars["tokens"].to_list() == ours.collect()["length"].to_list()


def test_its_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from traceage.cli import main

    assert main(["report", str(ROOT / "data/real-dump"), "--quiet"]) == 0
    printed = capsys.readouterr().out.splitlines()
    [shown] = [block for block in blocks("text") if "coverage" in block]
    lines = shown.rstrip().splitlines()
    assert lines[-1].strip() == "..."
    assert printed[: len(lines) - 1] == lines[:-1]
