"""Worker processes: order, reuse, and what happens when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor

import pytest

from traceage.workers import ordered_map, start_workers


def whose(item: int) -> tuple[int, int]:
    """The item and the process that did it; slow enough that both workers get some."""
    time.sleep(0.05)
    return item, os.getpid()


def die(item: int) -> int:
    if item:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def processes() -> set[int]:
    """The worker processes that did some items."""
    return {pid for _, (_, pid) in ordered_map(whose, range(9), 2)} - {os.getpid()}


def test_items_come_in_order_and_the_first_is_done_here() -> None:
    done = [found for _, found in ordered_map(whose, range(20), 2)]
    assert [item for item, _ in done] == list(range(20))
    assert done[0][1] == os.getpid()
    assert os.getpid() not in {pid for _, pid in done[1:]}


def test_who_wants_little_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: int) -> None:
        pytest.fail("it starts processes")

    monkeypatch.setattr("traceage.workers._executor", start)
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in range(9):
            drawn.append(item)
            yield item

    done = ordered_map(whose, items(), 2)
    assert next(done)[0] == 0
    done.close()  # type: ignore[attr-defined]
    assert drawn == [0]


def test_threads_share_the_processes_that_were_started() -> None:
    start_workers(2, "traceage.formats.parts")
    here = processes()
    there: list[set[int]] = []
    thread = threading.Thread(target=lambda: there.append(processes()))
    thread.start()
    thread.join()
    assert len(here | there[0]) <= 2


def test_a_killed_worker_is_an_error_and_the_next_reading_has_others() -> None:
    before = processes()
    with pytest.raises(BrokenExecutor):
        list(ordered_map(die, range(9), 2))
    after = processes()
    assert after
    assert not before & after


def test_none_outlives_its_parent() -> None:
    code = """
from test_workers import processes
print(*processes())
"""
    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=True
    )
    assert done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
