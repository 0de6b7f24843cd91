"""sweep.csv and sweep.html: one row per job, finished or not, and the right frontier."""

import csv
import html
import itertools
import json
import math
import random
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trainer.reports import svg
from trainer.reports.charts import data_range
from trainer.reports.frontier import pareto
from trainer.reports.jobs import Row, best, labels, points
from trainer.reports.report import main
from trainer.reports.sweep import (
    PLAN,
    LiveSweep,
    frontier_svg,
    read_rows,
    write_sweep,
)
from trainer.reports.sweep_page import Sweep, results
from trainer.reports.trackers.files import JsonlTracker
from trainer.runs.job_names import job_name, job_names
from trainer.runs.lock import held
from trainer.runs.run_files import find_jobs, load_run


def make_job(folder: Path, *, coeff: float, iterations: int = 15, state: str | None = "finished"):
    tracker = JsonlTracker(folder)
    tracker.log({"eval/sampled_accuracy": 0.1, "reward/mean": 99.0}, 0)
    for i in range(1, iterations + 1):
        kl = (i - 3) / (1 + coeff)
        tracker.log({"reward/mean": float(i), "kl/ref_sequence": kl, "kl/coeff": coeff}, i)
    tracker.log({"eval/sampled_accuracy": 0.75}, iterations + 1)
    if state:
        (folder / "status.json").write_text(json.dumps({"state": state, "objective": 0.5}))
    (folder / "report.html").touch()
    (folder / ".hydra").mkdir()
    overrides = f"- experiment=grpo_tiny\n- kl.coeff={coeff}\n- env.api_key=planted-3\n"
    (folder / ".hydra" / "overrides.yaml").write_text(overrides)
    (folder / ".hydra" / "config.yaml").write_text("kl: {coeff: 9}\n")


def make_sweep(folder: Path) -> Path:
    make_job(folder / "kl.coeff=10", coeff=10.0)
    make_job(folder / "kl.coeff=2", coeff=2.0, iterations=4, state=None)
    (folder / "kl.coeff=3,policy.model=a" / "b" / ".hydra").mkdir(parents=True)
    (folder / "multirun.yaml").write_text("hydra: {}\n")
    return folder


def test_the_csv_has_a_row_per_job_with_means_over_its_end(tmp_path):
    write_sweep(make_sweep(tmp_path))
    with open(tmp_path / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["job"] for row in rows] == [
        "kl.coeff=2",
        "kl.coeff=3,policy.model=a/b",
        "kl.coeff=10",
    ]
    short, unborn, whole = rows
    assert float(whole["reward/raw_mean"]) == 14  # iterations 13 to 15, a quarter
    assert float(whole["kl/ref_sequence"]) == pytest.approx(11 / 11)
    assert float(short["reward/raw_mean"]) == 4  # one iteration, not that after training
    assert (whole["iterations_averaged"], short["iterations_averaged"]) == ("3", "1")
    assert (whole["state"], short["state"], unborn["state"]) == (
        "finished",
        "not started",
        "not started",
    )
    assert (whole["objective"], short["objective"]) == ("0.5", "")
    assert float(whole["eval/sampled_accuracy"]) == 0.75
    assert (float(whole["kl/coeff"]), whole["kl.coeff"]) == (10.0, "10.0")
    assert (unborn["kl.coeff"], unborn["policy.model"], unborn["reward/raw_mean"]) == (
        "3",
        "a/b",
        "",
    )


def test_the_page_links_every_job_and_hides_secrets(tmp_path):
    text = write_sweep(make_sweep(tmp_path)).read_text(encoding="utf-8")
    links = re.findall(r'<a href="(.*?)">(.*?)</a>', text)
    assert [text for link, text in links if link == "kl.coeff%3D10/report.html"] == ["10.0"]
    assert len(links) == 2, "that of the third is not there yet"
    for drawing in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(drawing)
    assert "planted-3" not in text + (tmp_path / "sweep.csv").read_text()


