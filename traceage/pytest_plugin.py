"""Fixtures for the tests of code that reads or logs traces; see `traceage.testing`.

pytest finds this module by itself where traceage is installed, and imports it at its start: so it
imports nothing that takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from traceage import testing


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., testing.Record]:
    """Builds a trace: make_trace([[("3", 10), ("4", 5)]]); see `traceage.testing.make_trace`."""
    return testing.make_trace


@pytest.fixture(scope="session")
def make_episode() -> Callable[..., testing.Record]:
    """Builds an episode of traces; see `traceage.testing.make_episode`."""
    return testing.make_episode


@pytest.fixture
def trace_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run: trace_run({1: [episode, ...]}); see `traceage.testing.write_run`.

    Each call writes to a directory of its own below `tmp_path` and returns it.
    """
    numbers = count(1)

    def write(batches: Mapping[int, Sequence[testing.Record]], **options: Any) -> Path:
        return testing.write_run(tmp_path / f"run-{next(numbers)}", batches, **options)

    return write
