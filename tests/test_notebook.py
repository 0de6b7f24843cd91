"""docs/notebook.ipynb is executed by a real kernel: its curves are in the cell, and rise."""

import re
import warnings
from base64 import b64decode
from pathlib import Path

import pytest
from runs import ROOT, lines

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def outputs(notebook) -> list[dict]:
    return [out for cell in notebook.cells for out in cell.get("outputs", [])]


def picture(notebook) -> str:
    """Return the one picture of a notebook's cells, as text."""
    shown = [str(out.get("data", {}).get("text/html", "")) for out in outputs(notebook)]
    (found,) = [html for html in shown if "<img" in html]
    return b64decode(re.findall(r"base64,([^\"]+)", found)[0]).decode()


def accuracies(notebook) -> tuple[float, ...]:
    said = "".join(out["text"] for out in outputs(notebook) if out["output_type"] == "stream")
    before, after = re.findall(r"accuracy ([\d.]+) -> ([\d.]+)", said)[0]
    return float(before), float(after)


def read():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jupyter's own packages
        import nbformat
    return nbformat.read(NOTEBOOK, 4)


def test_the_notebook_is_kept_with_its_picture_and_names_no_place_of_a_machine():
    notebook = read()
    assert "<svg" in picture(notebook)
    before, after = accuracies(notebook)
    assert after > before + 0.2
    assert not re.search(r"/tmp/|/root/|/home/", NOTEBOOK.read_text())


@pytest.mark.slow
@pytest.mark.learn
def test_the_notebook_runs_as_it_stands(tmp_path, monkeypatch):
    notebook = read()
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbclient import NotebookClient

        place = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    assert "reward" in picture(notebook).lower()
    before, after = accuracies(notebook)
    assert after > before + 0.2
    (folder,) = Path(tmp_path, "outputs", "grpo_own").iterdir()
    rewards = [line["reward/mean"] for line in lines(folder / "metrics.jsonl")[1:]]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    assert (folder / "report.html").stat().st_size > 10_000
