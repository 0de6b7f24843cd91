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


def executed(folder, monkeypatch, **changes: str):
    """Return the notebook after a kernel ran it in a folder; `changes` are put in its code."""
    notebook = read()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = []
    for old, new in changes.items():
        (cell,) = [cell for cell in code if old in cell.source]
        cell.source = cell.source.replace(old, new)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbclient import NotebookClient

        place = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    return notebook


def test_every_cell_runs_and_the_picture_below_the_cell_is_that_of_the_run(
    tmp_path, monkeypatch, small_run
):
    shorter = {'num_iterations": 24': 'num_iterations": 3', 'num_samples": 4': 'num_samples": 1'}
    notebook = executed(tmp_path, monkeypatch, **shorter)
    (folder,) = Path(tmp_path, "outputs", "grpo_own").iterdir()
    said = lines(folder / "metrics.jsonl")
    assert [line["progress/iteration"] for line in said] == [0, 1, 2, 3]
    drawn = re.findall(r"iteration (\d+): task ([-\d.]+)", picture(notebook))
    assert [(int(i), float(reward)) for i, reward in drawn] == [
        (i, pytest.approx(line["reward/mean"], abs=6e-4)) for i, line in enumerate(said[1:], 1)
    ]
    evaluated = [line["eval/sampled_accuracy"] for line in (said[0], said[-1])]
    assert accuracies(notebook) == pytest.approx(evaluated, abs=5e-3)
    assert "KL " in "".join(out.get("text", "") for out in outputs(notebook))


@pytest.mark.runs
@pytest.mark.learn
def test_the_notebook_runs_as_it_stands(tmp_path, monkeypatch):
    notebook = executed(tmp_path, monkeypatch)
    assert "reward" in picture(notebook).lower()
    before, after = accuracies(notebook)
    assert after > before + 0.2
    (folder,) = Path(tmp_path, "outputs", "grpo_own").iterdir()
    rewards = [line["reward/mean"] for line in lines(folder / "metrics.jsonl")[1:]]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    assert (folder / "report.html").stat().st_size > 10_000
