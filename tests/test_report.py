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

from trainer import svg
from trainer.report import PANELS, main, run_svg, write_report
from trainer.run_files import load_run, write_text
from trainer.sweep import write_sweep
from trainer.tracker import JsonlTracker

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


def make_run(folder: Path, *, iterations: int = 12) -> Path:
    tracker = JsonlTracker(folder)
    tracker.log({"eval/sampled_accuracy": 0.25}, 0)
    before = {"kind": "before", "prompt": "<b>Q</b>", "response": "x </pre><script>1</script>"}
    tracker.transcripts([before], 0)
    for i in range(1, iterations + 1):
        metrics = {"reward/mean": i / 16, "kl/ref_sequence": i / 4, "my/own": 1.0}
        tracker.log({**metrics, "reward_part/format": 0.5, "optim/grad_norm": math.nan}, i)
        rows = [{"prompt": "p", "response": f"reply {k}", "reward": k / 8} for k in range(8)]
        tracker.transcripts([{"kind": "train", **row} for row in rows], i)
    tracker.transcripts([{**before, "kind": "after", "response": "\ud800\x00 late"}], iterations)
    model = {"name": "m", "origin": "folder", "sha256": "c0ffee"}
    status = {"state": "failed", "reason": "<i>why</i>", "model": model, "seconds": 75.0}
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
    assert "0.0625 \u2192 0.469" in shown  # first reward 1/16; mean of 3/16 ... 12/16 = 0.46875
    assert "1 min 15 s" in shown
    assert "planted-2" not in text


def test_curves_are_drawn_for_what_was_logged(tmp_path):
    text = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    charts = re.findall(r'<svg class="chart".*?aria-label="(.*?)"', text)
    assert charts == [
        "Reward",
        "KL to the reference",
        "Accuracy on held-out prompts",
        "Reward parts",
        "my/own",
    ]
    for drawing in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(drawing)


def test_the_page_needs_no_network_and_runs_no_script(tmp_path):
    page = Page(write_report(make_run(tmp_path)).read_text(encoding="utf-8"))
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any("src" in attrs or "href" in attrs for _, attrs in page.tags)


def test_replies_are_text_best_first_and_worst_last(tmp_path):
    text = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    shown = Page(text).texts
    assert "x </pre><script>1</script>" in shown
    assert "<b>Q</b>" in shown
    assert "?\ufffd late" in shown
    replies = [t for t in shown if t.startswith("reply ")]
    assert replies == ["reply 7", "reply 6", "reply 5", "reply 0", "reply 1", "reply 2"]


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
    assert "pass@8, 1: 0.75" in text


def test_an_sft_run_has_loss_curves_and_no_reward(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for i in range(1, 4):
        loss = {"loss/total": 3.0 / i, "loss/policy": (3.0 + 1e-7) / i}
        tracker.log({**loss, "optim/lr": 1e-3}, i)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert ">policy" not in text  # the same curve again
    assert re.findall(r'aria-label="(.*?)"', text) == ["Loss", "Learning rate"]
    assert "3 \u2192 1.83" in text  # mean of 3, 1.5 and 1 is 1.8333


def test_the_curve_goes_through_the_values():
    chart = svg.line_chart([svg.Series("s", [(0, 0.0), (5, 5.0), (10, 10.0)])], title="t", unit="u")
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
    ("lo", "hi"), [(0, 1), (0.31, 0.32), (-3e-7, 5e-6), (5, 5), (0, 0), (-40, 1e6), (1e-9, 2e9)]
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
    chart = svg.line_chart([svg.Series("k3", list(enumerate(values)))], title="t", unit="nats")
    ElementTree.fromstring(chart)
    assert "k3, 18: 400" in chart
    labels = [float(t) for t in re.findall(r'text-anchor="end">([\d.]+)<', chart)]
    assert max(labels) < 5


def test_long_runs_stay_small(tmp_path):
    points = [(i, math.sin(i / 50)) for i in range(20_000)]
    assert len(svg.line_chart([svg.Series("s", points)], title="t", unit="u")) < 30_000


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
        "import sys, trainer.report, trainer.sweep, trainer.display, trainer.tracker\n"
        f"trainer.report.write_report({str(make_run(tmp_path))!r})\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'wandb', 'tensordict', 'hydra'}\n"
        "print(*(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "", "")


def test_every_charted_metric_is_explained():
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text()
    explained = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(explained) == len(set(explained))
    assert {name for panel in PANELS for name in panel.metrics} <= set(explained)
