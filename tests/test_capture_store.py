"""The store that a capture run writes: read as it was written, and whole after any crash."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import reference as ref
import zstandard
from compare import assert_same_metrics, assert_same_streams, assert_same_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Record, Stored
from store_writer import read_seek_table
from strategies import HOSTILE_TEXTS

import traceage as ta
from traceage.capture.store import MetricsLog, TraceStoreWriter, seal

DATA = Path(__file__).parent.parent / "data"
ROOT = Path("monitors/file/traces")
LOGS = ("stream", "annotations/orch", "annotations/trainer")
FINE = -0.123456789
"""A logprob of more decimals than a store keeps."""


# --- what a run would write -----------------------------------------------------------------------


def episode(number: int, *, traces: int = 1, turns: int = 2) -> Record:
    """An episode as a run makes it: `e<number>`, its traces a chain of turns each."""
    policy = {"start": number, "end": number + turns}
    work = {"type": "train", "step": number, "policy": policy}
    task = {"type": "toy", "data": {"idx": number}}
    return {
        "id": f"e{number}",
        "env": {"id": "toy", "name": "toy-long"},
        "task": task,
        "group": {"id": f"g{number // 2}"},
        "run": {"type": "train", "id": "run", "work": work},
        "ok": True,
        "errors": [],
        "traces": [trace(f"e{number}t{i}", number, turns, task) for i in range(traces)],
    }


def trace(trace_id: str, version: int, turns: int, task: Record) -> Record:
    nodes: list[Record] = []
    for turn in range(turns):
        count = 3 + turn
        prompt = {"role": "user", "content": HOSTILE_TEXTS[(version + turn) % len(HOSTILE_TEXTS)]}
        for message, sampled in ((prompt, False), ({"role": "assistant", "content": "hi"}, True)):
            node: Record = {"parent": len(nodes) - 1} if nodes else {}
            node |= {
                "message": message,
                "sampled": sampled,
                "timestamp": 1_700_000_000.123456,
                "token_ids": [7 * turn + i for i in range(count)],
                "mask": [sampled] * count,
            }
            if sampled:
                node["logprobs"] = [FINE * (i + 1) for i in range(count)]
                node["weight_versions"] = [
                    {"version": str(version + turn), "start": 0, "end": 1},
                    {"version": str(version + turn + 1), "start": 1, "end": count},
                ]
            nodes.append(node)
    return {
        "version": 1,
        "id": trace_id,
        "task": task,
        "agent": {"name": "agent", "trainable": True, "config": {}},
        "nodes": nodes,
        "rewards": {"toy": {"score": 0.123456789, "weight": 1.0}},
        "info": {"note": "kept"},
        "is_completed": True,
        "ok": True,
        "errors": [],
        "stop_condition": "task_completed",
    }


def append(store: TraceStoreWriter, record: Record, step: int = 3) -> None:
    store.append(
        record, dispatch_step=step, arrival_step=step + 1, dispatch_time=10.5, arrival_time=11.25
    )


def stamped(record: Record, step: int = 3, kind: str = "train") -> Record:
    """What `append` should leave of the record on disk."""
    out = copy.deepcopy(record)
    for own in out["traces"]:
        own["info"]["kind"] = kind
        own["info"]["dispatch"] = {"step": step, "time": 10.5}
        own["info"]["arrival"] = {"step": step + 1, "time": 11.25}
        for node in own["nodes"]:
            if "logprobs" in node:
                node["logprobs"] = [round(value, 4) for value in node["logprobs"]]
    return out


def width(own: Record) -> int:
    return sum(len(node["token_ids"]) for node in own["nodes"])


def shipping(step: int) -> Record:
    return {"effective": True, "ship": {"step": step, "time": 20.5}, "advantage": 0.25}


def ship(store: TraceStoreWriter, own: Record, step: int) -> None:
    """What orchestrator and trainer say of a trace that batch `step` took."""
    mask = [sampled for node in own["nodes"] for sampled in node["mask"]]
    advantages = [0.25] * len(mask)
    store.annotate("orch", own["id"], shipping(step), [{"index": 0, "advantages": advantages}])
    streams = {
        name: [value if sampled else None for sampled in mask]
        for name, value in (
            ("trainer_logprobs", FINE),
            ("entropies", 1.23456789),
            ("mismatch_kl", 0.000123456),
        )
    }
    masked = [False if sampled else None for sampled in mask]
    store.annotate("trainer", own["id"], {}, [{"index": 0, **streams, "is_masked": masked}])


# --- what stands on disk --------------------------------------------------------------------------


def log_lines(run_dir: Path, log: str) -> list[Record]:
    """The complete lines of a log, by the reference's own reading."""
    return ref.read_chunks(run_dir / ROOT / log, run_dir / ROOT / f"{log}.jsonl")


