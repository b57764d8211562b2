"""Engines for the tests of capture: started once, on loopback, and ended with the tests.

All tests here are marked `engine`; where vLLM is not installed they are not collected.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import KEY, Engine, Policies, running_engines

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    from traceage.capture.tiny_model import make_adapters, make_policies, make_tiny_model

    root = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(root / "model")
    make_policies(model, root / "policies", range(11))
    make_adapters(model, root / "adapters", range(11))
    return Policies(model, root / "policies", root / "adapters")


@pytest.fixture(scope="session")
def engines(
    tiny: Policies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that load anything of `tiny`, adapters too; the first, of any test's folder."""
    logs = tmp_path_factory.mktemp("logs")
    roots = [tmp_path_factory.getbasetemp(), tiny.model.parent]
    with running_engines(tiny.model, roots, logs, "--enable-lora") as (first, second):
        yield first, second


@pytest.fixture(scope="session")
def keyed_engine(tiny: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that wants a key and is updated through `/collective_rpc`."""
    logs = tmp_path_factory.mktemp("keyed")
    flags = ["--api-key", KEY, "--update-path", "collective-rpc"]
    with running_engines(tiny.model, [tiny.policies], logs, *flags) as (engine,):
        yield engine