def test_the_table_holds_what_differs_between_the_jobs(tmp_path):
    for coeff in (0.0, 0.5):
        make_job(tmp_path / f"experiment=grpo_tiny,kl.coeff={coeff}", coeff=coeff)
    text = write_sweep(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"<a [^>]*>(.*?)</a>", text) == ["0.0", "0.5"]
    # kl/coeff would repeat kl.coeff; the rest is equal
    heads = re.findall("<th>(.*?)</th>", text.replace("<wbr>", ""))
    assert heads == ["kl.coeff", "kl/ref_sequence"]
    same = "state finished, objective 0.5, eval/sampled_accuracy 0.75, reward/raw_mean 14"
    assert f"the same in all jobs: {same}, progress/iteration 16, iterations_averaged 3<" in text
    header = (tmp_path / "sweep.csv").read_text().splitlines()[0]
    assert "kl/coeff" in header, "the file has all columns"


@pytest.mark.parametrize(("count", "averaged"), [(1, 1), (7, 1), (8, 2), (39, 9), (80, 10)])
def test_what_a_run_came_to_is_its_end_not_its_start(tmp_path, count, averaged):
    tracker = JsonlTracker(tmp_path)
    for i in range(count + 1):  # the first line is of the untrained model
        tracker.log({"reward/mean": float(i)}, i)
    last = [float(i) for i in range(count + 1)][-averaged:]
    assert load_run(tmp_path).last_ten("reward/mean") == last
    assert load_run(tmp_path).last_ten_mean("reward/mean") == sum(last) / averaged


def test_a_column_is_left_out_only_where_another_says_as_much(tmp_path):
    make_job(tmp_path / "kl.coeff=1", coeff=1.0)
    make_job(tmp_path / "kl.coeff=2", coeff=2.0, state=None, iterations=3)
    for job, value in (("kl.coeff=1", 0.75), ("kl.coeff=2", None)):
        (tmp_path / job / "status.json").write_text(json.dumps({"objective": value}))
    text = write_sweep(tmp_path).read_text(encoding="utf-8").replace("<wbr>", "")
    # kl/coeff would repeat kl.coeff; the job without an objective has an accuracy
    wanted = ["kl.coeff", "objective", "reward/raw_mean", "kl/ref_sequence", "progress/iteration"]
    wanted += ["iterations_averaged"]
    assert re.findall("<th>(.*?)</th>", text) == wanted
    tracker = JsonlTracker(tmp_path / "kl.coeff=2", resume=True)
    tracker.log({"eval/sampled_accuracy": 0.25}, 5)
    text = write_sweep(tmp_path).read_text(encoding="utf-8").replace("<wbr>", "")
    assert re.findall("<th>(.*?)</th>", text)[1:3] == ["objective", "eval/sampled_accuracy"]


def test_folders_of_jobs_are_readable_safe_and_never_shared():
    assert job_name("kl.coeff=0.1,seed=1") == "kl.coeff=0.1,seed=1"
    texts = ["a/b", "a_b", "'a b'", '"a=b"', "../..", "$HOME;*", "\n", "[1,2]", "{a: 1}", "\u00e9"]
    short = [f"kl.coeff=0,policy.system_prompt={text},seed=1" for text in texts]
    long = [f"{word},z.text={'word ' * 99}{k}" for word in short for k in range(2)]
    many = [",".join(f"algorithm.key_{k:02d}=0.{k}{end}" for k in range(40)) for end in (1, 2)]
    names = [job_name(word) for word in (*short, *long, *many)]
    assert len(set(names)) == len(names)
    for name in names:
        assert len(name.encode()) <= 200
        assert re.fullmatch(r"[\w.,=+~@-]+", name, re.ASCII)
        assert not name.startswith((".", "-"))
    assert all(name.startswith("kl.coeff=0,policy.system_prompt=") for name in names[:-2])
    assert all(",seed=1,z.text=word_word" in name for name in names[len(short) : -2])
    assert names[-1].startswith("algorithm.key_00=0.02,algorithm.key_01=0.12,")


