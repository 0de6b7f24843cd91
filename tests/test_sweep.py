"""sweep.csv and sweep.html: one row per job, finished or not, and the right frontier."""

import csv
import itertools
import json
import math
import random
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trainer.lock import held
from trainer.report import main
from trainer.run_files import find_jobs
from trainer.show.frontier import pareto
from trainer.show.jobs import Row, best, labels, points
from trainer.sweep import PLAN, LiveSweep, frontier_svg, job_name, read_rows, write_sweep
from trainer.tracker import JsonlTracker


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


def test_the_csv_has_a_row_per_job_with_means_over_the_last_ten(tmp_path):
    write_sweep(make_sweep(tmp_path))
    with open(tmp_path / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["job"] for row in rows] == [
        "kl.coeff=2",
        "kl.coeff=3,policy.model=a/b",
        "kl.coeff=10",
    ]
    short, unborn, whole = rows
    assert float(whole["reward/raw_mean"]) == 10.5  # iterations 6 to 15
    assert float(whole["kl/ref_sequence"]) == pytest.approx(7.5 / 11)
    assert float(short["reward/raw_mean"]) == 2.5  # iterations 1 to 4, not line 0
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
    same = "state finished, objective 0.5, eval/sampled_accuracy 0.75, reward/raw_mean 10.5"
    assert f"the same in all jobs: {same}, progress/iteration 16<" in text
    header = (tmp_path / "sweep.csv").read_text().splitlines()[0]
    assert "kl/coeff" in header, "the file has all columns"


def test_a_job_that_goes_on_leaves_no_column_twice(tmp_path):
    make_job(tmp_path / "kl.coeff=1", coeff=1.0)
    make_job(tmp_path / "kl.coeff=2", coeff=2.0, state=None, iterations=3)
    for job, value in (("kl.coeff=1", 0.75), ("kl.coeff=2", None)):
        (tmp_path / job / "status.json").write_text(json.dumps({"objective": value}))
    text = write_sweep(tmp_path).read_text(encoding="utf-8").replace("<wbr>", "")
    # the objective is eval/sampled_accuracy where there is one
    wanted = ["kl.coeff", "objective", "reward/raw_mean", "kl/ref_sequence", "progress/iteration"]
    assert re.findall("<th>(.*?)</th>", text) == wanted


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


def test_an_empty_or_failed_sweep_has_a_page(tmp_path):
    assert find_jobs(tmp_path) == []
    assert "0 jobs" in write_sweep(tmp_path).read_text()
    (tmp_path / "0" / ".hydra").mkdir(parents=True)
    assert "1 not started" in write_sweep(tmp_path).read_text()


def test_the_page_of_a_sweep_lives_from_its_start_to_its_end(tmp_path, capsys):
    page = tmp_path / "sweep.html"
    live = LiveSweep(tmp_path, [["kl.coeff=0"], ["kl.coeff=1"], ["kl.coeff=2"]])
    (tmp_path / "kl.coeff=0" / ".hydra").mkdir(parents=True)
    live.begin(0)
    assert capsys.readouterr().out.splitlines() == [f"sweep    {page}", "job 1 of 3: kl.coeff=0"]
    text = page.read_text()
    assert "data-reload" in text
    assert "3 jobs: 1 starting, 2 to come<" in text
    with pytest.raises(ValueError, match="still running"):
        LiveSweep(tmp_path, [])
    make_job(tmp_path / "kl.coeff=1", coeff=1.0)  # the first is still "starting"
    live._page.due = 0.0  # its thread writes again within a second
    limit = time.monotonic() + 20
    while "1 finished" not in page.read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    live.begin(1)
    assert "3 jobs: 1 finished, 1 starting, 1 to come" in write_sweep(tmp_path).read_text()
    live.end()
    text = page.read_text()
    assert "data-reload" not in text
    assert "3 jobs: 1 finished, 1 not started, 1 not begun<" in text
    assert ">stopped<" in text
    assert capsys.readouterr().out.splitlines()[-1] == f"sweep    {page}"
    (tmp_path / PLAN).write_text('{"left": 1}')  # as a kill leaves it
    assert ">stopped<" in write_sweep(tmp_path).read_text()


def test_a_sweep_says_which_job_runs_and_how_long_the_rest_may_take(tmp_path):
    for coeff, seconds in ((0, 100.0), (1, 140.0), (2, 30.0)):
        job = tmp_path / f"kl.coeff={coeff}"
        make_job(job, coeff=float(coeff), iterations=8)
        (job / "config.yaml").write_text("trainer: {num_iterations: 40}\n")
        state = "running" if coeff == 2 else "finished"
        (job / "status.json").write_text(json.dumps({"state": state, "seconds": seconds}))
    (tmp_path / PLAN).write_text('{"left": 2}')
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
    assert found.job == "kl.coeff=0.5"
    assert found.command == (
        "python train.py experiment=grpo_tiny kl.coeff=0.5 'env.api_key=<hidden>'"
    )
    text = write_sweep(tmp_path).read_text(encoding="utf-8")
    assert "<b>kl.coeff=0.5</b> (objective 0.75" in text
    assert best([Row("a", objective=1.0, kl=2.0), Row("b", objective=1.0, kl=1.0)]).job == "b"


def test_the_reward_of_a_job_is_the_task_s_alone(tmp_path):
    tracker = JsonlTracker(tmp_path / "0")
    (tmp_path / "0" / ".hydra").mkdir()
    tracker.log({"reward/mean": -3.0, "reward/raw_mean": 1.0, "kl/ref_sequence": 4.0}, 1)
    (row,) = read_rows(tmp_path)
    assert row.reward == 1.0  # the KL is the other axis


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
    with pytest.raises(ValueError, match="at least one job with reward/mean"):
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
