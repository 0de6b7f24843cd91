"""sweep.csv and sweep.html: one row per job, finished or not, and the right frontier."""

import csv
import itertools
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from pages import Page, Picture, write_lines, write_status, write_words

from trainer.reports.__main__ import main
from trainer.reports.frontier import frontier, pareto
from trainer.reports.sweep_jobs import PLAN, Job, Sweep, best, grouped, load_sweep, results
from trainer.reports.sweep_page import sweep_svg, write_sweep
from trainer.reports.trackers.jsonl import JsonlTracker
from trainer.runs.lock import held
from trainer.runs.run_files import load_run


def write_job(folder: Path, *, coeff: float, iterations: int = 15, state: str | None = "finished"):
    rows = [
        {"reward/mean": float(i), "kl/ref_sequence": (i - 3) / (1 + coeff), "kl/coeff": coeff}
        for i in range(1, iterations + 1)
    ]
    first, last = (
        {"eval/sampled_accuracy": 0.1, "reward/mean": 99.0},
        {"eval/sampled_accuracy": 0.75},
    )
    write_lines(folder, first, *rows, last, begin=0)
    if state:
        write_status(folder, state=state, objective=0.5)
    (folder / "report.html").touch()
    write_words(folder, "experiment=grpo_tiny", f"kl.coeff={coeff}", "env.api_key=planted-3")


def write_jobs(folder: Path) -> Path:
    """Write a sweep of a finished job, one that was killed and one that never began."""
    write_job(folder / "kl.coeff=10", coeff=10.0)
    write_job(folder / "kl.coeff=2", coeff=2.0, iterations=4, state=None)
    unborn = folder / "kl.coeff=3,policy.model=a" / "b"
    write_words(unborn, "kl.coeff=3", "policy.model=a/b")
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    return folder


NONE = dict.fromkeys(("objective", "reward/raw_mean", "kl/ref_sequence"))


def job(
    name: str = "0",
    reward: float | None = None,
    kl: float | None = None,
    *,
    state: str = "finished",
    objective: float | None = None,
    **overrides: Any,
) -> Job:
    values = {"objective": objective, "reward/raw_mean": reward, "kl/ref_sequence": kl}
    keys = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    return Job(name, load_run("nowhere"), keys, {"state": state, **NONE, **values})


def picture(jobs: list[Job]) -> Picture:
    return Picture(frontier(jobs, width=480, height=340))


def heads(page: Page) -> list[str]:
    return re.findall("<th>(.*?)</th>", page.source.replace("<wbr>", ""))


def test_the_csv_has_a_row_per_job_with_means_over_its_end(tmp_path):
    page = Page(write_sweep(write_jobs(tmp_path)))
    assert page.attributes("href") == ["kl.coeff%3D2/report.html", "kl.coeff%3D10/report.html"]
    assert "planted-3" not in page.source + (tmp_path / "sweep.csv").read_text()
    with open(tmp_path / "sweep.csv", newline="") as file:
        short, unborn, whole = csv.DictReader(file)
    names = ["kl.coeff=2", "kl.coeff=3,policy.model=a/b", "kl.coeff=10"]
    assert [row["job"] for row in (short, unborn, whole)] == names
    assert float(whole["reward/raw_mean"]) == 14  # iterations 13 to 15, a quarter
    assert float(whole["kl/ref_sequence"]) == pytest.approx(11 / 11)
    assert float(short["reward/raw_mean"]) == 4  # one iteration, not that after training
    assert (whole["iterations_averaged"], short["iterations_averaged"]) == ("3", "1")
    assert [row["state"] for row in (whole, short)] == ["finished", "not started"]
    assert [row["objective"] for row in (whole, short)] == ["0.5", ""]
    assert float(whole["eval/sampled_accuracy"]) == 0.75
    assert (float(whole["kl/coeff"]), whole["kl.coeff"]) == (10.0, "10.0")
    own = ("kl.coeff", "policy.model", "reward/raw_mean")
    assert [unborn[key] for key in own] == ["3", "a/b", ""]