def test_folders_of_jobs_are_named_by_what_differs_between_them():
    words = ["experiment=grpo_tiny", "trainer.num_iterations=8", "hydra.sweep.dir=/a"]
    jobs = [[*words, f"seed={s}", f"kl.coeff={c}"] for s in (1, 2) for c in (0, 0.1)]
    names = [f"kl.coeff={c},seed={s}" for s in (1, 2) for c in (0, 0.1)]
    assert job_names(jobs) == names
    assert job_names([[*words, "kl.coeff=0"]]) == ["kl.coeff=0,trainer.num_iterations=8"]
    assert job_names([["experiment=grpo_tiny"]]) == ["experiment=grpo_tiny"]
    assert job_names([[]]) == ["job"]
    assert job_names([["seed=1"], ["seed=1"]]) == ["seed=1"] * 2  # the second finds it finished


def test_an_empty_or_failed_sweep_has_a_page(tmp_path):
    assert find_jobs(tmp_path) == []
    assert "0 jobs" in write_sweep(tmp_path).read_text()
    (tmp_path / "0" / ".hydra").mkdir(parents=True)
    assert "1 not started" in write_sweep(tmp_path).read_text()


def test_the_page_of_a_sweep_lives_from_its_start_to_its_end(tmp_path, capsys):
    page = tmp_path / "sweep.html"
    jobs = [["kl.coeff=0"], ["kl.coeff=1"], ["kl.coeff=2"]]
    live = LiveSweep(tmp_path, jobs, words=["kl.coeff=0,1,2", "env.api_key=planted-3,planted-4"])
    (tmp_path / "kl.coeff=0" / ".hydra").mkdir(parents=True)
    live.begin(0)
    assert capsys.readouterr().out.splitlines() == [f"sweep    {page}", "job 1 of 3: kl.coeff=0"]
    text = page.read_text()
    assert "data-reload" in text
    assert "3 jobs: 1 starting, 2 to come<" in text
    with pytest.raises(ValueError, match="still running"):
        LiveSweep(tmp_path, jobs)
    make_job(tmp_path / "kl.coeff=1", coeff=1.0)  # the first is still "starting"
    live._page.due = 0.0  # its thread writes again within a second
    limit = time.monotonic() + 20
    while "1 finished" not in page.read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    live.begin(1, "finished already")
    assert "3 jobs: 1 finished, 1 starting, 1 to come" in write_sweep(tmp_path).read_text()
    live.end()
    text = page.read_text()
    assert "data-reload" not in text
    assert "3 jobs: 1 finished, 1 not started, 1 not begun<" in text
    assert ">stopped<" in text
    told = capsys.readouterr().out.splitlines()
    again = f"python train.py -m kl.coeff=0,1,2 'env.api_key=<hidden>' hydra.sweep.dir={tmp_path}"
    assert told[:3] == [
        "job 2 of 3: kl.coeff=1: finished already",
        "setting       reward  KL   objective  state",
        "kl.coeff=0    -       -    -          not started",
    ]
    assert told[-2:] == [f"1 not begun; continue with: {again}", f"sweep    {page}"]
    plan = json.loads((tmp_path / PLAN).read_text())
    (tmp_path / PLAN).write_text(json.dumps({**plan, "ended": False}))  # as a kill leaves it
    text = write_sweep(tmp_path).read_text()
    assert ">stopped<" in text
    assert f'Continue it: <code class="command">{html.escape(again)}</code>' in text


def test_a_sweep_says_which_job_runs_and_how_long_the_rest_may_take(tmp_path):
    for coeff, seconds in ((0, 100.0), (1, 140.0), (2, 30.0)):
        job = tmp_path / f"kl.coeff={coeff}"
        make_job(job, coeff=float(coeff), iterations=8)
        (job / "config.yaml").write_text("trainer: {num_iterations: 40}\n")
        state = "running" if coeff == 2 else "finished"
        (job / "status.json").write_text(json.dumps({"state": state, "seconds": seconds}))
    (tmp_path / PLAN).write_text('{"jobs": ["kl.coeff=2", "kl.coeff=3", "kl.coeff=4"]}')
    with held(tmp_path), held(tmp_path / "kl.coeff=2"):
        text = write_sweep(tmp_path).read_text(encoding="utf-8")
    assert (
        "5 jobs: 2 finished, 1 running, 2 to come; about 5 min 30 s left<" in text
    )  # 2 x 120 + 90
    assert (
        '>Running: <a href="kl.coeff%3D2/report.html">kl.coeff=2.0</a>, iteration 9 of 40<' in text
    )


