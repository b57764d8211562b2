"""The notebooks, run: each works from a fresh checkout, and gives the outputs that it keeps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode
from run_notebooks import METADATA, NOTEBOOKS, execute

NAMES = ["capture_your_own", "does_staleness_hurt", "quickstart"]

MOST_BYTES = 600_000


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Notebooks and data, apart from the sources and from the user's own IPython start-up files."""
    shutil.copytree(NOTEBOOKS, tmp_path / "notebooks", ignore=shutil.ignore_patterns("*.html"))
    (tmp_path / "data").symlink_to(NOTEBOOKS.parent / "data", target_is_directory=True)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return tmp_path


def read(path: Path) -> NotebookNode:
    notebook: NotebookNode = nbformat.read(path, as_version=4)
    return notebook


def shown(notebook: NotebookNode) -> list[list[Any]]:
    """What each code cell put out: of streams and results the text, of images that there is one."""
    return [
        [
            (output.get("name"), output.get("text"), sorted(data), data.get("text/plain"))
            for output in cell.outputs
            for data in [output.get("data", {})]
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_all_are_tested() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_that_are_kept(name: str, checkout: Path) -> None:
    kept = read(NOTEBOOKS / f"{name}.ipynb")
    fresh = execute(read(checkout / "notebooks" / f"{name}.ipynb"), checkout / "notebooks")
    assert shown(fresh) == shown(kept)


@pytest.mark.parametrize("name", NAMES)
def test_starts_at_the_root_too(name: str, checkout: Path) -> None:
    kept = read(NOTEBOOKS / f"{name}.ipynb")
    kept.cells = kept.cells[:4]  # set-up, and what first reads the data
    assert any(outputs for outputs in shown(kept))
    fresh = execute(nbformat.from_dict(kept), checkout)
    assert shown(fresh) == shown(kept)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_clean(name: str) -> None:
    path = NOTEBOOKS / f"{name}.ipynb"
    kept = read(path)
    nbformat.validate(kept)
    assert path.stat().st_size < MOST_BYTES
    assert kept.metadata == METADATA
    cells = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(cell.metadata for cell in kept.cells)
    streams = [output for cell in cells for output in cell.outputs if "name" in output]
    assert {stream.name for stream in streams} == {"stdout"}
    images = [kinds for outputs in shown(kept) for *_, kinds, _ in outputs if "image/png" in kinds]
    assert len(images) >= 2
