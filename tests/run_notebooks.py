"""Runs the notebooks: `python tests/run_notebooks.py` does, and keeps their outputs.

Kept are the outputs alone, and nothing of the machine or the time that they were made on.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The notebook with the outputs of its cells, as run in `folder`.

    Raises `CellExecutionError` when a cell fails.
    """
    # A font cache that is not there yet would be built by the first figure, and say so among its
    # outputs.
    import_module("matplotlib.font_manager")
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=300,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    done: NotebookNode = client.execute()
    done.metadata = nbformat.from_dict(METADATA)
    return done


def main() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(execute(nbformat.read(path, as_version=4), NOTEBOOKS), path)


if __name__ == "__main__":
    main()
