"""What bad input gets: an error that names the place, or, skipped, a count of it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import traceage as ta
from traceage.errors import ReadSummary

Record = dict[str, Any]


def node(spans: Any, mask: Any = (True,) * 4, **more: Any) -> Record:
    made = {
        "sampled": True,
        "mask": list(mask) if isinstance(mask, tuple) else mask,
        "token_ids": [7] * 4,
        "logprobs": [-0.5] * 4,
        **more,
    }
    if spans is not None:
        made["weight_versions"] = [
            {"version": v, "start": s, "end": e} if isinstance(v, (str, int)) else v
            for v, s, e in spans
        ]
    return made


def episode(name: str, *nodes: Record, **more: Any) -> Record:
    return {"id": name, "traces": [{"id": f"t-{name}", "nodes": list(nodes)}], **more}


def write(folder: Path, *lines: Record | str | bytes, step: int = 3, end: str = "\n") -> Path:
    path = folder / "rollouts" / f"step_{step}" / "train" / "effective" / "traces.jsonl"
    path.parent.mkdir(parents=True)
    encoded = [
        line
        if isinstance(line, bytes)
        else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(encoded) + end.encode())
    return path


GOOD = episode("good", node([("1", 0, 4)]))


def error(path: Path, **options: Any) -> str:
    with pytest.raises(ta.TraceError) as caught:
        ta.scan_spans(path, **options).collect()
    return str(caught.value)


def skipped(path: Path, **options: Any) -> tuple[pl.DataFrame, ReadSummary]:
    summary = ReadSummary()
    spans = ta.scan_spans(path, on_error="skip", summary=summary, quiet=True, **options).collect()
    return spans, summary


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ([("1", 0, 3), ("2", 2, 4)], "span 2-4 overlaps the one before, which ends at 3"),
        ([("1", 2, 4), ("2", 0, 2)], "span 0-2 overlaps the one before, which ends at 4"),
        ([("1", 3, 1)], "span 3-1 runs backwards"),
        ([("1", -1, 2)], "span -1-2 starts before 0"),
        ([("1", 0, 9)], "span 0-9 passes the 4 sampled tokens"),
        # A stop string trimmed after labelling: two spans whose end passes the completion.
        ([("1", 0, 3), ("2", 3, 6)], "span 3-6 passes the 4 sampled tokens"),
    ],
)
def test_spans_that_do_not_fit(tmp_path: Path, spans: Any, found: str) -> None:
    path = write(tmp_path, GOOD, episode("bad", node(None), node(spans)))
    message = error(tmp_path)
    assert message.startswith(f"{path}:2: trace t-bad, node 1: bad spans: {found}")
    assert all(f"{label!r} {start}-{end}" in message for label, start, end in spans)
    table, summary = skipped(tmp_path)
    bad = table.filter(pl.col("episode_id") == "bad")
    assert bad.select("node", "start", "end", "label").rows() == [(0, 0, 4, None), (1, 0, 4, None)]
    assert summary.problems == {"bad spans": 1}
    assert ta.off_policy_metrics(table)["unlabelled_tokens"].to_list() == [8]


@pytest.mark.parametrize(
    "stored",
    [
        [{"start": 0, "end": 4}],
        [{"version": 1.5, "start": 0, "end": 4}],
        [{"version": "1", "start": "0", "end": 4}],
        ["1"],
        "1",
        {"version": "1", "start": 0, "end": 4},
    ],
)
def test_malformed_spans(tmp_path: Path, stored: Any) -> None:
    path = write(tmp_path, GOOD, episode("bad", node(None, weight_versions=stored)))
    assert error(tmp_path).startswith(f"{path}:2: trace t-bad, node 0: malformed spans: weight_")
    table, summary = skipped(tmp_path)
    assert summary.problems == {"malformed spans": 1}
    assert table["length"].sum() == 8


def test_labels_that_are_no_versions_are_listed_with_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        episode("a", node([("step_1", 0, 2), ("step_2", 2, 4)]), node([("step_2", 0, 4)])),
        episode("b", node([("default", 0, 2), ("2", 2, 4)]), node([("2.0", 0, 4)])),
    )
    message = error(tmp_path)
    assert "'step_2' (2), 'step_1' (1), '2.0' (1)" in message
    assert "version_pattern" in message
    table, summary = skipped(tmp_path)
    assert summary.unreadable_labels == {"step_2": 2, "step_1": 1, "2.0": 1}
    assert summary.problems == {"unreadable labels": 4}
    [row] = ta.off_policy_metrics(table).to_dicts()
    assert (row["labelled_tokens"], row["default_tokens"], row["unlabelled_tokens"]) == (2, 2, 12)
    # A pattern reads what it fits; plain integers go on being read.
    assert "'2.0' (1)" in error(tmp_path, version_pattern=r"step_(\d+)")
    read = ta.scan_spans(tmp_path, version_pattern=r"^(?:step_)?(\d+)").collect()
    assert read["version"].to_list() == [1, 2, 2, None, 2, 2]


@pytest.mark.parametrize("pattern", ["(", "step_", "(a)(b)"])
def test_a_pattern_needs_one_group(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ValueError, match="version pattern"):
        ta.scan_spans(write(tmp_path, GOOD), version_pattern=pattern)


def test_versions_are_numbers_not_text(tmp_path: Path) -> None:
    write(tmp_path, episode("a", node([("9", 0, 1), ("10", 1, 4)])), step=12)
    [row] = ta.off_policy_metrics(ta.scan_spans(tmp_path)).to_dicts()
    assert (row["off_policy/token/min"], row["off_policy/token/max"]) == (1, 2)


def test_a_version_too_large_is_unreadable(tmp_path: Path) -> None:
    write(tmp_path, episode("a", node([("99999999999", 0, 4)])))
    assert "'99999999999' (1)" in error(tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ('{"id": "x"}', "not a record"),
        ("[1, 2]", "not a record"),
        ("7", "not a record"),
        ('{"id": "x", "traces": {}}', "malformed record"),
        ('{"id": "x", "traces": [3]}', "malformed record"),
        ('{"id": "x", "traces": [{"id": "t", "nodes": 3}]}', "malformed record"),
    ],
)
def test_a_line_that_is_no_record(tmp_path: Path, line: str | bytes, reason: str) -> None:
    path = write(tmp_path, GOOD, line, episode("later", node([("2", 0, 4)])))
    assert error(tmp_path).startswith(f"{path}:2: ")
    assert reason in error(tmp_path)
    table, summary = skipped(tmp_path)
    assert summary.problems == {reason: 1}
    assert {"good", "later"} <= set(table["episode_id"])
    assert table["length"].sum() == 8


def test_a_node_that_does_not_tell_what_was_sampled(tmp_path: Path) -> None:
    bad = {"sampled": True, "token_ids": [1, 2, 3]}
    path = write(tmp_path, GOOD, episode("bad", bad))
    assert error(tmp_path).startswith(f"{path}:2: trace t-bad, node 0: no mask: 3 token_ids")
    assert skipped(tmp_path)[1].problems == {"no mask": 1}


@pytest.mark.parametrize("parent", [1, 5, -1, "0", 0.5])
def test_a_parent_that_does_not_come_before(tmp_path: Path, parent: Any) -> None:
    write(tmp_path, episode("bad", node(None), node(None, parent=parent)))
    assert "trace t-bad, node 1: bad parent" in error(tmp_path)
    assert skipped(tmp_path)[1].problems == {"bad parent": 1}


def test_no_step_known(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    assert error(path).startswith(f"{path}:1: trace t-good: no step known")
    assert "--step" in error(path)
    assert ta.scan_spans(path, step=3).collect()["training_version"].to_list() == [2]
    constant = ta.scan_spans(path, training_version=5).collect()
    assert constant.select("step", "training_version").rows() == [(None, 5)]


def test_one_trace_twice_in_a_step(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, GOOD, episode("other", node([("2", 0, 4)])))
    message = error(tmp_path)
    assert message.startswith(f"{path}:2: trace t-good: trace read twice")
    assert f"{path}:1" in message
    table, summary = skipped(tmp_path)
    assert summary.problems == {"trace read twice": 1}
    assert table["length"].sum() == 8
    # The same file by two names is one file.
    os.symlink(tmp_path / "rollouts", tmp_path / "again")
    assert skipped(tmp_path / "again")[0].height == 2


def test_a_torn_last_line_is_reported_and_no_error(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, json.dumps(GOOD)[:-9], end="")
    summary = ReadSummary()
    with pytest.warns(ta.TraceWarning, match="still being written"):
        spans = ta.scan_spans(path, summary=summary).collect()
    assert spans["length"].sum() == 4
    assert summary.torn == [f"{path}:2"]
    assert not summary.skipped


def test_a_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, episode("last", node([("1", 0, 4)])), end="")
    assert ta.scan_spans(path).collect()["length"].sum() == 8


def test_blank_lines_and_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path, "", json.dumps(GOOD) + "\r", "  ", episode("b", node([("1", 0, 4)])))
    assert ta.scan_spans(path).collect()["line"].to_list() == [2, 4]


def test_a_damaged_archive(tmp_path: Path) -> None:
    whole = gzip.compress(b"\n".join([json.dumps(GOOD).encode()] * 3))
    path = tmp_path / "traces.jsonl.gz"
    path.write_bytes(whole[:-12])
    assert error(path, step=3).startswith(f"{path}: damaged file: damaged or unfinished gzip data")
    assert skipped(write(tmp_path, GOOD))[1].skipped == 0
    table, summary = skipped([path, tmp_path / "rollouts"], step=3)  # type: ignore[arg-type]
    assert summary.problems == {"damaged file": 1}
    assert table["length"].sum() == 4


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ta.TraceError, match="no such file"):
        ta.scan_spans(tmp_path / "nothing")
    with pytest.raises(ta.TraceError, match="nothing matches"):
        ta.scan_spans(tmp_path / "*.jsonl")
    with pytest.raises(ta.TraceError, match="no file of traces"):
        ta.scan_spans(tmp_path)
    with pytest.raises(ta.TraceError, match="no source"):
        ta.scan_spans([])
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "no episodes and no traces" in error(empty)


def test_another_kind_is_said(tmp_path: Path) -> None:
    run = {"type": "train", "work": {"type": "eval"}}
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps({**GOOD, "run": run}))
    assert "1 of another kind than 'train'" in error(path, step=3)
    assert ta.scan_spans(path, step=3, kind="eval").collect()["kind"].to_list() == ["eval"]


def test_side_files_of_a_directory_are_passed_over_and_named(tmp_path: Path) -> None:
    (tmp_path / "a-results.jsonl").write_text('{"score": 1}\n{"score": 2}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "traces.jsonl").write_text(json.dumps(GOOD) + "\n")
    summary = ReadSummary()
    spans = ta.scan_spans(tmp_path, step=3, summary=summary, quiet=True).collect()
    assert spans["length"].sum() == 4
    assert summary.files_without_traces == [str(tmp_path / "a-results.jsonl")]
    assert "not a record" in error(tmp_path / "a-results.jsonl", step=3)


def test_an_unknown_training_version(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert "training version 'nonsense'" in error(path, training_version="nonsense")
    assert "no training version for step 3" in error(path, training_version={4: 1})
    assert ta.scan_spans(path, training_version={3: 9}).collect()["training_version"][0] == 9


@pytest.mark.parametrize(
    "text",
    [
        "\u2028 \u0085 \x1c line?",
        '"weight_versions":[{"version":"9","start":0,"end":4}]',
        '{"token_ids":[1,2,3],"mask":[true,true]}',
        '\\"mask":[true,true]',
        "\\",
        ":[1,2,3]",
        "lone \ud800 surrogate",
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_text_that_looks_like_structure(tmp_path: Path, text: str, ascii_only: bool) -> None:
    record = episode("a", node([("1", 0, 4)], message={"role": "assistant", "content": text}))
    record["task"] = {"data": {"mask": [True] * 9, "weight_versions": text, text: [1, 2]}}
    record["traces"][0]["info"] = {"weight_versions": [{"version": "x"}], "token_ids": text}
    line = json.dumps(record, ensure_ascii=ascii_only, separators=(",", ":"))
    path = write(tmp_path, line.encode("utf-8", "surrogatepass"))
    spans = ta.scan_spans(path).collect()
    assert spans.select("start", "end", "label").rows() == [(0, 4, "1")]


def test_fields_of_many_types_and_numbers_of_any_size(tmp_path: Path) -> None:
    odd = episode(
        "x",
        node([("1", 0, 4)], timestamp="yesterday", logprobs=[None, float("nan"), -1.0, 0.5]),
        env="just a name",
        group=7,
    )
    odd["id"] = 2**80
    odd["traces"][0] |= {"agent": "solver", "info": [1], "rewards": {"a": 0.5, "b": None}}
    odd["traces"][0]["metrics"] = {"loss": float("inf")}
    path = write(tmp_path, GOOD, odd)
    row = ta.scan_spans(path).collect().row(1, named=True)
    assert row["episode_id"] == str(2**80)
    assert (row["env"], row["agent"], row["reward"], row["timestamp"]) == (
        "just a name",
        None,
        0.5,
        None,
    )


def test_a_key_that_first_appears_late(tmp_path: Path) -> None:
    plain = [episode(f"e{i}", node(None)) for i in range(2000)]
    path = write(tmp_path, *plain, episode("late", node([("1", 0, 4)])))
    [row] = ta.off_policy_metrics(ta.scan_spans(path)).to_dicts()
    assert (row["sampled_tokens"], row["labelled_tokens"]) == (8004, 4)