def chunk_files(run_dir: Path, log: str) -> list[str]:
    return sorted(path.name for path in (run_dir / ROOT / log).iterdir())


def index_path(run_dir: Path, log: str) -> Path:
    return run_dir / ROOT / f"{log}.index.jsonl"


def assert_whole(run_dir: Path) -> None:
    """Each log stands once, ends at a line's end, and its index has a row a line, in order."""
    for log in LOGS:
        if not (run_dir / ROOT / log).exists():
            continue
        names = chunk_files(run_dir, log)
        assert [name[:5] for name in names] == [f"{i:05d}" for i in range(len(names))]
        assert all(name[5:] in (".jsonl", ".jsonl.zst") for name in names)
        assert all(name.endswith(".zst") for name in names[:-1])
        rows: list[Record] = []
        for chunk, name in enumerate(names):
            *lines, torn = ref.read_bytes(run_dir / ROOT / log / name).split(b"\n")
            assert torn == b""
            offset = 0
            for line in lines:
                rows.append(index_row(log, json.loads(line), len(rows) + 1, chunk, offset))
                offset += len(line) + 1
        assert ref.read_lines(index_path(run_dir, log)) == rows
        assert index_path(run_dir, log).read_bytes().count(b"\n") == len(rows)


def index_row(log: str, record: Record, number: int, chunk: int, offset: int) -> Record:
    where = {"chunk": chunk, "offset": offset}
    if log != "stream":
        return {"trace_id": record["trace_id"], "info": record["info"], **where}
    return {
        "line": number,
        "id": record["id"],
        "kind": record["traces"][0]["info"]["kind"],
        "trace_ids": [own["id"] for own in record["traces"]],
        "env": record["env"]["name"],
        "group": record["group"]["id"],
        "ok": record["ok"],
        **where,
    }