def test_the_table_holds_what_differs_between_the_jobs(tmp_path):
    for coeff in (0.0, 0.5):
        write_job(tmp_path / f"experiment=grpo_tiny,kl.coeff={coeff}", coeff=coeff)
    page = Page(write_sweep(tmp_path))
    assert heads(page) == ["kl.coeff", "KL"]  # kl/coeff would repeat kl.coeff
    same = "state finished, objective 0.5, accuracy 0.75, reward 14"
    text = f"the same in all jobs: {same}, iteration 16, iterations averaged 3"
    assert text in page.texts
    assert "kl/coeff" in (tmp_path / "sweep.csv").read_text(), "the file has all columns"


def test_a_sweep_says_which_job_runs_and_how_long_the_rest_may_take(tmp_path):
    for coeff, seconds in ((0, 100.0), (1, 140.0), (2, 30.0)):
        folder = tmp_path / f"kl.coeff={coeff}"
        write_job(folder, coeff=float(coeff), iterations=8)
        (folder / "config.yaml").write_text("trainer: {num_iterations: 40}\n")
        write_status(folder, state="running" if coeff == 2 else "finished", seconds=seconds)
    (tmp_path / PLAN).write_text('{"jobs": ["kl.coeff=2", "kl.coeff=3", "kl.coeff=4"]}')
    with held(tmp_path), held(tmp_path / "kl.coeff=2"):
        page = Page(write_sweep(tmp_path))
    left = "5 min 30 s"  # 2 x 120 + 90
    assert f"5 jobs: 2 finished, 1 running, 2 to come; about {left} left" in page.texts
    assert "Running: kl.coeff=2.0, iteration 9 of 40" in page.text


def test_a_sweep_ends_with_a_table_of_its_settings_and_the_best(tmp_path):
    jobs = [
        *(
            job(f"0{s}", 0.5, 2.0, objective=o, kl__coeff=0, seed=s)
            for s, o in ((1, 0.9), (2, 0.1))
        ),
        *(job(f"1{s}", kl=1.0, objective=0.6, kl__coeff=1, seed=s) for s in (1, 2)),
        job("13", state="failed", objective=0.0, kl__coeff=1, seed=3),
    ]
    told = results(Sweep(tmp_path, jobs, live=False, command="the command"))
    assert [line.split() for line in told[1:3]] == [
        ["kl.coeff=0", "0.5", "0.5", "2", "2", "finished"],
        ["kl.coeff=1", "0.6", "-", "1", "2", "finished,", "1", "failed"],
    ]
    best_line = "best     kl.coeff=1 (objective 0.6, KL 1; means of 2 seeds)"
    assert (told[3], told[-1]) == (best_line, "continue with: the command")
    assert results(Sweep(tmp_path, [])) == []


def test_what_the_jobs_warn_of_stands_once_on_the_page_with_their_names(tmp_path):
    write_jobs(tmp_path)
    folders = sorted(path.parent.parent for path in tmp_path.glob("*/.hydra/overrides.yaml"))
    assert len(folders) > 1
    note = {"level": "warn", "title": "Reward hacking", "text": "t", "iteration": 3, "until": None}
    for folder in folders:
        path = folder / "status.json"
        status = json.loads(path.read_text()) if path.exists() else {"state": "finished"}
        path.write_text(
            json.dumps({**status, "notes": [note, {**note, "title": "Ok", "until": 4}]})
        )
    page = Page(write_sweep(tmp_path))
    assert page.source.count("<b>Reward hacking</b>") == 1
    assert "<b>Ok</b>" not in page.source, "it was taken back"
    said = page.source.partition("<b>Reward hacking</b>")[2].partition("</p>")[0]
    assert said.count("kl.coeff=") == len(folders)


