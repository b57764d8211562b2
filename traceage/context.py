"""Runs -> what the rest of their completion, and all that comes before them, adds to each.

The runs of a completion stand together, in order, and tile it: the one that starts at 0 is its
first. What a token was conditioned on is a walk back from its run: through its own completion, then
through those of the sampled nodes above it in the message graph. Each step of that walk is a link
from a run to the run before it, so a whole table of them is walked at once, forks or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.int32] | NDArray[np.int64]

NO_VERSION = 1 << 31
"""Above every version, so that it is never the lowest."""


def completion_tokens(nodes: Integers, starts: Integers, ends: Integers) -> pl.Series:
    """How many sampled tokens the completion of each run has: Int32, null without a node (-1).

    >>> nodes, starts, ends = np.array([[1, 1, 2, -1], [0, 3, 0, 0], [3, 7, 0, 0]])
    >>> completion_tokens(nodes, starts, ends).to_list()
    [7, 7, 0, None]
    """
    tokens = pl.Series(ends[_last_runs(starts)][np.cumsum(starts == 0) - 1], dtype=pl.Int32)
    return tokens.set(pl.Series(nodes < 0), None)


def runs_before(
    traces: Integers, branches: Integers, nodes: Integers, ancestors: Integers, starts: Integers
) -> NDArray[np.int64]:
    """The run that comes right before each one in its branch, as its index; -1 for the first.

    `ancestors` are the nearest sampled nodes above `nodes`, -1 where there is none. The runs of a
    trace stand together, by branch if at all, then by node, in ascending order.

    >>> trace = np.zeros(4, np.int32)  # two runs of node 1; after it, node 2 or else node 3
    >>> nodes, ancestors, starts = np.array([[1, 1, 2, 3], [-1, -1, 1, 1], [0, 3, 0, 0]])
    >>> runs_before(trace, trace, nodes, ancestors, starts)
    array([-1,  0,  1,  1])
    """
    before = np.arange(-1, len(starts) - 1)
    first, last = np.flatnonzero(starts == 0), _last_runs(starts)
    paths = np.cumsum((traces != np.roll(traces, 1)) | (branches != np.roll(branches, 1)))
    # One number a completion that ascends through the table, so that a search finds it.
    numbers = paths * (int(nodes.max(initial=-1)) + 2)
    at = np.searchsorted((numbers + nodes)[first], (numbers + ancestors)[first])
    before[first] = np.where(ancestors[first] < 0, -1, last[at])
    return before


def lowest_before(before: NDArray[np.int64], versions: pl.Series) -> pl.Series:
    """The lowest version among all runs before each: Int32, null where none has a version.

    `before` is as `runs_before` gives it.

    >>> lowest_before(np.array([-1, 0, 1, 1]), pl.Series([4, None, 3, 9])).to_list()
    [None, 4, 4, 4]
    """
    nothing = len(before)
    link = np.append(np.where(before < 0, nothing, before), nothing)
    lowest = np.append(versions.cast(pl.Int64).fill_null(NO_VERSION).to_numpy(), NO_VERSION)
    reach = link
    # Each round doubles how far a run has looked back: seven are enough for a hundred runs.
    while (reach < nothing).any():
        lowest = np.minimum(lowest, lowest[reach])
        reach = reach[reach]
    found = pl.Series(lowest[link[:-1]])
    return found.set(found == NO_VERSION, None).cast(pl.Int32)


def sampled_ancestors(parents: NDArray[np.int64], sampled: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The nearest sampled node above each node of a message graph; -1 where there is none.

    >>> sampled_ancestors(np.array([-1, 0, 1, 2]), np.array([True, False, False, True]))
    array([-1,  0,  0,  0])
    """
    nothing = len(parents)
    above = np.append(np.where(parents < 0, nothing, parents), nothing)
    # Of each node, the nearest sampled one on its path, itself among them.
    nearest = np.where(np.append(sampled, True), np.arange(nothing + 1), above)
    while (further := nearest[nearest] != nearest).any():
        nearest[further] = nearest[nearest[further]]
    found = nearest[above[:-1]]
    return np.where(found == nothing, -1, found)


def _last_runs(starts: Integers) -> NDArray[np.int64]:
    """The last run of each completion: the one that a first run follows, the table's end aside."""
    return np.flatnonzero(np.roll(starts, -1) == 0)