def wait_until_sealed(run_dir: Path) -> None:
    """Until every chunk but the newest of each log is sealed."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        names = [chunk_files(run_dir, log) for log in LOGS if (run_dir / ROOT / log).exists()]
        if all(name.endswith(".zst") for of_log in names for name in of_log[:-1]):
            return
        time.sleep(0.005)
    raise AssertionError("full chunks are not sealed while the run goes on")


# --- written and read -----------------------------------------------------------------------------


@pytest.mark.parametrize("traces", [1, 2])
@pytest.mark.parametrize("chunk_bytes", [1500, 8000, 5 << 30])
def test_what_is_written_is_what_is_read(tmp_path: Path, chunk_bytes: int, traces: int) -> None:
    records = [episode(number, traces=traces, turns=1 + number % 3) for number in range(12)]
    expected = [Stored(stamped(record), None, {"store": True}) for record in records]
    with TraceStoreWriter(tmp_path, chunk_bytes=chunk_bytes, frame_bytes=700) as store:
        for record in records:
            append(store, record)
        for number in range(8):
            for own, known in zip(
                records[number]["traces"], expected[number].record["traces"], strict=True
            ):
                ship(store, own, step=number + 2)
                known["info"] |= shipping(number + 2)
                for node in known["nodes"]:
                    if node["sampled"]:
                        count = len(node["token_ids"])
                        node["advantages"] = [0.25] * count
                        node["trainer_logprobs"] = [round(FINE, 4)] * count
                        node["entropies"] = [1.2346] * count
                        node["mismatch_kl"] = [0.000123] * count
        assert_reads(tmp_path, expected)
    assert_reads(tmp_path, expected)
    assert all(name.endswith(".zst") for log in LOGS for name in chunk_files(tmp_path, log))


def assert_reads(run_dir: Path, expected: list[Stored]) -> None:
    """The library finds in the store what was put in, and the index tells where."""
    rows = ref.token_rows(expected)
    spans = ta.scan_spans(run_dir).collect()
    assert_same_tokens(spans, rows)
    assert_same_metrics(ta.off_policy_metrics(spans), ref.metrics_rows(rows))
    assert_same_streams(ta.scan_tokens(run_dir).collect(), rows)
    everything = ta.scan_spans(run_dir, subset="all").collect()
    assert_same_tokens(everything, ref.token_rows(expected, subset="all"))


def test_a_line_is_the_record_stamped_and_rounded(tmp_path: Path) -> None:
    records = [episode(0), episode(1, traces=3), episode(2, traces=0)]
    before = copy.deepcopy(records)
    with TraceStoreWriter(tmp_path) as store:
        append(store, records[0])
        append(store, records[1], step=5)
        store.append(
            records[2],
            dispatch_step=1,
            arrival_step=2,
            dispatch_time=0.0,
            arrival_time=1.0,
            kind="eval",
        )
    assert records == before
    lines = log_lines(tmp_path, "stream")
    assert lines == [stamped(records[0]), stamped(records[1], step=5), records[2]]


def test_kind_is_stamped(tmp_path: Path) -> None:
    with TraceStoreWriter(tmp_path) as store:
        store.append(
            episode(0),
            kind="eval",
            dispatch_step=3,
            arrival_step=4,
            dispatch_time=10.5,
            arrival_time=11.25,
        )
    assert log_lines(tmp_path, "stream") == [stamped(episode(0), kind="eval")]
    assert ref.read_lines(index_path(tmp_path, "stream"))[0]["kind"] == "eval"


def test_streams_are_rounded(tmp_path: Path) -> None:
    stream = [None, 0.123456789, -1.987654321]
    with TraceStoreWriter(tmp_path) as store:
        branch = {"index": 1, "entropies": stream, "mismatch_kl": stream, "is_masked": [None, True]}
        store.annotate("trainer", "t", {"score": 0.123456789}, [branch])
        store.annotate("orch", "t", {"effective": False})
    assert log_lines(tmp_path, "annotations/trainer") == [
        {
            "version": 1,
            "trace_id": "t",
            "info": {"score": 0.123456789},
            "branches": [
                {
                    "index": 1,
                    "entropies": [None, 0.1235, -1.9877],
                    "mismatch_kl": [None, 0.123457, -1.987654],
                    "is_masked": [None, True],
                }
            ],
        }
    ]
    assert log_lines(tmp_path, "annotations/orch") == [
        {"version": 1, "trace_id": "t", "info": {"effective": False}, "branches": []}
    ]


def test_index_rows_have_the_shape_of_a_real_run(tmp_path: Path) -> None:
    with TraceStoreWriter(tmp_path) as store:
        append(store, episode(0))
        ship(store, episode(0)["traces"][0], step=1)
    for log in LOGS:
        ours = ref.read_lines(index_path(tmp_path, log))[0]
        theirs = ref.read_lines(index_path(DATA / "real-dump", log))[0]
        assert list(ours) == list(theirs)
        assert set(log_lines(tmp_path, log)[0]) <= set(log_lines(DATA / "real-dump", log)[0])


def test_lines_are_compact_and_text_is_raw(tmp_path: Path) -> None:
    with TraceStoreWriter(tmp_path) as store:
        append(store, episode(2))
        text = (tmp_path / ROOT / "stream/00000.jsonl").read_text(encoding="utf-8")
    assert '", "' not in text
    assert '": ' not in json.dumps(json.loads(text), separators=(",", ":"))
    assert HOSTILE_TEXTS[2][17:18] in text


def test_every_line_is_a_record_of_verifiers(tmp_path: Path) -> None:
    episodes = pytest.importorskip("verifiers.v1.episode")
    with TraceStoreWriter(tmp_path, chunk_bytes=4000) as store:
        for number in range(6):
            append(store, episode(number, traces=number % 3))
    for number, line in enumerate(log_lines(tmp_path, "stream")):
        record = json.loads(json.dumps(episodes.WireEpisode.model_validate(line).to_record()))
        assert_holds(record, stamped(episode(number, traces=number % 3)))


def assert_holds(found: Any, wanted: Any) -> None:
    """`found` says all that `wanted` says, and perhaps more."""
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            assert_holds(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_holds(one, other)
    else:
        assert found == wanted


def test_a_record_that_is_not_json_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    bad = episode(1)
    bad["traces"][0]["nodes"][1]["logprobs"][0] = float("nan")
    with TraceStoreWriter(tmp_path) as store:
        append(store, episode(0))
        with pytest.raises(ValueError, match="not JSON compliant"):
            append(store, bad)
        append(store, episode(2))
        assert_whole(tmp_path)
    assert log_lines(tmp_path, "stream") == [stamped(episode(0)), stamped(episode(2))]


# --- chunks and seals -----------------------------------------------------------------------------


def test_a_chunk_does_not_outgrow_its_size(tmp_path: Path) -> None:
    with TraceStoreWriter(tmp_path, chunk_bytes=6000) as store:
        for number in range(9):
            append(store, episode(number))
        append(store, episode(9, traces=8))  # one line longer than a chunk
        append(store, episode(10))
        assert_lines_of(tmp_path, 10)
    folder = tmp_path / ROOT / "stream"
    contents = [ref.read_bytes(folder / name) for name in chunk_files(tmp_path, "stream")]
    assert len(contents) > 3
    for content in contents:
        assert len(content) <= 6000 or content.count(b"\n") == 1
    for one, following in itertools.pairwise(contents):
        assert len(one) + following.index(b"\n") + 1 > 6000
    assert_whole(tmp_path)


def assert_lines_of(run_dir: Path, last: int) -> None:
    """The stream holds episodes 0 to `last`, once each."""
    assert [line["id"] for line in log_lines(run_dir, "stream")] == [
        f"e{number}" for number in range(last + 1)
    ]


def test_full_chunks_are_sealed_while_the_run_goes_on(tmp_path: Path) -> None:
    with TraceStoreWriter(tmp_path, chunk_bytes=1500) as store:
        for number in range(6):
            append(store, episode(number))
        wait_until_sealed(tmp_path)
        names = chunk_files(tmp_path, "stream")
        assert names[-1] == f"{len(names) - 1:05d}.jsonl"
        assert_whole(tmp_path)
        assert_lines_of(tmp_path, 5)


@pytest.mark.parametrize("frame_bytes", [1, 100, 5000, 4 << 20])
def test_a_sealed_chunk_is_seekable_zstd(tmp_path: Path, frame_bytes: int) -> None:
    content = random.Random(frame_bytes).randbytes(2500) * 4
    plain = tmp_path / "00000.jsonl"
    plain.write_bytes(content)
    seal(plain, frame_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["00000.jsonl.zst"]
    data = (tmp_path / "00000.jsonl.zst").read_bytes()
    assert ref.read_bytes(tmp_path / "00000.jsonl.zst") == content
    table = read_seek_table(data)
    sizes = [min(frame_bytes, len(content) - at) for at in range(0, len(content), frame_bytes)]
    assert table.content == sizes
    # Each frame stands on its own, where the table says.
    for number in random.Random(0).sample(range(len(sizes)), min(len(sizes), 20)):
        at = sum(table.compressed[:number])
        frame = data[at : at + table.compressed[number]]
        start = number * frame_bytes
        assert zstandard.decompress(frame) == content[start : start + frame_bytes]


def test_an_empty_store_closes(tmp_path: Path) -> None:
    with TraceStoreWriter(tmp_path):
        assert chunk_files(tmp_path, "stream") == ["00000.jsonl"]
    assert chunk_files(tmp_path, "stream") == []
    with TraceStoreWriter(tmp_path) as store:
        append(store, episode(0))
    assert_whole(tmp_path)
    assert_lines_of(tmp_path, 0)


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    with TraceStoreWriter(tmp_path) as store:
        append(store, episode(0))
        store.close()
    assert chunk_files(tmp_path, "stream") == ["00000.jsonl.zst"]
    with pytest.raises(ValueError, match="closed"):
        append(store, episode(1))
    assert_whole(tmp_path)


def test_a_finished_run_is_gone_on_with(tmp_path: Path) -> None:
    for number in range(4):
        with TraceStoreWriter(tmp_path, chunk_bytes=1 << 20, frame_bytes=300) as store:
            append(store, episode(2 * number))
            ship(store, episode(2 * number)["traces"][0], step=number + 1)
            append(store, episode(2 * number + 1))
    assert_whole(tmp_path)
    assert_lines_of(tmp_path, 7)
    assert len(chunk_files(tmp_path, "stream")) == 4
    assert len(log_lines(tmp_path, "annotations/trainer")) == 4


# --- crashes --------------------------------------------------------------------------------------

Seal = Literal["done", "twice", "unfinished", "not begun"]


@dataclass
class Damage:
    """What a crash did to a log: the shares of newest chunk and index left, and how seals stood."""

    chunk: float
    index: float
    no_index: bool
    seals: list[Seal]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    # Often nothing is lost of the one or the other.
    share = st.one_of(st.just(1.0), st.floats(0, 1))
    states = st.sampled_from(get_args(Seal))
    return Damage(
        draw(share),
        draw(share),
        draw(st.integers(0, 9)) == 0,
        draw(st.lists(states, min_size=40, max_size=40)),
    )


@given(
    damage=st.tuples(damages(), damages(), damages()),
    chunk_bytes=st.sampled_from((1200, 4000, 1 << 20)),
    first=st.integers(0, 9),
    more=st.integers(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_a_crash_at_any_byte_loses_torn_lines_alone(
    damage: tuple[Damage, ...], chunk_bytes: int, first: int, more: int
) -> None:
    """Files are cut anywhere, each on its own, as when a machine and not just a process dies."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, dead, later = (Path(folder, name) for name in ("run", "dead", "later"))
        with TraceStoreWriter(run_dir, chunk_bytes=chunk_bytes, frame_bytes=500) as store:
            write(store, 0, first)
            wait_until_sealed(run_dir)
            shutil.copytree(run_dir, dead)
        with TraceStoreWriter(later) as store:
            write(store, first, more)
        left = {log: die(dead, log, of_log) for log, of_log in zip(LOGS, damage, strict=True)}
        with TraceStoreWriter(dead, chunk_bytes=chunk_bytes, frame_bytes=500) as store:
            wait_until_sealed(dead)
            assert {log: log_lines(dead, log) for log in LOGS} == left
            assert_whole(dead)
            write(store, first, more)
        assert_whole(dead)
        for log in LOGS:
            assert log_lines(dead, log) == left[log] + log_lines(later, log)