def test_the_best_setting_is_not_that_of_the_luckiest_seed():
    values = [(0, 1, 0.9), (0, 2, 0.1), (1, 1, 0.6), (1, 2, 0.5)]
    jobs = [job(f"{c}{s}", objective=o, kl__coeff=c, seed=s) for c, s, o in values]
    jobs.append(job("13", objective=0.0, state="running", kl__coeff=1, seed=3))
    found = best(jobs)
    assert found is not None
    assert (found.name, found.mean("objective")) == ("kl.coeff=1", pytest.approx(0.55))
    tied = best([job("a", kl=2.0, objective=1.0), job("b", kl=1.0, objective=1.0)])
    assert tied is not None
    assert tied.name == "b", "at equal objectives that with the lower KL"


def test_the_curve_of_the_reward_has_the_numbers_of_the_table(tmp_path):
    # the reward is the task's alone: the KL is the other axis; the second run has no KL part
    for name, part in (("a=1", -100.0), ("a=2", None)):
        own = [
            {"reward/mean": i + 10.0}
            if part is None
            else {"reward/raw_mean": float(i), "reward/mean": i + part}
            for i in range(1, 9)
        ]
        write_lines(tmp_path / name, *({**line, "kl/ref_sequence": 1.0} for line in own))
        write_words(tmp_path / name)
    rewards = [each.reached["reward/raw_mean"] for each in load_sweep(tmp_path).jobs]
    assert rewards == [7.5, 17.5]
    chart = Page(write_sweep(tmp_path)).charts()["Reward"]
    assert chart.texts()[:2] == ["Reward", "mean per reply, task"]
    assert (chart.ticks[0], chart.ticks[-1]) == (0, 20)  # 1 to 18


def test_the_frontier_is_what_no_other_setting_beats():
    random.seed(0)
    jobs = [job(str(i), random.randrange(12) / 4, random.randrange(12) / 4, a=i) for i in range(60)]
    front = pareto([setting for setting in grouped(jobs) if setting.spots()])
    places = {(s.place()[0], -s.place()[1]) for s in grouped(jobs)}

    def beaten(place: tuple[float, float]) -> bool:
        return any(o != place and o[0] <= place[0] and o[1] <= place[1] for o in places)

    expected = sorted(place for place in places if not beaten(place))
    assert [(s.place()[0], -s.place()[1]) for s in front] == expected


def test_unfinished_jobs_enter_neither_means_nor_the_line():
    jobs = [
        job("a1", 1.0, 1.0, c="a", seed=1),
        job("a2", 9.0, 0.1, state="running", c="a", seed=2),
        job("b1", 9.0, 0.1, state="running", c="b", seed=1),
        job("c1", 2.0, 4.0, c="c", seed=1),
    ]
    a, b, c = grouped(jobs)
    assert [s.spots() for s in (a, b, c)] == [[(1.0, 1.0)], [(0.1, 9.0)], [(4.0, 2.0)]]
    assert pareto([a, b, c]) == [a, c]
    shown = picture(jobs)
    styles = [dot.attrib["style"] for dot in shown.dots]
    assert ["fill:var(--paper)" in style for style in styles] == [False, True, False]
    assert ["dasharray" in style for style in styles] == [False, True, False]
    assert shown.texts(**{"class": "value"}) == ["a", "b (running)", "c"]
    assert any("dashed: unfinished" in text for text in shown.texts())
    assert "a (1 finished, 1 running): reward 1.000, KL 1.000" in shown.tips


