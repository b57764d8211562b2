"""Walks back through runs and through the message graph, against plain loops."""

from __future__ import annotations

from random import Random

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from traceage.context import completion_tokens, lowest_before, runs_before, sampled_ancestors

few = settings(max_examples=60, deadline=None)
forests = st.builds(
    lambda size, seed, back: grow(size, Random(seed), back),
    st.integers(0, 120),
    st.integers(0, 999),
    st.sampled_from([1, 3, 120]),
)


def grow(size: int, rng: Random, back: int) -> list[int]:
    """What each of `size` things follows: one of the `back` before it, or now and then nothing."""
    return [
        -1 if at == 0 or rng.random() < 0.02 else rng.randrange(max(0, at - back), at)
        for at in range(size)
    ]


def walk(links: list[int], at: int) -> list[int]:
    """All that comes before, the nearest first."""
    path = []
    while (at := links[at]) >= 0:
        path.append(at)
    return path


@few
@given(forests, st.integers(0, 999))
def test_the_lowest_of_all_before(links: list[int], seed: int) -> None:
    rng = Random(seed)
    versions = [rng.choice([None, rng.randrange(-50, 50)]) for _ in links]
    wanted = []
    for at in range(len(links)):
        known = [version for one in walk(links, at) if (version := versions[one]) is not None]
        wanted.append(min(known, default=None))
    found = lowest_before(np.array(links, np.int64), pl.Series(versions, dtype=pl.Int32))
    assert found.dtype == pl.Int32
    assert found.to_list() == wanted


def test_versions_at_the_ends_of_their_type() -> None:
    versions = pl.Series([2**31 - 1, None, -(2**31) + 1, 0], dtype=pl.Int32)
    found = lowest_before(np.arange(-1, 3), versions)
    assert found.to_list() == [None, 2**31 - 1, 2**31 - 1, -(2**31) + 1]


@few
@given(forests, st.integers(0, 999), st.sampled_from([0.02, 0.5, 0.98]))
def test_the_nearest_sampled_node_above(parents: list[int], seed: int, share: float) -> None:
    rng = Random(seed)
    sampled = [rng.random() < share for _ in parents]
    wanted = [
        next((one for one in walk(parents, at) if sampled[one]), -1) for at in range(len(parents))
    ]
    found = sampled_ancestors(np.array(parents, np.int64), np.array(sampled, np.bool_))
    assert found.tolist() == wanted


def test_traces_and_branches_are_apart() -> None:
    """The same nodes again and again, in turn by branch and by trace; and a trace of none."""
    # trace, branch, node, ancestor, start, end
    runs = [
        (3, 0, 1, -1, 0, 2),
        (3, 0, 1, -1, 2, 5),
        (3, 0, 4, 1, 0, 0),
        (3, 1, 1, -1, 0, 2),
        (3, 1, 1, -1, 2, 5),
        (7, 0, 1, -1, 0, 3),
        (5, -1, -1, -1, 0, 0),
        (8, 0, 0, -1, 0, 1),
        (8, 0, 4, 0, 0, 6),
    ]
    trace, branch, node, ancestor, start, end = np.array(runs, np.int32).T
    before = runs_before(trace, branch, node, ancestor, start)
    assert before.tolist() == [-1, 0, 1, -1, 3, -1, -1, -1, 7]
    lengths = completion_tokens(node, start, end)
    assert lengths.to_list() == [5, 5, 0, 5, 5, 3, None, 1, 6]


def test_no_runs() -> None:
    none = np.zeros(0, np.int32)
    assert completion_tokens(none, none, none).to_list() == []
    assert runs_before(none, none, none, none, none).tolist() == []
