"""report.html: right values, escaped texts, and a page whatever state the folder is in."""

import itertools
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pages import Page, Picture, write_lines, write_run, write_status, write_words

from trainer.reports import chart, summary
from trainer.reports.__main__ import main
from trainer.reports.chart import Series, line_chart, stack_chart
from trainer.reports.panels import MAIN, MORE
from trainer.reports.report import run_svg, write_report
from trainer.reports.sweep_page import write_sweep
from trainer.runs.lock import held
from trainer.runs.run_files import load_run, read_lines


def drawn(*series: Series, **more) -> Picture:
    return Picture(line_chart(series, title="t", unit="u", **more))


def test_a_run_whose_reward_python_gave_has_no_command_that_repeats_it(tmp_path):
    write_words(write_run(tmp_path), "experiment=demo", "+env.rewards.r={_target_: x}")
    config = {"env": {"rewards": {"r": {"_target_": "envs.rewards.Given", "name": "r"}}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    page = Page(write_report(tmp_path))
    assert not [text for text in page.texts if text.startswith("python train.py experiment=")]
    assert any("the Python code that called trainer.train" in text for text in page.texts)
    assert any(text.startswith("python train.py resume=") for text in page.texts)


def test_the_page_tells_the_run_and_needs_no_network(tmp_path):
    page = Page(path := write_report(write_run(tmp_path / "a run")))
    for text in ("demo", "failed", "<i>why</i>", "c0ffee", "1 min 15 s"):
        assert text in page.texts
    assert f"python train.py resume='{path.parent.resolve()}'" in page.texts
    assert "0.0625 \u2192 0.688" in page.texts  # 1/16; 11/16 of the last three: a quarter
    assert "0.25" in page.texts, "an accuracy measured once does not go from there to there"
    assert "planted-2" not in page.source
    assert not {"link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert page.attributes("src") == []
    places = page.attributes("href")
    assert {place[1:] for place in places} <= set(page.attributes("id"))
    assert places[:2] == ["#curves", "#replies"], "jump links, and no other"
    chat = Page(write_report(write_run(tmp_path / "2", state="finished"))).text
    assert "python train.py mode=chat resume=" in chat


def test_the_numbers_at_the_top_have_the_reward_without_a_kl_part(tmp_path):
    row = {"reward/mean": -9.0, "kl/ref_sequence": 2.0, "loss/total": 0.5}
    rows = [{"reward/raw_mean": i / 4, **row} for i in (1, 2, 3, 4)]
    told = summary.in_one_line(load_run(write_lines(tmp_path, *rows)))
    assert told == "task reward 0.25 -> 1, KL to the reference 2 nats per reply, iterations 4"


def test_a_mean_of_the_last_values_says_so_beside_the_last_value_of_a_curve(tmp_path):
    rows = [{"reward/mean": i / 4, "kl/ref_sequence": -i * 1e-8} for i in range(1, 9)]
    rows[-1]["eval/kl_ref_sequence"] = 2.5
    run = load_run(write_lines(tmp_path, *rows))
    told = "reward 0.25 -> 1.88 (last 2), KL to the reference 0 nats per reply (last 2)"
    held = "KL of the held-out replies 2.5 nats"
    assert summary.in_one_line(run) == f"{told}, {held}, iterations 8"
    page = Page(write_report(tmp_path))
    assert page.in_order(
        "0.25 \u2192 1.88",
        "reward, first \u2192 last 2",
        "KL to the reference, nats per reply, last 2",
    )
    assert page.in_order("Reward", "2"), "the curve's own"


@pytest.mark.parametrize(("held_out", "said"), [(40, ", of 40 prompts"), (400, "")])
def test_an_accuracy_of_few_prompts_says_of_how_many(tmp_path, held_out, said):
    write_lines(tmp_path, {"eval/sampled_accuracy": 0.25}, {"eval/sampled_accuracy": 0.82}, begin=0)
    write_status(tmp_path, held_out=held_out)
    assert f"sampled accuracy{said}" in Page(write_report(tmp_path)).texts
    told = summary.in_one_line(load_run(tmp_path)).split(", ")[0]
    assert told == f"sampled accuracy 0.25 -> 0.82{said.lstrip(',')}"


def test_no_text_of_the_files_is_markup(tmp_path):
    hostile = '"><script>alert(1)</script><p class="'
    notes = [{"title": hostile, "text": hostile, "iteration": hostile, "rule": "x"}]
    notes[0] |= {"level": "warn", "until": None}
    write_run(tmp_path, state=hostile)
    write_status(tmp_path, state=hostile, reason=hostile, notes=notes, model={"name": hostile})
    page = Page(write_report(tmp_path))
    assert [tag for tag, _ in page.tags].count("script") == 2  # the page's own, and its data
    assert page.texts.count(hostile) >= 4
    for text in ("x </pre><script>1</script>", "<b>Q</b>", "?\x00 late"):
        assert text in page.texts


def test_curves_are_drawn_for_what_was_logged_and_say_what_is_healthy(tmp_path):
    page = Page(write_report(write_run(tmp_path)))
    known = ["Reward", "KL to the reference", "Accuracy on held-out prompts"]
    assert [*page.charts()] == [*known, "Reward parts", "my/own"]
    titles = page.attributes("title", "figcaption")
    assert titles[:2] == ["reward/mean (docs/metrics.md)", "kl/ref_sequence (docs/metrics.md)"]
    assert "healthy: rises, then levels off" in page.texts
    assert all(panel.healthy for panel in (*MAIN, *MORE))


def test_an_sft_run_has_loss_curves_and_no_reward(tmp_path):
    rows = [{"loss/total": 3.0 / i, "loss/policy": (3.0 + 1e-7) / i, "optim/lr": 1} for i in (1, 2)]
    charts = Page(write_report(write_lines(tmp_path, *rows))).charts()
    assert [*charts] == ["Loss", "Learning rate"]
    assert charts["Loss"].tips == ["iteration 1: total 3", "iteration 2: total 1.5"], "once"


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


def test_what_went_wrong_stands_at_the_top(tmp_path):
    write_run(tmp_path)
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank1.txt").write_text("why")
    note = {"level": "info", "title": "Loss near 0", "text": "fine", "iteration": 1, "until": None}
    wrong = {
        "level": "error",
        "title": "Not finite",
        "text": "lower it",
        "iteration": 4,
        "until": 9,
    }
    told = {"state": "failed", "reason": "why", "resumed": "from iteration 7"}
    write_status(tmp_path, notes=[note, wrong], **told)
    page = Page(write_report(tmp_path))
    order = ("failed", "why", "errors/rank1.txt", "resumed from iteration 7", "Not finite")
    tile = "reward, first \u2192 last 3"
    assert page.in_order(
        *order, "iteration 4 to 9", tile, "What the run explained", "mean per reply"
    )
    files = [place for place in page.attributes("href") if place[0] != "#"]
    assert files == ["errors/rank1.txt"], "it lies beside the page: no network"


def test_a_page_reloads_itself_while_its_run_goes_on(tmp_path):
    note = "The first curves come after iteration 1; this page reloads itself."
    write_status(tmp_path, state="running")
    with held(tmp_path):
        page = Page(write_report(tmp_path))
        assert page.goes_on
        assert note in page.texts
        write_lines(tmp_path, {"reward/mean": 0.5})
        assert note not in Page(write_report(tmp_path)).texts
        write_status(tmp_path, state="finished")
        assert not Page(write_report(tmp_path)).goes_on
    write_status(tmp_path, state="running")
    page = Page(write_report(tmp_path))
    assert not page.goes_on
    assert "killed" in page.texts
    assert any("its process is gone" in text for text in page.texts)


def test_the_page_of_a_run_says_what_it_does_since_when_and_how_long_it_may_take(tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {num_iterations: 30}")
    write_lines(tmp_path, *[{"reward/mean": 0.5, "time/iteration_s": 8.0}] * 12)
    phase = {"phase": "evaluate", "phase_since": time.time() - 75, "phase_share": 0.4}
    write_status(tmp_path, state="running", **phase)
    with held(tmp_path):
        page = Page(write_report(tmp_path))
        for text in ("evaluating on held-out prompts: 40% done, for ", "1 min 15 s"):
            assert text in page.texts
        assert "; 18 iterations to go, about 2 min 24 s" in page.texts, "18 times 8 seconds"
    write_status(tmp_path, state="finished", **phase)
    assert "18 iterations to go" not in Page(write_report(tmp_path)).text


def test_a_page_is_written_wherever_the_files_were_cut(tmp_path):
    whole = write_words(write_run(tmp_path / "whole", iterations=2), "kl.coeff=0.1", "+a=b")
    hydra = "hydra:\n  runtime:\n    choices:\n      experiment: x\n"
    (whole / ".hydra" / "hydra.yaml").write_text(hydra)
    for path in [p for p in whole.rglob("*") if p.is_file()]:
        data = path.read_bytes()
        for size in range(0, len(data), 61):
            path.write_bytes(data[:size])
            write_report(whole)
            write_sweep(tmp_path)
        path.write_bytes(data)


def test_the_command_rebuilds_the_page_and_draws_the_picture(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    picture = tmp_path / "run.svg"
    assert main([str(run), "--svg", str(picture)]) == 0
    Picture(picture.read_text())
    assert picture.read_text() == run_svg(run)
    assert main([str(tmp_path / "nothing")]) == 2
    assert "expected a run or sweep folder" in capsys.readouterr().err


def test_folders_that_are_no_runs_get_no_page(tmp_path, capsys):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [schema, {policy: smollm}]\n")
    run = write_run(tmp_path / "outputs" / "run")
    assert main([str(tmp_path)]) == 0
    assert [*tmp_path.rglob("report.html")] == [run / "report.html"]
    capsys.readouterr()


def test_a_curve_goes_through_its_values():
    values = [(0, 0.0), (5, 5.0), (10, 10.0)]
    picture = drawn(Series("s", values))
    (line,) = picture.paths("line")
    assert [picture.value(y) for _, y in line] == pytest.approx([0, 5, 10], abs=0.02)
    assert line[1][0] == pytest.approx((line[0][0] + line[2][0]) / 2, abs=0.11)
    assert picture.texts(**{"class": "value"}) == ["10"]


@pytest.mark.parametrize(
    ("lo", "hi"),
    [(0, 1), (0.31, 0.32), (-3e-7, 5e-6), (5, 5), (0, 0), (-40, 1e6), (0.05, 0.05 + 7e-18)],
)
def test_ticks_are_round_few_and_enclose_the_data(lo, hi):
    ticks = chart.ticks(lo, hi)
    assert ticks[0] <= lo <= hi <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    assert float(f"{steps[0]:.6e}".split("e")[0]) in (1.0, 2.0, 5.0)


def test_a_spike_is_cut_and_told_and_a_high_curve_is_shown_whole():
    values = [1.0 + 0.1 * (i % 3) for i in range(30)]
    values[18] = 400.0
    spiked = drawn(Series("k3", list(enumerate(values))))
    assert spiked.ticks[-1] < 5
    assert "k3, 18: 400" in spiked.tips
    calm, high = [(i, 1.0) for i in range(20)], [(i, 50.0) for i in range(20)]
    assert drawn(*[Series("calm", calm)] * 11, Series("high", high)).ticks[-1] >= 50


def test_a_long_run_is_drawn_small_smooth_and_with_its_last_value():
    values = [(i, float(12 + i % 2 + i // 20)) for i in range(60)]  # whole numbers, as lengths are
    picture = drawn(Series("max", values))
    (raw,), (line,) = picture.paths("raw"), picture.paths("line")
    for i in (0, 2, 30, 57, 59):
        near = [y for _, y in raw[max(0, i - 3) : i + 4]]
        assert line[i][1] == pytest.approx(sum(near) / len(near), abs=0.11), i  # 0.1 pixel
    long = [(i, math.sin(i / 50)) for i in range(20_000)]
    svg = line_chart([Series("s", [*long, (20_000, 3.0)])], title="t", unit="u")
    assert len(svg) < 30_000
    assert Picture(svg).texts(**{"class": "value"}) == ["3"]


def test_times_are_stacked_with_their_shares():
    parts = [Series("a", [(1, 1.0), (2, 3.0)]), Series("b", [(1, 1.0), (2, 0.0), (3, 5.0)], hue=1)]
    picture = Picture(stack_chart(parts, title="t", unit="s"))
    both, first = picture.paths("area")
    roofs = [[picture.value(y) for _, y in area[2:-2]] for area in (first, both)]
    assert roofs[0] == pytest.approx([1, 3, 0], abs=0.05)
    assert roofs[1] == pytest.approx([2, 3, 5], abs=0.05)
    assert picture.tips[1] == "iteration 2: a 3, b 0, all 3"
    assert "a 40%" in picture.texts()  # 4 of 10 seconds
    (area,) = Picture(stack_chart([Series("a", [(1, 1.0)])], title="t", unit="s")).paths("area")
    assert area[-1][0] - area[0][0] > 200, "one iteration is as wide as the plot"


def test_a_large_file_is_read_at_both_ends(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"i": i}) + "\n" for i in range(1000)))
    got = [line["i"] for line in read_lines(path, most=200)]
    # 100 bytes: ten lines of 9 bytes and one of 10; as many as fit of the last, 11 bytes each
    assert got == [*range(11), *range(991, 1000)]


def test_reports_need_no_torch(tmp_path):
    code = (
        "import sys\n"
        "import trainer.reports.display, trainer.reports.diagnosis, trainer.reports.report\n"
        "import trainer.reports.sweep_page, trainer.reports.trackers.jsonl\n"
        f"trainer.reports.report.write_report({str(write_run(tmp_path))!r})\n"
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
