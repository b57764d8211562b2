"""An ordered map over worker processes, a bounded number of items ahead of the reader.

Workers are started by loky: each is a fresh interpreter (never a fork of one whose polars threads
hold locks) that does not import the caller's main module, so it is safe in notebooks and in
scripts without a main guard.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future
from importlib import import_module
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""Items submitted beyond those being worked on, for each worker."""


def available_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ordered_map(
    function: Callable[[T], R], items: Iterable[T], workers: int
) -> Iterator[tuple[T, R]]:
    """Each item with `function(item)`, in order; in this process when `workers` is below 2.

    Items are drawn as room comes up, so they may be produced lazily. An exception of `function`
    is raised at its item's turn. Closing the iterator cancels what has not started. The first item
    is done in this process: whoever wants no more than that starts no others.
    """
    items = iter(items)
    for item in items if workers < 2 else islice(items, 1):
        yield item, function(item)
    if workers < 2:
        return
    executor = _executor(workers)
    pending: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            pending.append((item, executor.submit(function, item)))
            if len(pending) > workers * (1 + AHEAD):
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    except (KeyboardInterrupt, BrokenExecutor):
        _forget(executor)
        executor.shutdown(wait=False, kill_workers=True)
        raise
    finally:
        for _, future in pending:
            future.cancel()


def start_workers(workers: int, module: str) -> None:
    """Start worker processes that will soon be asked for, and let them import `module`.

    What this process does in the meantime, such as importing polars, costs nothing then.
    """
    if workers >= 2:
        executor = _executor(workers)
        for _ in range(workers):
            executor.submit(_import, module)


def _import(module: str) -> None:
    import_module(module)


_lock = threading.Lock()
_executors: dict[tuple[int, int], Any] = {}
"""By the process that started them (after a fork, that is another one) and how many workers."""


def _executor(workers: int) -> Any:
    # loky keeps one executor a thread, and polars reads in a thread of its own: that would be new
    # processes for each reading.
    key = os.getpid(), workers
    with _lock:
        if key not in _executors:
            from loky import ProcessPoolExecutor

            # They count and decode; threads for linear algebra would only take time to start.
            environment = {"OPENBLAS_NUM_THREADS": "1"}
            _executors[key] = ProcessPoolExecutor(workers, timeout=60, env=environment)
        return _executors[key]


@atexit.register
def _stop() -> None:
    """End the worker processes, at the end of this one; they have nothing left to do."""
    for (process, _), executor in _executors.items():
        if process == os.getpid():
            executor.shutdown(kill_workers=True)


def _forget(executor: Any) -> None:
    """Do not use these processes again."""
    with _lock:
        for key in [key for key, known in _executors.items() if known is executor]:
            del _executors[key]