def test_checkpoints_and_pages_of_a_job_are_no_jobs(tmp_path):
    make_sweep(tmp_path)
    inner = tmp_path / "kl.coeff=10" / "checkpoints" / "iteration_000010"
    inner.mkdir(parents=True)
    (inner / "status.json").write_text("{}")
    write_sweep(tmp_path)
    assert len(find_jobs(tmp_path)) == 3


def test_the_frontier_is_what_no_other_job_beats():
    random.seed(0)
    rows = [
        Row(str(i), {"a": str(i)}, reward=random.randrange(12) / 4, kl=random.randrange(12) / 4)
        for i in range(60)
    ]
    front = pareto(points([*rows, Row("unborn", {"a": "none"})]))

    places = {
        (row.kl, -row.reward) for row in rows if row.kl is not None and row.reward is not None
    }

    def beaten(place: tuple[float, float]) -> bool:
        return any(o != place and o[0] <= place[0] and o[1] <= place[1] for o in places)

    expected = sorted(place for place in places if not beaten(place))
    assert [(point.kl, -point.reward) for point in front] == expected


def test_a_sweep_ends_with_a_table_of_its_settings_and_the_best(tmp_path):
    rows = [
        *(
            Row(f"0{s}", {"kl.coeff": "0", "seed": s}, objective=o, reward=0.5, kl=2.0, command="a")
            for s, o in (("1", 0.9), ("2", 0.1))
        ),
        *(Row(f"1{s}", {"kl.coeff": "1", "seed": s}, objective=0.6, kl=1.0) for s in "12"),
        Row("13", {"kl.coeff": "1", "seed": "3"}, state="failed", objective=0.0),
    ]
    told = results(Sweep(tmp_path, rows, [], live=False, command="the command"))
    assert told == [
        "setting     reward  KL  objective  state",
        "kl.coeff=0  0.5     2   0.5        2 finished",
        "kl.coeff=1  -       1   0.6        2 finished, 1 failed",
        "best     kl.coeff=1 (objective 0.6, KL 1; means of 2 seeds)",
        "continue with: the command",
    ]
    many = [Row(str(k), {"kl.coeff": str(k)}, objective=k / 30) for k in range(30)]
    told = results(Sweep(tmp_path, many, [], live=False, command="c"))
    assert len(told) == 1 + 20 + 1 + 1
    assert told[1].startswith("kl.coeff=29 ")
    assert "10 more in sweep.html" in told[21]
    assert results(Sweep(tmp_path, [], [])) == []


def test_unfinished_jobs_enter_neither_means_nor_the_line():
    rows = [
        Row("a1", {"c": "a", "seed": "1"}, reward=1.0, kl=1.0),
        Row("a2", {"c": "a", "seed": "2"}, reward=9.0, kl=0.1, state="running"),
        Row("b1", {"c": "b", "seed": "1"}, reward=9.0, kl=0.1, state="running"),
        Row("c1", {"c": "c", "seed": "1"}, reward=2.0, kl=4.0),
    ]
    a, b, c = points(rows)
    assert (a.seeds, a.finished, a.note) == (((1.0, 1.0),), True, " (1 finished, 1 running)")
    assert (b.seeds, b.finished, b.note) == (((0.1, 9.0),), False, " (running)")
    assert pareto([a, b, c]) == [a, c]
    root = ElementTree.fromstring(frontier_svg(rows))
    styles = [e.attrib["style"] for e in root.iter() if e.tag.endswith("circle")]
    assert ["fill:var(--paper)" in style for style in styles] == [False, True, False]
    assert ["dasharray" in style for style in styles] == [False, True, False]
    texts = ["".join(e.itertext()) for e in root.iter() if e.get("class") == "value"]
    assert texts == ["a", "b (running)", "c"]
    assert any("dashed: unfinished" in (e.text or "") for e in root.iter())


