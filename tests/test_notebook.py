"""docs/notebook.ipynb is executed by a real kernel: its curves are in the cell, and rise."""

import re
import warnings
from base64 import b64decode
from pathlib import Path

import pytest
from runs import ROOT, lines

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def picture(notebook) -> str:
    """Return the one picture of a notebook's cells, as text."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    shown = [str(out.get("data", {}).get("text/html", "")) for out in outputs]
    (found,) = [html for html in shown if "<img" in html]
    return b64decode(re.findall(r"base64,([^\"]+)", found)[0]).decode()


def read():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jupyter's own packages
        import nbformat
    return nbformat.read(NOTEBOOK, 4)


def executed(folder, monkeypatch, **changes: str):
    """Return the notebook and its metrics after a kernel ran it; `changes` are put in its code."""
    notebook = read()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = []
        for old, new in changes.items():
            cell.source = cell.source.replace(old, new)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbclient import NotebookClient

        place = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    (run,) = Path(folder, "outputs", "grpo_own").iterdir()
    return notebook, lines(run / "metrics.jsonl")


def test_the_notebook_is_kept_with_its_picture_and_names_no_place_of_a_machine():
    assert "<svg" in picture(read())
    assert not re.search(r"/tmp/|/root/|/home/", NOTEBOOK.read_text())


def test_every_cell_runs_and_the_picture_is_that_of_the_run(tmp_path, monkeypatch, small_run):
    shorter = {'num_iterations": 24': 'num_iterations": 3', 'num_samples": 4': 'num_samples": 1'}
    notebook, rows = executed(tmp_path, monkeypatch, **shorter)
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2, 3]
    drawn = re.findall(r"iteration (\d+): task ([-\d.]+)", picture(notebook))
    assert [(int(i), float(reward)) for i, reward in drawn] == [
        (i, pytest.approx(row["reward/mean"], abs=6e-4)) for i, row in enumerate(rows[1:], 1)
    ]
