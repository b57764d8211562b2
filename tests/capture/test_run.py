"""Captures from real engines: what a run promises, with one engine and several, and when it fails.

A run promises: every token carries the policy step that sampled it, none is newer than the policy
its batch trained, the figures that were logged are those that the stored traces give, and whatever
ends it, what was shipped is whole and readable.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import verifiers.v1 as vf
import zstandard
from engines import KEY, Engine, Policies, free_port, process, wait_until_healthy

import traceage as ta

SMALL = ["--batch-size", "4", "--group-size", "2", "--concurrency", "24", "--max-tokens", "256"]


def command(tiny: Policies, out: Path, *flags: str) -> list[str]:
    whole = [sys.executable, "-m", "traceage", "capture", "--model", str(tiny.model)]
    return [*whole, "--out", str(out), *SMALL, *flags]


def capture(tiny: Policies, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(tiny, out, *flags), capture_output=True, text=True, timeout=240, check=False
    )


@contextmanager
def capturing(tiny: Policies, out: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A capture that goes on in the background, and is ended with the block."""
    started = subprocess.Popen(
        command(tiny, out, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.terminate()
            started.wait(60)


def logged(run: Path, producer: str = "orch") -> dict[int, dict[str, Any]]:
    """The metrics that a run logged, by step."""
    path = run / "monitors" / "file" / "metrics.jsonl"
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["metrics"] for row in rows if row["producer"] == producer}


def wait_for(condition: Callable[[], bool], started: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if started is not None and started.poll() is not None:
            pytest.fail(f"the run ended: {started.communicate()[1]}")
        assert time.monotonic() < deadline
        time.sleep(0.1)


def url(*engines: Engine) -> list[str]:
    return [word for engine in engines for word in ("--engine-url", engine.url)]


def assert_promises(run: Path, steps: int) -> pl.DataFrame:
    """What every run promises, and the metrics it gives."""
    metrics = ta.off_policy_metrics(ta.scan_spans(run, quiet=True))
    shipped = metrics.filter(pl.col("episodes") > 0)
    assert shipped["step"].to_list() == list(range(1, steps + 1))
    assert (shipped["coverage"] == 1.0).all()
    assert shipped["default_tokens"].sum() == 0
    assert (shipped["off_policy/token/min"] >= 0).all()
    log = logged(run)
    assert sorted(log) == list(range(1, steps + 1))
    for row in shipped.to_dicts():
        step = log[row["step"]]
        shared = [key for key in row if key.startswith("off_policy/")]
        assert len(shared) >= 12
        for key in shared:
            assert row[key] == pytest.approx(step[key], abs=1e-12), (row["step"], key)
        assert row["sampled_tokens"] == step["tokens/sampled"]
    launches = json.loads((run / "run.json").read_text())["launches"]
    assert launches[-1]["packages"]["torch"]
    return shipped


def write_like_a_trainer(policies: Path, run: Path, source: Path, last: int) -> None:
    """After batch N has shipped, leave step_N in pieces: half a file, the rest, then STABLE."""
    for step in range(1, last + 1):
        while step not in logged(run):
            time.sleep(0.05)
        target = policies / f"step_{step}"
        target.mkdir()
        shutil.copy(source / f"step_{step}" / "config.json", target)
        whole = (source / f"step_{step}" / "model.safetensors").read_bytes()
        with (target / "model.safetensors").open("wb") as file:
            file.write(whole[: len(whole) // 2])
            file.flush()
            time.sleep(0.3)
            file.write(whole[len(whole) // 2 :])
        (target / "STABLE").touch()


def test_ten_batches(engines: tuple[Engine, Engine], tiny: Policies, tmp_path: Path) -> None:
    run, policies = tmp_path / "run", tmp_path / "policies"
    policies.mkdir()
    writer = threading.Thread(
        target=write_like_a_trainer, args=(policies, run, tiny.policies, 10), daemon=True
    )
    writer.start()
    # Completions long enough to end by themselves, so that episodes drift apart.
    flags = [*url(engines[0]), "--policies", str(policies), "--steps", "10"]
    flags += ["--max-tokens", "512"]
    done = capture(tiny, run, *flags)
    assert done.returncode == 0, done.stderr
    shipped = assert_promises(run, 10)
    mixed, sampled = shipped["mixed_nodes"].sum(), shipped["sampled_nodes"].sum()
    assert sampled == 10 * 4 * 3
    assert mixed >= sampled / 3
    # The program gives what the library gives.
    table = subprocess.run(
        [sys.executable, "-m", "traceage", "metrics", str(run), "--format", "json", "--quiet"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {row["step"]: row for row in json.loads(table.stdout) if row["episodes"]}
    assert {step: row["off_policy/token/mean"] for step, row in rows.items()} == pytest.approx(
        {step: row["off_policy/token/mean"] for step, row in logged(run).items()}
    )
    again = capture(tiny, run, *flags)
    assert again.returncode == 1
    assert "--resume-step" in again.stderr


def test_verifiers_validates_every_record(
    engines: tuple[Engine, Engine], tiny: Policies, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = [*url(engines[0]), "--policies", str(tiny.policies), "--steps", "2"]
    assert capture(tiny, run, *flags).returncode == 0
    sealed = run / "monitors/file/traces/stream/00000.jsonl.zst"
    with sealed.open("rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    lines = text.split(b"\n")[:-1]
    assert len(lines) >= 8
    for line in lines:
        record = json.loads(line)
        episode = vf.WireEpisode.model_validate(record)
        for validated, trace in zip(episode.traces, record["traces"], strict=True):
            for node, stored in zip(validated.nodes, trace["nodes"], strict=True):
                spans = stored.get("weight_versions")
                got = node.weight_versions
                assert (None if got is None else [dict(span) for span in got]) == spans
                assert (spans is not None) == stored["sampled"]
            (branch,) = validated.branches
            assert list(branch.token_ids) == [t for n in trace["nodes"] for t in n["token_ids"]]


@pytest.mark.parametrize("routed", [False, True])
def test_two_engines(
    engines: tuple[Engine, Engine], tiny: Policies, tmp_path: Path, routed: bool
) -> None:
    flags = [*url(*engines), "--policies", str(tiny.policies), "--steps", "8"]
    if not routed:
        done = capture(tiny, tmp_path / "run", *flags)
    else:
        port = free_port()
        router = [sys.executable, "-m", "vllm_router.launch_router", "--port", str(port)]
        router += ["--worker-urls", *(engine.url for engine in engines), "--policy", "round_robin"]
        router += ["--host", "127.0.0.1", "--prometheus-port", str(free_port())]
        with process(router, tmp_path / "router.log") as started:
            address = f"http://127.0.0.1:{port}"
            wait_until_healthy(address, started, tmp_path / "router.log")
            done = capture(tiny, tmp_path / "run", *flags, "--router-url", address)
    assert done.returncode == 0, done.stderr
    shipped = assert_promises(tmp_path / "run", 8)
    # Episodes that were dispatched together end together, until they drift apart.
    under_way = shipped.filter(pl.col("step") > 4)
    assert under_way["mixed_nodes"].sum() >= under_way["sampled_nodes"].sum() / 3


def test_adapters(engines: tuple[Engine, Engine], tiny: Policies, tmp_path: Path) -> None:
    flags = [*url(engines[1]), "--lora", "--policies", str(tiny.adapters), "--steps", "3"]
    done = capture(tiny, tmp_path / "run", *flags)
    assert done.returncode == 0, done.stderr
    assert_promises(tmp_path / "run", 3)


def test_old_groups_are_dropped(
    engines: tuple[Engine, Engine], tiny: Policies, tmp_path: Path
) -> None:
    flags = [*url(engines[0]), "--policies", str(tiny.policies), "--steps", "4"]
    done = capture(tiny, tmp_path / "run", *flags, "--max-off-policy-steps", "1")
    assert done.returncode == 0, done.stderr
    shipped = assert_promises(tmp_path / "run", 4)
    assert shipped["off_policy/max"].max() == 1
    dropped = [row["off_policy/dropped"] for row in logged(tmp_path / "run").values()]
    assert sum(dropped) > 0
    assert all(count % 2 == 0 for count in dropped)  # whole groups


def test_an_update_that_the_second_engine_refuses(
    engines: tuple[Engine, Engine], tiny: Policies, tmp_path: Path
) -> None:
    policies = tmp_path / "policies"  # outside the second engine's policies root
    shutil.copytree(tiny.policies / "step_1", policies / "step_1")
    done = capture(tiny, tmp_path / "run", *url(*engines), "--policies", str(policies))
    assert done.returncode == 1
    assert "v1 was not taken by every engine" in done.stderr
    assert "engine_1" in done.stderr
    assert "policies root" in done.stderr
    assert_promises(tmp_path / "run", 1)
    for engine in engines:  # the one that took it was put back
        assert engine.label() == "0"
        assert engine.call("/weight_info")[1]["paused"] is False
    first, second = (engine.logprobs() for engine in engines)
    assert first == pytest.approx(second, abs=1e-6)


def test_interrupted_and_resumed(
    engines: tuple[Engine, Engine], tiny: Policies, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = [*url(engines[0]), "--policies", str(tiny.policies)]
    with capturing(tiny, run, *flags) as started:
        wait_for(lambda: 3 in logged(run), started)
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 130
    last = max(logged(run))
    assert_promises(run, last)
    assert engines[0].generate(2)["token_ids"]  # not left paused

    # Going on from an earlier step takes the later batches back.
    too_late = capture(tiny, run, *flags, "--resume-step", str(last + 1))
    assert too_late.returncode == 1
    done = capture(tiny, run, *flags, "--resume-step", str(last - 1), "--steps", str(last + 1))
    assert done.returncode == 0, done.stderr
    assert "taken back" in done.stderr
    shipped = assert_promises(run, last + 1)
    assert (shipped["episodes"] == 4).all()


def children(pid: int) -> list[int]:
    """The processes that a process started and that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == pid and stat[0] != "Z":
                found.append(int(entry.name))
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_engine(pid: int) -> bool:
    return b"traceage.capture.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_an_engine_is_killed(tiny: Policies, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--engines", "1", "--router", "--policies", str(tiny.policies)]
    with capturing(tiny, run, *flags, "--", "--max-model-len", "2048") as started:
        wait_for(lambda: 2 in logged(run), started)
        servers = children(started.pid)
        assert len(servers) == 2
        family = [*servers, *(worker for pid in servers for worker in children(pid))]
        family += [worker for pid in family for worker in children(pid)]
        assert len(set(family)) >= 4  # an engine's server, core and worker, and the router
        (engine,) = filter(is_engine, servers)
        os.kill(engine, signal.SIGKILL)
        stderr = started.communicate(timeout=60)[1]
    assert started.returncode == 1
    assert "engine_0" in stderr
    wait_for(lambda: not any(map(lives, family)))
    assert_promises(run, max(logged(run)))


def test_collective_rpc_never_labels(
    keyed_engine: Engine, tiny: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    run = tmp_path / "run"
    flags = ["--update-path", "collective-rpc", "--policies", str(tiny.policies), "--steps", "3"]
    done = capture(tiny, run, *url(keyed_engine), *flags)
    assert done.returncode == 0, done.stderr
    metrics = ta.off_policy_metrics(ta.scan_spans(run, quiet=True)).filter(pl.col("episodes") > 0)
    assert metrics.height == 3
    assert (metrics["coverage"] == 0).all()
    assert (metrics["default_tokens"] == metrics["sampled_tokens"]).all()
    assert metrics["off_policy/token/mean"].null_count() == metrics.height
    assert metrics["off_policy/token/max"].null_count() == metrics.height
    assert ta.age_counts(ta.scan_spans(run, quiet=True)).height == 0
    for row in logged(run).values():
        assert row["off_policy/token/mean"] is None
        assert row["off_policy/mean"] is not None  # the orchestrator knows when it dispatched


@pytest.mark.parametrize("lora", [False, True])
def test_probe(tiny: Policies, lora: bool) -> None:
    label, tokens = "7" if lora else "5", 4000
    whole = [sys.executable, "-m", "traceage", "capture", "probe", "--model", str(tiny.model)]
    whole += ["--tokens", str(tokens), *(["--lora"] if lora else [])]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if "ok" not in line[:3])
    boot = "0" if lora else "default"
    first = [span.split() for span in lines["first request"].split(", ")]
    assert [version for version, _ in first] == [boot, label]
    cut = first[0][1].removeprefix("0-")
    assert first[1][1] == f"{cut}-{tokens}"
    assert lines["second request"] == f"{label} 0-8"
    assert "FAILED" not in done.stdout


def test_training_raises_the_reward(
    engines: tuple[Engine, Engine], tiny: Policies, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = [*url(engines[0]), "--train", "--steps", "32", "--batch-size", "16"]
    flags += ["--group-size", "8", "--concurrency", "32", "--max-tokens", "96"]
    done = capture(tiny, run, *flags)
    assert done.returncode == 0, done.stderr
    assert_promises(run, 32)
    rewards = [logged(run)[step]["reward/mean"] for step in range(1, 33)]
    assert sum(rewards[:3]) / 3 < 0.30
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.08

    # The trainer's streams fold onto every trained node.
    columns = ["step", "node", "turn", "index", "age", "logprob", "trainer_logprob", "entropy"]
    tokens = ta.scan_tokens(run, [*columns, "advantage", "mixed"], quiet=True).collect()
    assert tokens["step"].n_unique() == 32
    for stream in ("trainer_logprob", "entropy", "advantage", "logprob"):
        assert tokens[stream].null_count() == 0
    assert sorted(logged(run, "trainer")) == list(range(1, 33))
    # A token of age 0 whose context is of age 0 as well was sampled by the weights that the trainer
    # scored it under: they differ by bfloat16 against float32 and by the rounding of the streams.
    now = tokens.filter(pl.col("age") == 0, pl.col("turn") == 0, ~pl.col("mixed"))
    ratio = pl.col("trainer_logprob") - pl.col("logprob")
    kl = now.select((ratio.exp() - ratio - 1).mean()).item()
    assert now.height > 1000
    assert kl < 3e-4
    old = tokens.filter(pl.col("age") >= 2)
    assert old.select((ratio.exp() - ratio - 1).mean()).item() > 3 * kl

    # Going on from an earlier checkpoint: the last one belongs to a batch that is taken back.
    before = (run / "policies" / "step_32" / "model.safetensors").read_bytes()
    done = capture(tiny, run, *flags, "--resume-step", "31")
    assert done.returncode == 0, done.stderr
    assert "16 traces of batches after step 31 are taken back" in done.stderr
    shipped = assert_promises(run, 32)
    assert (shipped["episodes"] == 16).all()
    assert (run / "policies" / "step_32" / "model.safetensors").read_bytes() != before


def test_training_does_not_touch_checkpoints_of_others(tiny: Policies, tmp_path: Path) -> None:
    policies = tmp_path / "policies"
    shutil.copytree(tiny.policies / "step_3", policies / "step_3")
    done = capture(tiny, tmp_path / "run", "--train", "--policies", str(policies))
    assert done.returncode == 1
    assert "holds checkpoints already" in done.stderr
    assert (policies / "step_3" / "STABLE").exists()
