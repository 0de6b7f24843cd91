"""report.html: right values, escaped texts, and a page whatever state the folder is in."""

import itertools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from policies.cache import write_text
from trainer.reports import about, charts, svg
from trainer.reports.panels import MAIN, MORE
from trainer.reports.report import LiveReport, main, run_svg, write_report
from trainer.reports.sweep import write_sweep
from trainer.reports.trackers.files import JsonlTracker
from trainer.runs.lock import held
from trainer.runs.run_files import load_run, read_lines

FIRST = "reward, first \u2192 last 3"  # of the tiles
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collect tags and texts, and hold every end tag to its start tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def make_run(folder: Path, *, iterations: int = 12, state: str = "failed") -> Path:
    tracker = JsonlTracker(folder)
    tracker.log({"eval/sampled_accuracy": 0.25}, 0)
    before = {"kind": "before", "prompt": "<b>Q</b>", "response": "x </pre><script>1</script>"}
    tracker.replies([before], 0, kind="train")
    for i in range(1, iterations + 1):
        metrics = {"reward/mean": i / 16, "kl/ref_sequence": i / 4, "my/own": 1.0}
        tracker.log({**metrics, "reward_part/format": 0.5, "optim/grad_norm": math.nan}, i)
        rows = [{"prompt": "p", "response": f"reply {k}", "reward": k / 8} for k in range(8)]
        tracker.replies([{"kind": "train", **row} for row in rows], i, kind="train")
    tracker.replies(
        [{**before, "kind": "after", "response": "\ud800\x00 late"}], iterations, kind="train"
    )
    model = {"name": "m", "origin": "folder", "sha256": "c0ffee"}
    status = {"state": state, "reason": "<i>why</i>", "model": model, "seconds": 75.0}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.yaml").write_text("experiment: demo\nenv:\n  api_key: planted-2\n")
    return folder


def test_the_page_tells_the_run(tmp_path):
    path = write_report(make_run(tmp_path / "a run"))
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    shown = "\n".join(page.texts)
    assert "demo" in page.texts
    assert "failed" in page.texts
    assert "<i>why</i>" in page.texts
    assert "c0ffee" in shown
    assert f"python train.py resume='{path.parent.resolve()}'" in shown
    assert "0.0625 \u2192 0.688" in shown  # 1/16; 11/16 of the last three: a quarter of the run
    assert "1 min 15 s" in shown
    assert "0.25" in page.texts, "an accuracy measured once does not go from there to there"
    assert "planted-2" not in text