def write(store: TraceStoreWriter, start: int, count: int) -> None:
    for number in range(start, start + count):
        append(store, episode(number))
        ship(store, episode(number)["traces"][0], step=number + 1)


def die(run_dir: Path, log: str, damage: Damage) -> list[Record]:
    """Damage a log; the lines of it that are still whole."""
    folder, index = run_dir / ROOT / log, index_path(run_dir, log)
    if not folder.exists():
        return []
    newest = sorted(folder.iterdir())[-1]
    assert newest.suffix == ".jsonl"
    os.truncate(newest, int(newest.stat().st_size * damage.chunk))
    if damage.no_index:
        index.unlink()
    else:
        os.truncate(index, int(index.stat().st_size * damage.index))
    for sealed, state in zip(sorted(folder.glob("*.zst")), damage.seals, strict=False):
        plain = sealed.with_suffix("")
        if state != "done":
            plain.write_bytes(ref.read_bytes(sealed))
        if state in ("unfinished", "not begun"):
            if state == "unfinished":
                data = sealed.read_bytes()
                sealed.with_name(f"{sealed.name}.tmp").write_bytes(data[: len(data) // 2])
            sealed.unlink()
    return log_lines(run_dir, log)


KILLED = """
import sys
from pathlib import Path
from test_capture_store import TraceStoreWriter, append, episode, ship

run_dir, number = Path(sys.argv[1]), int(sys.argv[2])
with TraceStoreWriter(run_dir, chunk_bytes=20_000, frame_bytes=3000) as store:
    while True:
        append(store, episode(number))
        ship(store, episode(number)["traces"][0], step=1)
        print(number, flush=True)
        number += 1
"""


def test_a_killed_process_loses_nothing_that_it_had_written(tmp_path: Path) -> None:
    known = 0
    for kill_after in (1, 17, 60, 33):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), str(known)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        ) as process:
            assert process.stdout is not None
            told = [int(process.stdout.readline()) for _ in range(kill_after)]
            process.kill()
            told += [int(line) for line in process.stdout if line.endswith("\n")]
        with TraceStoreWriter(tmp_path, chunk_bytes=20_000, frame_bytes=3000):
            wait_until_sealed(tmp_path)
            assert_whole(tmp_path)
            ids = [line["id"] for line in log_lines(tmp_path, "stream")]
            assert ids == [f"e{number}" for number in range(len(ids))]
            # At most one more than was told: the one that was being written.
            assert told[-1] + 1 <= len(ids) <= told[-1] + 2
            shipped = [line["trace_id"] for line in log_lines(tmp_path, "annotations/orch")]
            assert shipped[: told[-1] + 1] == [f"{name}t0" for name in ids[: told[-1] + 1]]
        # The next life ships what this one did not.
        known = len(ids)
        with TraceStoreWriter(tmp_path, chunk_bytes=20_000, frame_bytes=3000) as store:
            for name in ids[len(shipped) :]:
                ship(store, episode(int(name[1:]))["traces"][0], step=1)
    assert_whole(tmp_path)
    assert known >= 1 + 17 + 60 + 33