def seeds() -> list[Row]:
    """Two coefficients, of which one has three seeds."""
    values = [
        ("0", "1", 1.0, 4.0),
        ("0", "2", 0.5, 9.0),
        ("0", "3", 0.75, 5.0),
        ("1", "1", 0.25, 1),
    ]
    return [
        Row(f"{k}", {"kl.coeff": c, "seed": s}, reward=r, kl=kl, objective=r)
        for k, (c, s, r, kl) in enumerate(values)
    ]


def test_seeds_are_one_point_with_bars_from_the_lowest_to_the_highest():
    many, one = points(seeds())
    assert (many.name, many.kl, many.reward) == ("0", 6.0, 0.75)
    assert (one.name, one.kl, one.reward) == ("1", 1.0, 0.25)
    root = ElementTree.fromstring(frontier_svg(seeds()))
    (bars,) = [e for e in root.iter() if e.get("class") == "bars"]  # of the one with seeds
    across, along = (
        list(map(float, re.findall(r"[\d.]+", part)))
        for part in re.findall(r"M([\d. ]+[HV][\d.]+)", bars.attrib["d"])
    )
    dot = next(e for e in root.iter() if e.tag.endswith("circle"))
    # pixels from KL 0 grow with the root of the KL: 2, sqrt 6 and 3 here
    cx, start = float(dot.attrib["cx"]), across[0] - 2 * (across[2] - across[0])
    assert (cx - start) / (across[0] - start) == pytest.approx(math.sqrt(6) / 2, abs=0.01)
    assert (along[1] + along[2]) / 2 == pytest.approx(float(dot.attrib["cy"]), abs=0.1)


def test_the_best_job_is_named_with_the_command_that_repeats_it(tmp_path):
    for coeff, objective in ((0.0, 0.5), (0.5, 0.75)):
        job = tmp_path / f"kl.coeff={coeff}"
        make_job(job, coeff=coeff)
        status = {"state": "finished", "objective": objective}
        (job / "status.json").write_text(json.dumps(status))
    make_job(tmp_path / "kl.coeff=9", coeff=9.0, state="running")
    found = best(read_rows(tmp_path))
    assert found is not None
    assert found.name == "kl.coeff=0.5"
    command = "python train.py experiment=grpo_tiny kl.coeff=0.5 'env.api_key=<hidden>'"
    assert found.finished[0].command == command
    text = write_sweep(tmp_path).read_text(encoding="utf-8")
    assert "<b>kl.coeff=0.5</b> (objective 0.75" in text
    assert f'<code class="command">{html.escape(command)}</code> <button' in text
    assert "objective: held-out accuracy, sampled; reward and KL: mean of the last ten" in text
    tied = best([Row("a", objective=1.0, kl=2.0), Row("b", objective=1.0, kl=1.0)])
    assert tied is not None
    assert tied.name == "b"


def test_a_curve_far_above_the_others_is_shown_whole_and_a_spike_is_not():
    calm, spike = [1.0] * 19 + [1.6], [1.0] * 19 + [50.0]
    assert data_range(*[calm] * 11, [50.0] * 20)[1] == 50
    assert data_range(*[calm] * 11, spike)[1] == 1.6
    assert data_range(spike)[1] == 1.5


def test_the_best_setting_is_not_that_of_the_luckiest_seed():
    values = [("0", "1", 0.9), ("0", "2", 0.1), ("1", "1", 0.6), ("1", "2", 0.5)]
    rows = [Row(c + s, {"kl.coeff": c, "seed": s}, objective=o) for c, s, o in values]
    rows.append(Row("13", {"kl.coeff": "1", "seed": "3"}, objective=0.0, state="running"))
    found = best(rows)
    assert found is not None
    assert (found.name, found.mean("objective")) == ("kl.coeff=1", pytest.approx(0.55))