def test_the_numbers_at_the_top_have_the_reward_without_a_kl_part(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for i in range(1, 5):
        tracker.log({"reward/raw_mean": i / 4, "reward/mean": i / 4 - 9, "loss/total": 0.5}, i)
    run = load_run(tmp_path)
    assert about.tiles(run) == {"task reward": "0.25 \u2192 1", "iterations": "4"}
    assert about.summary(run) == "task reward 0.25 -> 1"


def test_no_text_of_the_files_is_markup(tmp_path):
    hostile = '"><script>alert(1)</script><p class="'
    text = write_report(make_run(tmp_path, state=hostile)).read_text(encoding="utf-8")
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 1  # the page's own
    assert hostile in page.texts


def test_curves_are_drawn_for_what_was_logged(tmp_path):
    text = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    drawn = re.findall(r'<svg class="chart".*?aria-label="(.*?)"', text)
    assert drawn == [
        "Reward",
        "KL to the reference",
        "Accuracy on held-out prompts",
        "Reward parts",
        "my/own",
    ]
    for drawing in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(drawing)


def test_the_page_needs_no_other_file_and_no_network(tmp_path):
    page = Page(write_report(make_run(tmp_path)).read_text(encoding="utf-8"))
    assert not {"link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any("src" in attrs or "href" in attrs for _, attrs in page.tags)


def test_replies_are_text_best_first_and_worst_last(tmp_path):
    text = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    shown = Page(text).texts
    assert "x </pre><script>1</script>" in shown
    assert "<b>Q</b>" in shown
    assert "?\ufffd late" in shown
    replies = [t for t in shown if t.startswith("reply ")]
    assert replies == ["reply 7", "reply 6", "reply 5", "reply 2", "reply 1", "reply 0"]


@pytest.mark.parametrize("files", [{}, {"metrics.jsonl": '{"reward/mean": 0.'}])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert "not started" in Page(write_report(tmp_path).read_text()).texts


def test_torn_files_cost_only_what_is_torn(tmp_path):
    make_run(tmp_path)
    for name in ("metrics.jsonl", "transcripts.jsonl", "status.json", "config.yaml"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-9])
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\xfe[1, 2]\n[1]\n7\n")
    assert len(load_run(tmp_path).metrics) == 12  # 0 to 11
    Page(write_report(tmp_path).read_text(encoding="utf-8"))


def test_a_page_is_written_wherever_the_files_were_cut(tmp_path):
    whole = make_run(tmp_path / "whole", iterations=2)
    (whole / ".hydra").mkdir()
    (whole / ".hydra" / "overrides.yaml").write_text("- kl.coeff=0.1\n- '+a=b'\n")
    (whole / ".hydra" / "hydra.yaml").write_text(
        "hydra:\n  runtime:\n    choices:\n      experiment: x\n"
    )
    for path in [p for p in whole.rglob("*") if p.is_file()]:
        data = path.read_bytes()
        for size in range(0, len(data), 29):
            path.write_bytes(data[:size])
            write_report(whole)
            write_sweep(tmp_path)
        path.write_bytes(data)


def test_a_repeated_iteration_counts_once_and_the_last_one_holds(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for value, iteration in ((1.0, 1), (2.0, 2), (3.0, 2)):
        tracker.log({"a": value}, iteration)
    assert load_run(tmp_path).series("a") == [(1, 1.0), (2, 3.0)]


def test_pass_at_k_is_drawn_beside_the_accuracy(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for i, value in enumerate((0.5, 0.75)):
        tracker.log({"eval/sampled_accuracy": value / 2, "eval/pass@8": value}, i)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r'aria-label="(.*?)"', text) == ["Accuracy on held-out prompts"]
    assert "iteration 1: sampled 0.375, pass@8 0.75<" in text


def test_an_sft_run_has_loss_curves_and_no_reward(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for i in range(1, 4):
        loss = {"loss/total": 3.0 / i, "loss/policy": (3.0 + 1e-7) / i}
        tracker.log({**loss, "optim/lr": 1e-3}, i)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert ">policy" not in text  # the same curve again
    assert re.findall(r'aria-label="(.*?)"', text) == ["Loss", "Learning rate"]
    assert "3 \u2192 1<" in text


def test_the_curve_goes_through_the_values():
    chart = charts.line_chart(
        [charts.Series("s", [(0, 0.0), (5, 5.0), (10, 10.0)])], title="t", unit="u"
    )
    root = ElementTree.fromstring(chart)
    line = next(e for e in root.iter() if e.get("class") == "line")
    points = [tuple(map(float, p.split())) for p in line.attrib["d"][1:].split("L")]
    ticks = {
        e.text: float(e.attrib["y"]) - 4
        for e in root.iter()
        if e.get("text-anchor") == "end" and e.text
    }
    assert points[0][1] == pytest.approx(ticks["0"])
    assert points[2][1] == pytest.approx(ticks["10"])
    middle = ((points[0][0] + points[2][0]) / 2, (points[0][1] + points[2][1]) / 2)
    assert points[1] == pytest.approx(middle, abs=0.11)


@pytest.mark.parametrize(
    ("lo", "hi"),
    [
        (0, 1),
        (0.31, 0.32),
        (-3e-7, 5e-6),
        (5, 5),
        (0, 0),
        (-40, 1e6),
        (1e-9, 2e9),
        (0.05, 0.05 + 7e-18),
    ],
)
def test_ticks_are_round_few_and_enclose_the_data(lo, hi):
    ticks = svg.ticks(lo, hi)
    assert ticks[0] <= lo <= hi <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    digits = f"{steps[0]:.6e}".split("e")[0]
    assert float(digits) in (1.0, 2.0, 5.0)


def test_one_spike_does_not_flatten_the_curve():
    values = [1.0 + 0.1 * (i % 3) for i in range(30)]
    values[18] = 400.0
    chart = charts.line_chart(
        [charts.Series("k3", list(enumerate(values)))], title="t", unit="nats"
    )
    ElementTree.fromstring(chart)
    assert "k3, 18: 400" in chart
    labels = [float(t) for t in re.findall(r'text-anchor="end">([\d.]+)<', chart)]
    assert max(labels) < 5


def test_what_is_nothing_beside_the_axis_is_0():
    series = [
        charts.Series("total", [(1, 0.25), (2, 0.5)]),
        charts.Series("policy", [(1, 2e-9), (2, -1.12e-8)], hue=1),
        charts.Series("small", [(1, 0.0), (2, 1e-5)], hue=2),
    ]
    chart = charts.line_chart(series, title="t", unit="u")
    assert "iteration 2: total 0.5, policy 0, small 1e-5<" in chart
    assert ">policy 0<" in chart


def test_the_legend_has_the_last_value_of_a_long_run():
    points = [(i, 0.0) for i in range(1, 1000)] + [(1000, 3.0)]  # drawn by threes
    drawn = charts.line_chart([charts.Series("s", points)], title="t", unit="u")
    assert re.findall(r'class="value">(.*?)<', drawn) == ["3"]


def test_a_smoothed_curve_is_the_mean_around_each_value_without_plateaus():
    values = [float(12 + i % 2 + i // 20) for i in range(60)]  # whole numbers, as lengths are
    points = list(enumerate(values))
    drawn = charts.line_chart([charts.Series("max", points)], title="t", unit="u")
    raw, line = (
        [
            float(p.split()[1])
            for p in re.search(rf'class="{c}"[^>]* d="M(.*?)"', drawn)[1].split("L")
        ]
        for c in ("raw", "line")
    )
    for i in (0, 2, 30, 57, 59):
        near = raw[max(0, i - 3) : i + 4]
        assert line[i] == pytest.approx(sum(near) / len(near), abs=0.11), i  # 0.1 pixel
    assert len(set(line)) > 8, "medians of whole numbers are whole: 4"


def test_control_characters_leave_a_picture_valid():
    chart = charts.line_chart(
        [charts.Series("a\x1b\x00", [(1, 1.0)])], title="\x07", unit="u\ufffe"
    )
    assert "\ufffd" in (
        ElementTree.fromstring(svg.standalone([chart], width=9, height=9))[2][0].get("aria-label")
        or ""
    )


def test_a_constant_stays_one_in_a_long_run():
    points = [(i, 0.05) for i in range(1000)]  # averaged by threes: 0.05 and 0.05000000000000001
    chart = charts.line_chart([charts.Series("coeff", points)], title="t", unit="u")
    ElementTree.fromstring(chart)
    assert "iteration 999: coeff 0.05<" in chart


def test_long_runs_stay_small(tmp_path):
    points = [(i, math.sin(i / 50)) for i in range(20_000)]
    assert len(charts.line_chart([charts.Series("s", points)], title="t", unit="u")) < 30_000


def test_the_command_rebuilds_the_page_and_draws_the_picture(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    picture = tmp_path / "run.svg"
    assert main([str(run), "--svg", str(picture)]) == 0
    ElementTree.fromstring(picture.read_text())
    assert picture.read_text() == run_svg(run)
    assert main([str(tmp_path / "nothing")]) == 2
    assert "expected a run or sweep folder" in capsys.readouterr().err


def test_folders_that_are_no_runs_get_no_page(tmp_path, capsys):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [schema, {policy: smollm}]\n")
    failed = tmp_path / "outputs" / "failed"
    failed.mkdir(parents=True)
    (failed / "config.yaml").write_text("policy: {model: tiny}\nalgorithm: {epochs: 1}\n")
    run = make_run(tmp_path / "outputs" / "run")
    assert main([str(tmp_path)]) == 0
    pages = sorted(tmp_path.rglob("report.html"))
    assert pages == [failed / "report.html", run / "report.html"]
    capsys.readouterr()


PIECES = {
    "text": ["Hel", "lo", "<tool>\n", "<b>"],
    "log_prob": [-0.5, -0.25, None, -1.0],
    "kl": [0.5, -0.25, None, 0.0],
    "advantage": [2.0, 2.0, None, -1.0],
    "left_out": 7,
}


def test_tokens_are_coloured_by_their_kl_and_underlined_by_their_advantage(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log({"reward/mean": 1.0}, 1)
    row = {"kind": "train", "prompt": "p", "response": "r", "reward": 1.0, "rank": "best"}
    rows = [{**row, "pieces": PIECES}, {**row, "response": "plain"}, {**row, "rank": ""}]
    tracker.replies(rows, 1, kind="train")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    tokens = re.findall(r'<u class="([mlud ]+)" style="([^"]*)" title="([^"]*)">(.*?)</u>', text)
    assert [(c, tip, t) for c, _, tip, t in tokens] == [
        ("m u", "log-prob -0.5, KL 0.5, advantage 2", "Hel"),
        ("l u", "log-prob -0.25, KL -0.25, advantage 2", "lo"),
        ("d", "log-prob -1, KL 0, advantage -1", "&lt;b&gt;"),
    ]
    # full colour is at most the second largest of three: KL 0.25, advantage 2
    assert [style for _, style, _, _ in tokens] == [
        "--k:0.50;--a:1.00",
        "--k:0.50;--a:1.00",
        "--a:0.50",
    ]
    assert "<i>&lt;tool&gt;\u21b5\n</i>" in text, "what was not sampled has no colour"
    assert "7 more tokens" in text
    assert "best \u00b7 reward 1" in text


def test_a_changed_key_is_shown_beside_its_defaults(tmp_path):
    JsonlTracker(tmp_path).log({"reward/mean": 1.0}, 1)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(
        "- experiment=x\n- +kl.coeff=0.5\n- output_dir=/tmp/a b\n"
    )
    leash = "{kl: {coeff: 0.1}, seed: 0, env: {token: planted-4}, "
    leash += "a: {n_tokens: '${seed}', b: '${kl}'}}"  # these two follow others
    experiment = leash.replace("seed: 0", "seed: 7")
    config = experiment.replace("0.1", "0.5").replace("planted-4", "planted-5")
    config = config.replace("'${seed}'", "7").replace("'${kl}'", "{coeff: 0.5}")
    (tmp_path / ".hydra" / "defaults.yaml").write_text(
        f"experiment: {experiment}\nleash: {leash}\n"
    )
    (tmp_path / "config.yaml").write_text(config)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", text)
    assert rows == [("kl.coeff", "0.1", "0.1", "<b>0.5</b>"), ("seed", "0", "7", "7")]
    assert "python train.py experiment=x +kl.coeff=0.5<" in text
    assert "planted" not in text


def test_what_the_run_said_about_itself_stands_at_the_top(tmp_path):
    make_run(tmp_path)
    notes = [
        {"level": "info", "title": "Loss near 0", "text": "fine", "iteration": 1, "until": None},
        {"level": "error", "title": "Not <finite>", "text": "lower it", "iteration": 4, "until": 9},
        "torn",
    ]
    (tmp_path / "status.json").write_text(json.dumps({"state": "failed", "notes": notes}))
    shown = Page(write_report(tmp_path).read_text(encoding="utf-8")).texts
    order = ("Not <finite>", "iteration 4 to 9", FIRST, "What the run explained", "Loss near 0")
    order += ("Curves",)
    places = [shown.index(text) for text in order]
    assert places == sorted(places)
    assert "iteration 1" in shown


def test_why_a_run_failed_and_that_it_was_resumed_stand_above_all(tmp_path):
    make_run(tmp_path)
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank1.txt").write_text("why")
    told = {"state": "failed", "reason": "<i>why</i>", "resumed": "from iteration 7"}
    (tmp_path / "status.json").write_text(json.dumps(told))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    shown = Page(text).texts
    order = ("failed", "<i>why</i>", "errors/rank1.txt", "resumed from iteration 7", FIRST)
    assert [shown.index(t) for t in order] == sorted(shown.index(t) for t in order)
    assert '<a href="errors/rank1.txt">' in text, "it lies beside the page: no network"


def test_every_chart_says_what_is_healthy_and_which_metrics_it_shows(tmp_path):
    assert all(panel.healthy for panel in (*MAIN, *MORE))
    page = Page(write_report(make_run(tmp_path)).read_text(encoding="utf-8"))
    titles = [attrs.get("title") for tag, attrs in page.tags if tag == "figcaption"]
    assert titles[:2] == ["reward/mean (docs/metrics.md)", "kl/ref_sequence (docs/metrics.md)"]
    assert "healthy: rises, then levels off" in page.texts


def test_rounding_errors_do_not_fill_a_chart():
    series = [charts.Series("drift", [(1, -4e-8), (2, 6e-8)])]
    drawn = charts.line_chart(series, title="t", unit="u", least=1e-3)
    labels = [float(text) for text in re.findall(r'text-anchor="end">([\d.e-]+)<', drawn)]
    assert (min(labels), max(labels)) == (0.0, 1e-3)


def test_a_page_reloads_itself_while_its_run_goes_on(tmp_path):
    make_run(tmp_path)

    def reloads(state: str) -> bool:
        (tmp_path / "status.json").write_text(json.dumps({"state": state}))
        page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
        attributes = dict(page.tags)["body"]
        assert ("noscript" in dict(page.tags)) == ("data-reload" in attributes)
        return "data-reload" in attributes

    with held(tmp_path):
        assert reloads("running")
        assert not reloads("finished")
    assert not reloads("running"), "its process is gone"
    shown = Page((tmp_path / "report.html").read_text(encoding="utf-8")).texts
    assert "killed" in shown
    assert any("its process is gone" in text for text in shown)


def test_a_page_without_curves_says_when_they_come(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "running"}')
    note = "The first curves come after iteration 1; this page reloads itself."
    with held(tmp_path):
        assert note in Page(write_report(tmp_path).read_text()).texts
        JsonlTracker(tmp_path).log({"reward/mean": 0.5}, 1)
        assert note not in Page(write_report(tmp_path).read_text()).texts


def test_the_page_of_a_finished_run_has_the_command_to_talk_to_it(tmp_path):
    path = write_report(make_run(tmp_path / "a run", state="finished"))
    shown = Page(path.read_text(encoding="utf-8")).texts
    assert f"python train.py mode=chat resume='{path.parent.resolve()}'" in shown


def test_a_live_page_costs_a_fiftieth_of_the_time(tmp_path, monkeypatch):
    clock, cost = [100.0], 0.2
    monkeypatch.setattr("trainer.reports.report.time.monotonic", lambda: clock[0])

    def write(_):
        clock[0] += cost

    monkeypatch.setattr("trainer.reports.report.write_report", write)
    live, written = LiveReport(tmp_path), []
    for _ in range(1000):  # iterations of a second
        clock[0] += 1.0
        if live.refresh():
            written.append(clock[0])
    gaps = [b - a for a, b in itertools.pairwise(written)]
    assert 10 <= min(gaps) <= max(gaps) <= 12  # 0.2 s are a fiftieth of 10 s
    assert live.refresh(now=True), "the first iteration does not wait"
    cost = 0.0
    quick = LiveReport(tmp_path)
    assert [quick.refresh(), quick.refresh()] == [True, False], "nor more than one in five seconds"
    assert not LiveReport(tmp_path, quiet=True).refresh()


def test_a_live_page_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    live = LiveReport(tmp_path / "gone")
    assert not live.refresh()
    assert "no more live report" in caplog.text
    assert not live.refresh()
    assert len(caplog.records) == 1


def test_a_long_file_is_read_at_both_ends(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"i": i}) + "\n" for i in range(1000)))
    got = [line["i"] for line in read_lines(path, most=200)]
    # 100 bytes: ten lines of 9 bytes and one of 10; as many as fit of the last, 11 bytes each
    assert got == [*range(11), *range(991, 1000)]
    assert [line["i"] for line in read_lines(path, most=10**6)] == list(range(1000))


def test_times_are_stacked_with_what_none_of_them_counts():
    chart = charts.stack_chart(
        [
            charts.Series("a", [(1, 1.0), (2, 3.0)]),
            charts.Series("b", [(1, 1.0), (2, 0.0), (3, 5.0)], hue=1),
        ],
        title="t",
        unit="s",
    )
    root = ElementTree.fromstring(chart)
    areas = [e.attrib["d"] for e in root.iter() if e.get("class") == "area"]
    outlines = [[tuple(map(float, p.split())) for p in d[1:-1].split("L")] for d in areas]
    assert outlines[0][:3] == outlines[1][3:][::-1], "the second lies on the first"
    axis = {
        float(e.text or 0): float(e.attrib["y"]) - 4
        for e in root.iter()
        if e.get("text-anchor") == "end"
    }
    per_second = axis[0.0] - axis[2.0]
    tops = [(axis[0.0] - y) / per_second * 2 for _, y in outlines[1][:3]]
    assert tops == pytest.approx([2.0, 3.0, 5.0], abs=0.05)  # 1 + 1, 3 + 0, 0 + 5
    assert "iteration 2: a 3, b 0, all 3<" in chart
    assert ">a 40%<" in chart  # 4 of 10 seconds


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "one")
    with open(path) as reader:
        write_text(path, "another")
        assert reader.read() == "one", "who has it open reads the old one to its end"
    assert path.read_text() == "another"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_text(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_reports_need_no_torch(tmp_path):
    code = (
        "import sys, trainer.reports.report, trainer.reports.sweep, trainer.reports.display\n"
        "import trainer.reports.trackers.files\n"
        f"trainer.reports.report.write_report({str(make_run(tmp_path))!r})\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'wandb', 'tensordict', 'hydra'}\n"
        "print(*(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "", "")


def test_every_charted_metric_is_explained():
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    explained = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(explained) == len(set(explained))
    assert {name for panel in (*MAIN, *MORE) for name in panel.metrics} <= set(explained)