@pytest.mark.parametrize("room", range(0, 1300, 90))
def test_a_full_disk_refuses_a_line_whole(tmp_path: Path, room: int) -> None:
    """What does not fit is not there at all: it can be written again when there is room."""
    with TraceStoreWriter(tmp_path) as store:
        append(store, episode(0))
        ship(store, episode(0)["traces"][0], step=1)
        size = (tmp_path / ROOT / "stream/00000.jsonl").stat().st_size
        with no_file_larger_than(size + room), pytest.raises(OSError, match="too large"):
            append(store, episode(1))
        assert_whole(tmp_path)
        assert_lines_of(tmp_path, 0)
        append(store, episode(1))
        assert_whole(tmp_path)
        assert_lines_of(tmp_path, 1)
    assert_whole(tmp_path)


def test_an_index_that_cannot_grow_takes_its_line_along(tmp_path: Path) -> None:
    with TraceStoreWriter(tmp_path, chunk_bytes=1500) as store:
        for number in range(40):
            append(store, episode(number))
        size = index_path(tmp_path, "stream").stat().st_size
        assert size > 4000
        with no_file_larger_than(size + 20), pytest.raises(OSError, match="too large"):
            append(store, episode(40))
        wait_until_sealed(tmp_path)
        assert_whole(tmp_path)
        assert_lines_of(tmp_path, 39)
        append(store, episode(40))
    assert_whole(tmp_path)
    assert_lines_of(tmp_path, 40)


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_old_chunks_that_were_moved_away_stay_in_the_index(tmp_path: Path) -> None:
    with TraceStoreWriter(tmp_path, chunk_bytes=1500) as store:
        write(store, 0, 6)
    before = index_path(tmp_path, "annotations/orch").read_bytes()
    (tmp_path / ROOT / "stream/00000.jsonl.zst").unlink()
    (tmp_path / ROOT / "annotations/orch/00000.jsonl.zst").unlink()
    with TraceStoreWriter(tmp_path, chunk_bytes=1500) as store:
        append(store, episode(6))
    assert index_path(tmp_path, "annotations/orch").read_bytes() == before
    rows = ref.read_lines(index_path(tmp_path, "stream"))
    assert [row["id"] for row in rows] == [f"e{number}" for number in range(7)]
    assert [row["line"] for row in rows] == list(range(1, 8))


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_rows(tmp_path: Path) -> None:
    before = time.time()
    log = MetricsLog(tmp_path)
    log.log(1, {"off_policy/mean": 0.5, "reward/mean": None, "tokens": 7})
    log.log(None, {"setup": 1.0}, producer="trainer")
    rows = ref.read_lines(tmp_path / "monitors/file/metrics.jsonl")
    assert all(before <= row.pop("time") <= time.time() for row in rows)
    assert rows == [
        {
            "step": 1,
            "producer": "orch",
            "metrics": {"off_policy/mean": 0.5, "reward/mean": None, "tokens": 7},
        },
        {"step": None, "producer": "trainer", "metrics": {"setup": 1.0}},
    ]


@pytest.mark.parametrize("lost", range(1, 60))
def test_a_torn_metrics_row_is_cut_off(tmp_path: Path, lost: int) -> None:
    MetricsLog(tmp_path).log(1, {"x": 1})
    MetricsLog(tmp_path).log(2, {"x": 2})
    path = tmp_path / "monitors/file/metrics.jsonl"
    os.truncate(path, path.stat().st_size - lost)
    MetricsLog(tmp_path).log(3, {"x": 3})
    assert [row["step"] for row in ref.read_lines(path)] == [1, 3]


def test_metrics_that_do_not_fit_leave_no_half_row(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.log(1, {"x": 1})
    with no_file_larger_than(log.path.stat().st_size + 10), pytest.raises(OSError, match="large"):
        log.log(2, {"x": 2})
    log.log(2, {"x": 2})
    assert [row["step"] for row in ref.read_lines(log.path)] == [1, 2]


# --- on its own -----------------------------------------------------------------------------------


def test_the_store_needs_no_engine() -> None:
    code = (
        "import sys, traceage.capture.store; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