def test_the_reward_of_a_job_is_the_task_s_alone(tmp_path):
    tracker = JsonlTracker(tmp_path / "0")
    (tmp_path / "0" / ".hydra").mkdir()
    tracker.log({"reward/mean": -3.0, "reward/raw_mean": 1.0, "kl/ref_sequence": 4.0}, 1)
    (row,) = read_rows(tmp_path)
    assert row.reward == 1.0  # the KL is the other axis


def test_the_curve_of_the_reward_has_the_numbers_of_the_table(tmp_path):
    for job, names in {"a=1": ["reward/raw_mean", "reward/mean"], "a=2": ["reward/mean"]}.items():
        tracker = JsonlTracker(tmp_path / job)
        (tmp_path / job / ".hydra").mkdir()
        for i in range(1, 9):  # with a KL part it is 100 less; the second has no KL
            rewards = [float(i), i - 100.0] if len(names) == 2 else [i + 10.0]
            tracker.log({**dict(zip(names, rewards, strict=True)), "kl/ref_sequence": 1.0}, i)
    assert [row.reward for row in read_rows(tmp_path)] == [7.5, 17.5]
    text = write_sweep(tmp_path).read_text(encoding="utf-8")
    charts = [ElementTree.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", text)]
    (chart,) = [chart for chart in charts if chart.get("aria-label") == "Reward"]
    texts = ["".join(e.itertext()) for e in chart.iter() if e.tag.endswith("text")]
    assert texts[:2] == ["Reward", "mean per reply, task"]
    ticks = [float(text) for text in texts if re.fullmatch(r"-?[\d.]+", text)]
    assert (min(ticks), max(ticks)) == (0, 20)  # 1 to 18


def test_the_picture_places_points_by_the_root_of_their_kl():
    rows = [Row(f"{k}", {"kl.coeff": f"c{k}"}, reward=k / 8, kl=float(k * k)) for k in range(5)]
    picture = frontier_svg(rows)
    root = ElementTree.fromstring(picture)
    dots = [e for e in root.iter() if e.tag.endswith("circle")]
    xs = [float(dot.attrib["cx"]) for dot in dots]
    ys = [float(dot.attrib["cy"]) for dot in dots]
    assert [b - a for a, b in itertools.pairwise(xs)] == pytest.approx([xs[1] - xs[0]] * 4, abs=0.2)
    assert [a - b for a, b in itertools.pairwise(ys)] == pytest.approx([ys[0] - ys[1]] * 4, abs=0.2)
    assert all(f">c{k}<" in picture for k in range(5))


@pytest.mark.parametrize("most", [0.0, 0.004, 0.41, 1.0, 1.2, 50.0, 320.0])
def test_the_kl_axis_has_ticks_up_to_the_data(most):
    picture = frontier_svg([Row("a", {"k": "0"}, reward=0.0, kl=most), Row("b", reward=1, kl=0)])
    root = ElementTree.fromstring(picture)
    ticks = [e for e in root.iter() if e.get("class") == "grid" and e.attrib["d"].endswith("v6")]
    labels = [e for e in root.iter() if e.get("text-anchor") == "middle"][: len(ticks)]
    assert float(labels[-1].text) >= most
    assert float(labels[-1].text) <= max(1.5 * most, 1e-3)
    dots = [float(e.attrib["cx"]) for e in root.iter() if e.tag.endswith("circle")]
    assert max(dots) <= float(labels[-1].attrib["x"])
    assert next(root.iter("{http://www.w3.org/2000/svg}svg")) is root
    names = [e.get("aria-label") for e in root.iter() if e.get("aria-label")]
    assert names == ["Reward against KL to the reference"]


def test_labels_keep_off_the_bars_of_seeds():
    rows = [
        Row(f"{k}{s}", {"kl.coeff": f"{k}", "seed": f"{s}"}, reward=0.1 * k + 0.2 * s, kl=k + 2 * s)
        for k in range(3)
        for s in range(3)
    ]
    root = ElementTree.fromstring(frontier_svg(rows))
    names = [e for e in root.iter() if e.get("class") == "value"]
    bars = [e.attrib["d"] for e in root.iter() if e.get("class") == "bars"]
    assert len(names) == len(bars) == 3
    for d in bars:
        (across,) = re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)", d)
        (along,) = re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)", d)
        (x0, y0, x1), (cx, low, high) = map(float, across), map(float, along)
        for name in names:
            left, base = float(name.attrib["x"]), float(name.attrib["y"])
            right, top = left + svg.text_width(name.text, size=12), base - 9
            assert not (left < x1 and x0 < right and top < y0 < base)
            assert not (left < cx < right and top < low and high < base)


