"""report.html: right values, escaped texts, a chart per metric, whatever state the folder is in."""

import itertools
import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page, Picture, recorded, write_lines, write_run, write_status, write_words

from trainer.reports import chart, live, summary
from trainer.reports.__main__ import main
from trainer.reports.chart import Series, line_chart
from trainer.reports.diagnosis import WORDS, Diagnosis
from trainer.reports.live import SECONDS, SHARE, LiveReport
from trainer.reports.panels import MAIN, MORE, unhealthy
from trainer.reports.report import run_svg, write_report
from trainer.runs.lock import locked
from trainer.runs.run_files import load_run, read_lines


def drawn(*series: Series) -> Picture:
    return Picture(line_chart(series, title="t", unit="u"))


def test_the_page_has_the_facts_of_the_run_no_secret_and_needs_no_network(tmp_path):
    page = Page(path := write_report(write_run(tmp_path / "a run")))
    assert {"demo", "failed", "<i>why</i>", "c0ffee", "1 min 15 s"} <= {*page.texts}
    assert f"python train.py resume='{path.parent.resolve()}'" in page.texts
    assert "0.0625 \u2192 0.688" in page.texts  # 1/16; 11/16 of the last three: a quarter
    assert "planted-2" not in page.source
    assert not {"link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert page.attributes("src") == []
    assert {place[1:] for place in page.attributes("href")} <= set(page.attributes("id"))
    known = ["Reward", "KL to the reference", "Accuracy on held-out prompts"]
    assert [*page.charts()] == [*known, "Reward parts", "my/own"]
    chat = Page(write_report(write_run(tmp_path / "2", state="finished"))).text
    assert "python train.py mode=chat resume=" in chat


def test_no_text_of_the_files_is_markup(tmp_path):
    hostile = '"><script>alert(1)</script><p class="'
    notes = [{"title": hostile, "text": hostile, "iteration": hostile, "rule": "x"}]
    notes[0] |= {"level": "warn", "until": None}
    write_run(tmp_path, state=hostile)
    write_status(tmp_path, state=hostile, reason=hostile, notes=notes, model={"name": hostile})
    page = Page(write_report(tmp_path))
    assert [tag for tag, _ in page.tags].count("script") == 2  # the page's own, and its data
    assert page.texts.count(hostile) >= 4
    assert {"x </pre><script>1</script>", "<b>Q</b>", "?\x00 late"} <= {*page.texts}


def test_the_summary_has_the_task_reward_and_means_of_the_last_iterations(tmp_path):
    rows = [
        {"reward/raw_mean": i / 4, "reward/mean": -9.0, "kl/ref_sequence": -i * 1e-8}
        for i in range(1, 9)
    ]
    rows[-1] |= {"eval/kl_ref_sequence": 2.5, "kl/efficiency": 0.8123}
    write_status(write_lines(tmp_path, *rows), held_out=3)
    assert summary.summary_line(load_run(tmp_path)) == (
        "task reward 0.25 -> 1.88 (last 2), KL to the reference 0 nats per reply (last 2), "
        "KL of the held-out replies 2.5 nats, KL efficiency 0.812, iterations 8"
    )


def test_a_supervised_run_has_its_loss_once_and_its_times(tmp_path):
    row = {"optim/lr": 1, "time/iteration_s": 4.0, "time/update_s": 3.0, "time/sync_s": 0.01}
    rows = [{"loss/total": 3.0 / i, "loss/policy": (3.0 + 1e-7) / i, **row} for i in (1, 2)]
    charts = Page(write_report(write_lines(tmp_path / "sft", *rows))).charts()
    assert [*charts] == ["Loss", "Time per iteration", "Learning rate"]
    assert charts["Loss"].told == {"total": [[1, 3.0], [2, 1.5]]}, "once"
    times = charts["Time per iteration"].told
    assert [times[name][0][1] for name in ("update", "rest", "all")] == [3, 1, 4]
    assert len(times) == 3


RUNS = [
    ("healthy_run.json", 0, []),
    ("hacked_run.json", 1, ["Reward hacking (iteration 30)"] * 2 + ["k1 1.53, above 1"]),
]


@pytest.mark.parametrize(("name", "tiles", "warnings"), RUNS)
def test_tiles_and_captions_warn_of_what_the_run_did(tmp_path, name, tiles, warnings):
    rows = recorded(name)
    notes = [vars(found) for found in Diagnosis(rows).findings]
    known = [{k: v for k, v in row.items() if v is not None} for row in rows]
    write_lines(tmp_path, *known, begin=rows[0]["progress/iteration"])
    write_status(tmp_path, state="finished", notes=notes)
    page = Page(write_report(tmp_path))
    assert re.findall(r"<figcaption class=.*?><b>(.*?)</b>", page.source) == warnings
    assert page.attributes("class").count("tile bad") == tiles
    write_status(tmp_path, notes=[{**note, "until": 40} for note in notes])  # it was taken back
    assert "tile bad" not in Page(write_report(tmp_path)).attributes("class")


def test_a_panel_warns_beyond_the_limits_that_its_caption_names(tmp_path):
    panels = [*MAIN, *MORE]
    named = {rule for panel in panels for rule in panel.rules}
    assert named == {rule for rule, words in WORDS.items() if words["level"] != "info"}
    for panel in panels:
        for metric, (low, high) in panel.limits.items():
            bound, way = (low, -1) if high == math.inf else (high, 1)
            assert f"{bound:g}" in re.findall(r"[\d.]+\d|\d", panel.healthy)
            for side in (-1, 1):
                folder = tmp_path / panel.title / metric / str(side)
                run = load_run(write_lines(folder, *[{metric: bound + side * way * 0.001}] * 4))
                assert (unhealthy(panel, run) is not None) == (side > 0), metric


def test_a_changed_key_is_shown_beside_its_defaults(tmp_path):
    write_lines(tmp_path, {"reward/mean": 1.0})
    write_words(tmp_path, "experiment=x", "+kl.coeff=0.5", "output_dir=/tmp/a b")
    leash = "{kl: {coeff: 0.1}, seed: 0, env: {token: planted-4}, "
    leash += "a: {n_tokens: '${seed}', b: '${kl}'}}"  # these two follow others
    experiment = leash.replace("seed: 0", "seed: 7")
    config = experiment.replace("0.1", "0.5").replace("planted-4", "planted-5")
    config = config.replace("'${seed}'", "7").replace("'${kl}'", "{coeff: 0.5}")
    defaults = f"experiment: {experiment}\nleash: {leash}\n"
    (tmp_path / ".hydra" / "defaults.yaml").write_text(defaults)
    (tmp_path / "config.yaml").write_text(config)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", text)
    assert rows == [("kl.coeff", "0.1", "0.1", "<b>0.5</b>"), ("seed", "0", "7", "7")]
    assert "python train.py experiment=x +kl.coeff=0.5<" in text
    assert "planted" not in text


def test_a_page_reloads_itself_while_its_run_goes_on_and_says_what_it_does(tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {num_iterations: 30}")
    write_lines(tmp_path, *[{"reward/mean": 0.5, "time/iteration_s": 8.0}] * 12)
    phase = {"phase": "evaluate", "phase_since": time.time() - 75, "phase_share": 0.4}
    write_status(tmp_path, state="running", **phase)
    with locked(tmp_path):
        page = Page(write_report(tmp_path))
        assert page.goes_on
        assert {"evaluating on held-out prompts: 40% done, for ", "1 min 15 s"} <= {*page.texts}
        assert "; 18 iterations to go, about 2 min 24 s" in page.texts, "18 times 8 seconds"
    page = Page(write_report(tmp_path))
    assert (page.goes_on, "killed" in page.texts) == (False, True)
    write_status(tmp_path, state="failed", reason="why", **phase)
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank1.txt").write_text("why")
    page = Page(write_report(tmp_path))
    assert not page.goes_on
    assert page.in_order("failed", "why", "errors/rank1.txt", "mean per reply")


def test_the_command_writes_pages_and_pictures_of_runs_alone(tmp_path, capsys):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [schema, {policy: smollm}]\n")
    run, picture = write_run(tmp_path / "outputs" / "run"), tmp_path / "run.svg"
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert [*tmp_path.rglob("report.html")] == [run / "report.html"]
    assert main([str(run), "--svg", str(picture)]) == 0
    assert Picture(picture.read_text()).tips == Picture(run_svg(run)).tips
    assert main([str(tmp_path / "nothing")]) == 2


@given(st.integers(-(10**6), 10**6), st.integers(0, 10**6), st.integers(-9, 6))
def test_ticks_are_round_few_and_enclose_the_data(low, size, power):
    lo, hi = low * 10.0**power, (low + size) * 10.0**power
    ticks = chart.ticks(lo, hi)
    assert 2 <= len(ticks) <= 8
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    rounding = 1e-6 * steps[0]
    assert ticks[0] - rounding <= lo <= hi <= ticks[-1] + rounding
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert float(f"{steps[0]:.3e}".split("e")[0]) in (1.0, 2.0, 5.0)


def test_a_curve_goes_through_its_values_and_a_spike_is_cut_and_told():
    picture = drawn(Series("s", [(0, 0.0), (5, 5.0), (10, 10.0)]))
    (line,) = picture.paths("line")
    assert [picture.value(y) for _, y in line] == pytest.approx([0, 5, 10], abs=0.02)
    assert line[1][0] == pytest.approx((line[0][0] + line[2][0]) / 2, abs=0.11)
    values = [1.0 + 0.1 * (i % 3) for i in range(30)]
    values[18] = 400.0
    spiked = drawn(Series("k3", list(enumerate(values))))
    assert spiked.ticks[-1] < 5
    assert "k3, 18: 400" in spiked.tips


def test_a_long_run_is_drawn_small_smooth_and_with_its_last_value():
    values = [(i, math.sin(i / 50)) for i in range(20_000)]
    picture = drawn(Series("s", [*values, (20_000, 3.0)]))
    assert picture.texts(**{"class": "value"}) == ["3"]
    (raw,), (line,) = picture.paths("raw"), picture.paths("line")
    assert len(raw) < 2_000
    half = len(raw) // 20
    near = [y for _, y in raw[100 - half : 101 + half]]
    assert line[100][1] == pytest.approx(sum(near) / len(near), abs=0.11)  # 0.1 pixel


def test_a_large_file_is_read_at_both_ends(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"i": i}) + "\n" for i in range(1000)))
    got = [line["i"] for line in read_lines(path, most=200)]
    # 100 bytes: ten lines of 9 bytes and one of 10; as many as fit of the last, 11 bytes each
    assert got == [*range(11), *range(991, 1000)]