def test_the_start_is_a_cross_and_accuracy_stands_beside_reward(tmp_path):
    for coeff, last in ((0.0, 0.1), (1.0, 0.7)):
        folder = tmp_path / f"kl.coeff={coeff}"
        rows = [{"reward/raw_mean": i - 8.0, "kl/ref_sequence": i / (1 + coeff)} for i in range(9)]
        rows[-1]["eval/sampled_accuracy"] = last
        write_lines(folder, {"eval/sampled_accuracy": 0.2}, *rows, begin=0)
        write_status(folder, state="finished", objective=last)
        write_words(folder, "experiment=ppo_tiny", f"kl.coeff={coeff}")
    page = Page(write_sweep(tmp_path))
    assert page.attributes("type", "input") == ["radio", "radio"]
    pictures = page.charts()
    reward, accuracy = (
        pictures[f"{n} against KL to the reference"] for n in ("Reward", "Accuracy")
    )
    # the first iteration's replies are those before any step; the accuracy is that of iteration 0
    assert "before training: -8.000, KL 0.000" in reward.tips
    assert "before training: 0.200, KL 0.000" in accuracy.tips
    assert any("cross: before training" in text for text in accuracy.texts())
    # means of the last two of nine iterations, each divided by 1 + coeff
    assert {"0.0: accuracy 0.100, KL 7.500", "1.0: accuracy 0.700, KL 3.750"} <= {*accuracy.tips}
    assert ["fill:var(--hue0)" in dot.attrib["style"] for dot in accuracy.dots] == [False, True]
    assert [accuracy.value(float(d.attrib["cy"])) for d in accuracy.dots] == pytest.approx(
        [0.1, 0.7], abs=0.01
    )
    for number, name in enumerate(("tiny", "other")):  # two models: no one start
        write_words(tmp_path / f"kl.coeff={number}.0", "experiment=x", f"policy.model={name}")
    assert not any("before training" in tip for tip in frontier_of(tmp_path).tips)


def frontier_of(folder: Path) -> Picture:
    return Picture(frontier(load_sweep(folder).jobs, width=420, height=320))


def test_the_replies_of_all_settings_to_a_held_out_prompt_stand_side_by_side(tmp_path):
    for coeff in range(9):
        folder = tmp_path / f"kl.coeff={coeff}"
        write_lines(folder, {"reward/raw_mean": 1.0, "kl/coeff": float(coeff)})
        write_status(folder, state="running" if coeff == 8 else "finished")
        write_words(folder, f"kl.coeff={coeff}")
        rows = [{"prompt": f"<i>{k}", "answer": f"{k}!", "reward": k / 4} for k in range(12)]
        for kind in ("before", "after") if coeff != 8 else ("before",):
            said = [{**row, "kind": kind, "response": f"<b>{kind} {coeff}"} for row in rows]
            JsonlTracker(folder, resume=True).replies(said, 1, kind=kind)
    page = Page(write_sweep(tmp_path))
    told = [text for text in page.texts if text.startswith(("<b>", "<i>"))]
    shown = [0, 2, 4, 6]  # at most six
    row = ["<b>before 0", *(f"<b>after {coeff}" for coeff in shown)]
    assert told == [text for k in range(8) for text in (f"<i>{k}", *row)]
    names = ["before training", *(f"kl.coeff={coeff}" for coeff in shown)]
    assert re.findall("<h3>(.*?)</h3>", page.source) == names * 8
    assert {"1!", "reward 0.25"} <= {*page.texts}


def test_seeds_are_one_point_with_bars_from_the_lowest_to_the_highest():
    values = [(0, 1, 1.0, 4.0), (0, 2, 0.5, 9.0), (0, 3, 0.75, 5.0), (1, 1, 0.25, 1.0)]
    jobs = [job(f"{c}{s}", r, kl, kl__coeff=c, seed=s) for c, s, r, kl in values]
    many, one = grouped(jobs)
    assert (many.label, many.place(), one.place()) == ("0", (6.0, 0.75), (1.0, 0.25))
    shown = picture(jobs)
    (bars,) = shown.all(**{"class": "bars"})  # of the one with seeds
    across, along = (
        list(map(float, re.findall(r"[\d.]+", part)))
        for part in re.findall(r"M([\d. ]+[HV][\d.]+)", bars.attrib["d"])
    )
    dot = shown.dots[0]
    # pixels from KL 0 grow with the root of the KL: 2, sqrt 6 and 3 here
    cx, start = float(dot.attrib["cx"]), across[0] - 2 * (across[2] - across[0])
    assert (cx - start) / (across[0] - start) == pytest.approx(math.sqrt(6) / 2, abs=0.01)
    assert (along[1] + along[2]) / 2 == pytest.approx(float(dot.attrib["cy"]), abs=0.1)