def test_labels_lie_inside_the_picture_and_on_no_other_label():
    rows = [
        Row(f"{k}", {"kl.coeff": f"{k}"}, reward=0.9 + 0.01 * (k % 3), kl=9.0 + 0.7 * (k % 5))
        for k in range(12)
    ]
    root = ElementTree.fromstring(frontier_svg(rows))
    texts = [e for e in root.iter() if e.get("class") == "value"]
    places = [(float(e.attrib["x"]), float(e.attrib["y"])) for e in texts]
    assert len(places) == 12
    assert all(0 < x < 480 and 0 < y < 340 for x, y in places)
    gaps = [math.dist(a, b) for i, a in enumerate(places) for b in places[:i]]
    assert min(gaps) > 6


def test_a_kl_just_below_zero_is_drawn_at_zero():
    rows = [Row("a", reward=0.5, kl=-1e-4), Row("b", reward=0.5, kl=0.0)]
    ElementTree.fromstring(frontier_svg(rows))


def test_jobs_are_named_by_what_differs():
    rows = [
        Row("0", {"experiment": "x", "kl.coeff": "0", "seed": "1"}),
        Row("1", {"experiment": "x", "kl.coeff": "0.1", "seed": "1"}),
    ]
    assert labels(rows) == {"0": "kl.coeff=0", "1": "kl.coeff=0.1"}
    assert labels(rows[:1]) == {"0": "0"}


def test_without_points_the_picture_says_what_is_missing():
    with pytest.raises(ValueError, match="a job with reward/raw_mean"):
        frontier_svg([Row("a")])


def test_the_command_reports_unrelated_runs_one_by_one(tmp_path, capsys):
    make_job(tmp_path / "outputs" / "a" / "1", coeff=1.0)
    make_job(tmp_path / "outputs" / "b" / "2", coeff=1.0)
    sweep = make_sweep(tmp_path / "outputs" / "multi")
    assert main([str(tmp_path / "outputs")]) == 0
    pages = [*sorted((tmp_path / "outputs").glob("?/?/report.html")), sweep / "sweep.html"]
    assert capsys.readouterr().out.split() == [str(page) for page in pages]
    assert len(pages) == 3
    assert not (tmp_path / "outputs" / "sweep.html").exists()
    assert main([str(tmp_path / "outputs"), "--svg", str(tmp_path / "x.svg")]) == 2
    assert "draws one run or sweep" in capsys.readouterr().err


def test_the_command_takes_a_sweep_folder(tmp_path, capsys):
    folder = make_sweep(tmp_path / "sweep")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "sweep.html")
    picture = tmp_path / "f.svg"
    assert main([str(folder), "--svg", str(picture)]) == 0
    assert picture.read_text() == frontier_svg(read_rows(folder))


@pytest.mark.parametrize("plan", ['{"words": 5, "jobs": 3}', '{"jobs": [1, 2]}', "[", ""])
def test_a_damaged_plan_leaves_the_jobs_on_the_page(tmp_path, plan):
    make_sweep(tmp_path)
    jobs = read_rows(tmp_path)
    (tmp_path / "sweep.json").write_text(plan)
    shown = write_sweep(tmp_path).read_text()
    assert f"{len(jobs)} jobs" in shown
    assert "not begun" not in shown