# The page of a run that goes on.


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_report_follows_its_run(tmp_path, clock):
    folder = write_status(tmp_path / "run", state="running")
    report, page = LiveReport(folder), folder / "report.html"
    with locked(folder):
        report.begin()
        assert Page(page).goes_on
        page.unlink()
        report.evaluating("4 prompts", 0.5, last=False)
        assert not page.exists(), "not yet due"
        report.log({}, 1)
        assert page.exists(), "the first curves at once"
        page.unlink()
        report.log({}, 2)
        assert not page.exists()
        clock[0] += SECONDS
        report.evaluating("4 prompts", 0.5, last=False)
        assert page.exists()
    write_status(folder, state="finished")
    report.end("finished", saved=None)
    assert "finished" in Page(page).texts
    assert not Page(page).goes_on


def test_pages_take_a_bounded_share_of_the_time(tmp_path, monkeypatch, clock):
    begun = []

    def write_slowly(folder: Path) -> None:
        begun.append(clock[0])
        clock[0] += 2.0

    monkeypatch.setattr(live, "write_report", write_slowly)
    report = LiveReport(tmp_path)
    report.begin()
    for _ in range(500):
        clock[0] += 1.0
        report.evaluating("4 prompts", 0.5, last=False)
    assert begun == [100 + i * (2.0 + 2.0 / SHARE) for i in range(len(begun))]
    assert len(begun) >= 5


def test_a_page_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path, caplog):
    (write_status(tmp_path, state="running") / "report.html").mkdir()
    report = LiveReport(tmp_path)
    report.begin()
    report.end("finished", saved=None)
    assert len(caplog.records) == 1