@pytest.mark.parametrize("most", [0.0, 0.004, 0.41, 1.0, 1.2, 50.0, 320.0])
def test_points_lie_on_axes_whose_ticks_are_right(most):
    shown = picture([job(f"{k}", k / 8, most * (k / 4) ** 2, c=f"c{k}") for k in range(5)])
    xs, ys = ([float(dot.attrib[name]) for dot in shown.dots] for name in ("cx", "cy"))
    step = (xs[4] - xs[0]) / 4
    assert [b - a for a, b in itertools.pairwise(xs)] == pytest.approx([step] * 4, abs=0.2)
    assert [shown.value(y) for y in ys] == pytest.approx([k / 8 for k in range(5)], abs=0.01)
    labels = [e for e in shown.all(text_anchor="middle") if re.fullmatch(r"[\de.-]+", e.text or "")]
    assert len(labels) >= (4 if most else 2)
    assert labels[0].text == "0"
    for label in labels:  # where the root of its value lies
        place = xs[0] + (xs[4] - xs[0]) * math.sqrt(float(label.text or 0) / (most or 1e-3))
        assert not most or float(label.attrib["x"]) == pytest.approx(place, abs=1.5)
    assert shown.root.get("aria-label") == "Reward against KL to the reference"


def test_the_command_takes_a_sweep_and_reports_unrelated_runs_one_by_one(tmp_path, capsys):
    write_job(tmp_path / "outputs" / "a" / "1", coeff=1.0)
    write_job(tmp_path / "outputs" / "b" / "2", coeff=1.0)
    sweep = write_jobs(tmp_path / "outputs" / "multi")
    assert main([str(tmp_path / "outputs")]) == 0
    pages = [*sorted((tmp_path / "outputs").glob("?/?/report.html")), sweep / "sweep.html"]
    assert capsys.readouterr().out.split() == [str(page) for page in pages]
    assert len(pages) == 3
    assert not (tmp_path / "outputs" / "sweep.html").exists()
    drawn = tmp_path / "x.svg"
    assert main([str(tmp_path / "outputs"), "--svg", str(drawn)]) == 2
    assert "of one run or sweep" in capsys.readouterr().err
    assert main([str(sweep), "--svg", str(drawn)]) == 0
    assert drawn.read_text() == sweep_svg(sweep)


def test_the_command_prints_the_table_of_a_sweep(tmp_path, capsys):
    write_job(tmp_path / "kl.coeff=10", coeff=10.0)
    write_job(tmp_path / "kl.coeff=2", coeff=2.0)
    (tmp_path / "multirun.yaml").write_text("hydra: {}\n")
    assert main([str(tmp_path), "--table"]) == 0
    head, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert head == ["", "kl.coeff=2.0", "kl.coeff=10.0"]
    last = [13, 14, 15]  # a quarter of 15
    by_hand = [f"{sum(i - 3 for i in last) / 3 / (1 + coeff):.2f}" for coeff in (2, 10)]
    found = {row[0].split(" (")[0]: row[1:] for row in rows}
    assert found["KL, nats per reply"] == by_hand
    assert found["reward"] == ["14.00", "14.00"]
    assert found["sampled held-out accuracy"] == ["0.75", "0.75"]
    assert any("before training 0.1" in row[0] for row in rows)
    assert main([str(tmp_path / "kl.coeff=2"), "--table"]) == 0
    alone = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert {len(row) for row in alone} == {2}, "a column of its own"
    assert [row[-1].strip() for row in alone][3:] == [row[1] for row in rows[1:]]
    (tmp_path / "multirun.yaml").unlink()
    assert main([str(tmp_path), "--table"]) == 2
    assert "of one run or sweep" in capsys.readouterr().err
