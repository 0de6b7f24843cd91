"""docs/notebook.ipynb is executed by a real kernel: its curves are in the cell, and rise."""

import re
import warnings
from base64 import b64decode
from pathlib import Path

from runs import ROOT, lines

from trainer.reports.report import run_svg

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def picture(notebook) -> str:
    """Return the one picture of a notebook's cells, as text."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    shown = [str(out.get("data", {}).get("text/html", "")) for out in outputs]
    (found,) = [html for html in shown if "<img" in html]
    return b64decode(re.findall(r"base64,([^\"]+)", found)[0]).decode()


def test_every_cell_runs_and_the_picture_is_that_of_the_run(tmp_path, monkeypatch, small_run):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jupyter's own packages
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.read(NOTEBOOK, 4)
        assert "<svg" in picture(notebook), "it is kept with its picture"
        assert not re.search(r"/tmp/|/root/|/home/", NOTEBOOK.read_text())
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.outputs = []
            cell.source = cell.source.replace('num_iterations": 24', 'num_iterations": 3')
            cell.source = cell.source.replace('num_samples": 4', 'num_samples": 1')
        place = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    (run,) = Path(tmp_path, "outputs", "grpo_own").iterdir()
    rows = lines(run / "metrics.jsonl")
    assert [row["progress/iteration"] for row in rows] == [0, 1, 2, 3]
    assert picture(notebook) == run_svg(run)
