"""sweep.csv and sweep.html: one row per job, finished or not, and the right frontier."""

import csv
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from support.pages import Page, Picture, write_lines, write_status, write_words

from conf import sweep as sweeps
from trainer.pages.__main__ import main
from trainer.pages.frontier_chart import draw_sweep, pareto
from trainer.pages.sweep_jobs import Job, Sweep, best, grouped, results
from trainer.pages.sweep_page import sweep_svg, write_sweep
from trainer.runs.lock import lock_folder
from trainer.runs.run_files import load_run

NONE = dict.fromkeys(("objective", "reward/raw_mean", "kl/ref_sequence"))
NOTE = {"level": "warn", "title": "Hacked", "text": "t", "iteration": 3, "until": None}


def write_job(folder: Path, *, coeff: float, iterations: int = 15, state: str | None = "finished"):
    rows = [
        {"reward/mean": float(i), "kl/ref_sequence": (i - 3) / (1 + coeff), "kl/coeff": coeff}
        for i in range(1, iterations + 1)
    ]
    first = {"eval/sampled_accuracy": 0.1, "reward/mean": 99.0}
    write_lines(folder, first, *rows, {"eval/sampled_accuracy": 0.75}, begin=0)
    if state:
        notes = [NOTE, {**NOTE, "title": "Ok", "until": 4}]
        write_status(folder, state=state, objective=0.5, notes=notes)
    (folder / "report.html").touch()
    write_words(folder, "experiment=grpo_tiny", f"kl.coeff={coeff}", "env.api_key=planted-3")


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Write a sweep: two finished jobs, one that was killed and one that never began."""
    folder = tmp_path / "multi"
    write_job(folder / "kl.coeff=10", coeff=10.0)
    write_job(folder / "kl.coeff=20", coeff=20.0)
    write_job(folder / "kl.coeff=2", coeff=2.0, iterations=4, state=None)
    write_words(folder / "kl.coeff=3,policy.model=a" / "b", "kl.coeff=3", "policy.model=a/b")
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    return folder


def job(name: str, reward=None, kl=None, *, state="finished", objective=None, **overrides) -> Job:
    values = {"objective": objective, "reward/raw_mean": reward, "kl/ref_sequence": kl}
    keys = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    return Job(name, load_run("nowhere"), keys, {"state": state, **NONE, **values})


def test_the_csv_has_a_row_per_job_with_means_over_its_end(sweep):
    write_status(sweep / "kl.coeff=3,policy.model=a" / "b", state="failed", reason="<b>why")
    page = Page(write_sweep(sweep))
    assert "<b>why" in page.texts
    assert {*page.attributes("href")} == {f"kl.coeff%3D{c}/report.html" for c in (2, 10, 20)}
    assert "planted-3" not in page.source + (sweep / "sweep.csv").read_text()
    assert (page.texts.count("Hacked"), page.texts.count("Ok")) == (1, 0), "once for all jobs"
    with open(sweep / "sweep.csv", newline="") as file:
        short, unborn, whole, _ = csv.DictReader(file)
    wanted = {"job": "kl.coeff=10", "state": "finished", "objective": "0.5"}
    wanted |= {"reward/raw_mean": "14.0", "iterations_averaged": "3"}  # 13 to 15, a quarter
    assert wanted.items() <= whole.items()
    assert float(whole["kl/ref_sequence"]) == pytest.approx(11 / 11)
    assert float(whole["eval/sampled_accuracy"]) == 0.75
    # one iteration, not that after training
    wanted = {"job": "kl.coeff=2", "state": "not started", "objective": ""}
    assert (
        wanted | {"reward/raw_mean": "4.0", "iterations_averaged": "1"}
    ).items() <= short.items()
    wanted = {"job": "kl.coeff=3,policy.model=a/b", "kl.coeff": "3", "policy.model": "a/b"}
    assert (wanted | {"reward/raw_mean": ""}).items() <= unborn.items()


def test_the_best_setting_is_not_that_of_the_luckiest_seed(tmp_path):
    values = [(0, 1, 0.9), (0, 2, 0.1), (1, 1, 0.6), (1, 2, 0.5)]
    jobs = [job(f"{c}{s}", objective=o, kl__coeff=c, seed=s) for c, s, o in values]
    jobs.append(job("13", objective=0.0, state="failed", kl__coeff=1, seed=3))
    found = best(jobs)
    assert (found.name, found.mean("objective")) == ("kl.coeff=1", pytest.approx(0.55))
    tied = best([job("a", kl=2.0, objective=1.0), job("b", kl=1.0, objective=1.0)])
    assert tied.name == "b", "at equal objectives that with the lower KL"
    ended = Sweep(tmp_path, jobs, live=False, command="the command")
    assert ended.state == "failed"
    printed = results(ended)
    rows = [line.split()[:2] for line in printed[1:3]]
    assert rows == [["kl.coeff=0", "0.5"], ["kl.coeff=1", "0.55"]]
    assert "kl.coeff=1" in printed[3]
    assert printed[-1].endswith("the command")


PLACES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=40)


@given(PLACES)
def test_the_frontier_is_what_no_other_setting_beats(places):
    jobs = [job(str(i), reward / 4, kl / 4, a=i) for i, (reward, kl) in enumerate(places)]
    found = {(s.place()[1] * 4, s.place()[0] * 4) for s in pareto(grouped(jobs))}
    assert found == {
        (reward, kl)
        for reward, kl in places
        if not any(r >= reward and k <= kl and (r, k) != (reward, kl) for r, k in places)
    }


def test_a_sweep_whose_page_cannot_be_written_ends_with_one_line_and_its_results(sweep, capsys):
    (sweep / "sweep.csv").mkdir()
    sweeps.OPEN[:] = [(sweep, lock_folder(sweep))]
    sweeps.end()
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert "sweep.csv" in printed.err
    assert "kl.coeff=20" in printed.out
    lock_folder(sweep).release()


def test_unfinished_jobs_enter_neither_means_nor_the_line_and_seeds_are_one_point():
    running = {"reward": 9.0, "kl": 0.1, "state": "running"}
    jobs = [
        job("a1", 1.0, 4.0, c="a", seed=1),
        job("a2", **running, c="a", seed=2),
        job("a3", 0.5, 6.0, c="a", seed=3),
        job("b1", **running, c="b", seed=1),
        job("c1", 2.0, 6.0, c="c", seed=1),
    ]
    a, b, c = grouped(jobs)
    assert [s.spots() for s in (a, b, c)] == [[(4.0, 1.0), (6.0, 0.5)], [(0.1, 9.0)], [(6.0, 2.0)]]
    assert (a.place(), a.label) == ((5.0, 0.75), "a")
    assert pareto([a, b, c]) == [a, c]
    drawn = Picture(draw_sweep(jobs, width=480, height=340))
    assert len(drawn.all(**{"class": "bars"})) == 1  # of the one with seeds
    assert sum("dasharray" in dot.attrib["style"] for dot in drawn.dots) == 1


def test_the_command_takes_a_sweep_and_reports_unrelated_runs_one_by_one(sweep, tmp_path, capsys):
    write_job(tmp_path / "a" / "1", coeff=1.0)
    write_job(tmp_path / "b" / "2", coeff=1.0)
    drawn = tmp_path / "x.svg"
    assert main([str(tmp_path)]) == 0
    pages = [*sorted(tmp_path.glob("?/?/report.html")), sweep / "sweep.html"]
    assert capsys.readouterr().out.split() == [str(page) for page in pages]
    assert main([str(tmp_path), "--svg", str(drawn)]) == 2
    capsys.readouterr()
    assert main([str(sweep), "--svg", str(drawn)]) == 0
    assert drawn.read_text() == sweep_svg(sweep)


def test_runs_of_anywhere_are_compared_on_one_page(sweep, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_job(Path("a/one"), coeff=1.0)
    write_job(Path("b/two"), coeff=1.0)  # the same words, another code
    write_words(Path("b/two"), "experiment=other", "kl.coeff=1.0")
    assert main(["a/one", "b/two", "multi/kl.coeff=10"]) == 0
    assert capsys.readouterr().out == "compare.html\n"
    page = Page(tmp_path / "compare.html")
    drawn = page.charts()["Reward against KL to the reference"]
    assert {"one, two", "kl.coeff=10"} <= {*drawn.texts(**{"class": "value"})}
    assert not drawn.all(style="stroke-width:2"), "no start is that of two tasks"
    reports = ("a/one/report.html", "b/two/report.html", "multi/kl.coeff%3D10/report.html")
    assert {*page.attributes("href")} == {*reports}
    assert {"one", "two", "experiment", "grpo_tiny", "other"} <= {*page.texts}
    assert main(["a/one", "nowhere"]) == 2
