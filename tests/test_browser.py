"""The pages in a headless Chromium, wide and narrow, light and dark (make test-browser).

The screenshots are kept in $SCREENSHOTS, to be looked at.
"""

import json
import math
import os
import re
import time
from pathlib import Path

import pytest
from browser import Browser
from pages import write_lines, write_status, write_words

from trainer.reports import page as page_module
from trainer.reports.panels import MAIN, MORE
from trainer.reports.report import write_report
from trainer.reports.sweep_page import write_sweep
from trainer.reports.trackers.jsonl import JsonlTracker
from trainer.runs.lock import held

pytestmark = pytest.mark.browser
WIDTHS = (1280, 390)
LONG = "unbreakable" * 12


def metrics(i: int, scale: float) -> dict[str, float]:
    """Return all that a PPO run logs, with large, small and negative values."""
    names = [name for panel in (*MAIN, *MORE) for name in panel.metrics if "eval/" not in name]
    out = {n: scale * (1 + k % 3 + math.sin(i / (3 + k % 5))) for k, n in enumerate(names)}
    out |= {"optim/lr": 1e-6, "kl/coeff": scale, "perf/tokens_per_s": 123456.0 + 1000 * (i % 7)}
    out |= {"kl/behaviour": 2e-7 * i, "reward_part/format": 0.5, "reward_part/exact": i / 60}
    return out | {"time/iteration_s": sum(v for n, v in out.items() if n.startswith("time/")) + 1}


def write_run(folder: Path, *words: str, scale: float = 1.0, state: str = "finished") -> None:
    accuracies = {"eval/greedy_accuracy": 0.5, "eval/pass@8": 0.9}
    rows = [metrics(i, scale) for i in range(1, 61)]
    for i in (20, 40, 60):
        rows[i - 1] |= {"eval/sampled_accuracy": 0.2 + i / 100, **accuracies}
    write_lines(folder, {"eval/sampled_accuracy": 0.2, "eval/greedy_accuracy": 0.4}, *rows, begin=0)
    texts = ["The", " capital", f" {LONG}", " is", "\n", "Paris \U0001f600", "<|im_end|>"] * 6
    own = [None if k % 7 == 4 else k for k in range(len(texts))]
    pieces = {
        "text": texts,
        "kl": [k and math.sin(k) for k in own],
        "advantage": [k and math.cos(k / 5) for k in own],
        "log_prob": [k and -0.1 * k for k in own],
    }
    row = {"kind": "train", "prompt": f"Q {LONG}", "truncated": True, "kl": 2.5}
    row |= {"answer": LONG, "system": "Be brief. " * 9, "parts": {"exact": 0.25, LONG: 1.0}}
    ranks = {"best": 1.0, "median": 0.5, "worst": 0.0}
    said = [
        {**row, "response": n, "rank": n, "reward": r, "pieces": pieces} for n, r in ranks.items()
    ]
    said += [{**row, "response": f"{k} {LONG}", "reward": k / 9} for k in range(3)]
    for kind in ("before", "after"):
        said += [{"kind": kind, "prompt": f"{k}", "response": f"{kind} {LONG}"} for k in range(8)]
    for i in range(1, 10):
        earlier = [{**row, "group": g, "prompt": f"{g} of {i}", "response": f"<b>r{i}{g}{k}",
                    "reward": k / 8} for g in range(9) for k in range(8)]  # fmt: skip
        JsonlTracker(folder, resume=True).replies(earlier, i, kind="train")
    JsonlTracker(folder, resume=True).replies(said, 60, kind="after")
    note = {"level": "warn", "title": "KL explodes", "text": f"{LONG} read", "iteration": 7}
    notes = [note, {**note, "level": "info", "title": "Loss near 0", "until": 9}]
    model = {"name": "org/model", "origin": "hub", "sha256": "0123456789abcdef" * 4}
    machine = {"device": "cuda (NVIDIA H200)", "ranks": 8, "torch": "2.13", "commit": "abc1234+"}
    told = {"state": state, "objective": scale, "seconds": 99, "notes": notes}
    write_status(folder, **told, model=model, machine=machine)
    write_words(folder, "experiment=ppo_tiny", *words)
    config = "{kl: {coeff: 0.1}, policy: {model: /a/long/path/to/the/folder/of/the/model}}"
    (folder / "config.yaml").write_text(config)
    defaults = config.replace("0.1", "0.2")
    (folder / ".hydra" / "defaults.yaml").write_text(f"experiment: {defaults}\nleash: {defaults}\n")


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    write_run(root / "run")
    for coeff in ("0", "0.01", "0.1", "1"):
        for seed in ("1", "2"):
            job = root / "sweep" / f"kl.coeff={coeff},seed={seed}"
            state = "failed" if coeff == "1" and seed == "2" else "finished"
            scale = 1 / (1 + float(coeff)) + 0.02 * int(seed)
            write_run(job, f"kl.coeff={coeff}", f"seed={seed}", scale=scale, state=state)
    write_words(root / "sweep" / "kl.coeff=9,seed=1", "kl.coeff=9", "seed=1")
    return {"report": write_report(root / "run"), "sweep": write_sweep(root / "sweep")}


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory) -> Path:
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


OUTSIDE = """
[...document.querySelectorAll("body *")].filter((e) => {
  if (e.parentElement.closest(".scroll,pre,.reply,script,style,svg")) return false;
  const box = e.getBoundingClientRect();
  return box.right > innerWidth + 1 || box.left < -1;
}).map((e) => e.outerHTML.slice(0, 200))
"""
# Texts of a chart that leave it, lie on each other or are too small to read, in CSS pixels.
UNREADABLE = """
[...document.querySelectorAll("svg.chart")].flatMap((chart) => {
  const frame = chart.getBoundingClientRect();
  if (!frame.width) return [];  // folded
  const texts = [...chart.querySelectorAll("text")].map((e) => [e, e.getBoundingClientRect()]);
  const bad = texts.filter(([, b]) => b.height < 9 || b.left < frame.left - 2 ||
    b.right > frame.right + 2 || b.top < frame.top - 2 || b.bottom > frame.bottom + 2);
  const on = texts.flatMap(([e, a], i) => texts.slice(0, i).filter(([, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4).map(([f]) => [e, f]));
  const name = chart.getAttribute("aria-label");
  return [...bad.map(([e]) => name + ": " + e.textContent),
    ...on.map(([e, f]) => name + ": " + e.textContent + " on " + f.textContent)];
})
"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "sweep"])
def test_a_page_fits_asks_for_nothing_and_complains_of_nothing(
    browser, pages, screenshots, name, width
):
    for dark in (False, True):
        browser.open(pages[name], width=width, dark=dark)
        browser.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        assert browser.complaints() == []
        assert browser.requests() == [pages[name].resolve().as_uri()]
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run(OUTSIDE) == []
        assert browser.run(UNREADABLE) == []
        picture = screenshots / f"{name}_{width}{'_dark' if dark else ''}.png"
        browser.screenshot(picture)
        assert picture.stat().st_size > 20_000


def test_the_table_of_a_sweep_is_not_cut_on_a_wide_screen(browser, pages):
    browser.open(pages["sweep"], width=1280)
    tables = "[...document.querySelectorAll('.scroll:not(.row)')]"
    cut = f"{tables}.map((e) => e.scrollWidth - e.clientWidth)"
    assert browser.run(cut) == [0]


def test_a_table_that_is_cut_on_a_narrow_screen_shows_it_until_its_end(browser, pages):
    """A shadow lies on the side to which it goes on, and is covered at the end."""
    browser.open(pages["sweep"], width=390)
    of = "getComputedStyle(document.querySelector('.scroll:not(.row)'))"
    assert browser.run(f"{of}.backgroundImage").count("linear-gradient") == 2
    assert browser.run(f"{of}.backgroundAttachment") == "local, scroll"


def test_a_card_of_a_long_prompt_and_long_replies_fits_a_screen(browser, tmp_path):
    row = {"kind": "train", "prompt": "word " * 2000, "response": "said " * 2000, "reward": 1.0}
    JsonlTracker(tmp_path, resume=False).replies([{**row, "group": 0}] * 8, 1, kind="train")
    write_lines(tmp_path, {"reward/mean": 1.0})
    for width in WIDTHS:
        browser.open(write_report(tmp_path), width=width)
        card = "document.querySelector('.group').getBoundingClientRect().height"
        assert 300 < browser.run(card) < 844


DIFFER = """(...colours) => {
  const light = (css) => css.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const [a, b] = colours.map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""
# The least contrast of a token's text on its colour, which is mixed with the paper.
HEAT = f"""Math.min(...[...document.querySelectorAll(".heat u.m,.heat u.l")].map((token) => {{
  const style = getComputedStyle(token), parts = (css) => css.match(/[\\d.]+/g).map(Number);
  const paper = parts(getComputedStyle(document.body).backgroundColor);
  const [red, green, blue, share] = parts(style.backgroundColor);
  const mixed = [red, green, blue].map((v, i) => v * share + paper[i] * (1 - share));
  return ({DIFFER})(`rgb(${{mixed}})`, style.color);
}}))"""


def test_text_and_paper_differ_enough_in_both_schemes(browser, pages):
    contrast = f"""((ink) => {{
      const mark = document.body.appendChild(document.createElement("i"));
      mark.style.color = `var(${{ink}})`;
      const paper = getComputedStyle(document.body).backgroundColor;
      return ({DIFFER})(paper, getComputedStyle(mark).color);
    }})"""
    for dark in (False, True):  # WCAG 2.1: 4.5 for text, 3 for graphics
        browser.open(pages["report"], width=1280, dark=dark)
        for name, least in [("--ink", 7), ("--muted", 4.5), ("--good", 4.5), ("--bad", 4.5)]:
            assert browser.run(f"{contrast}('{name}')") >= least, (name, dark)
        for hue in range(8):
            assert browser.run(f"{contrast}('--hue{hue}')") >= 3, (hue, dark)
        assert browser.run(HEAT) >= 4.5, dark  # the strongest background, on the card's paper


def test_the_button_in_a_header_sorts_by_number_and_back_with_empty_cells_last(browser, pages):
    browser.open(pages["sweep"], width=1280)
    shown = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[{}].textContent)"
    heads = browser.run("[...document.querySelectorAll('th')].map((head) => head.textContent)")
    place = heads.index("objective")
    for down in (False, True):
        browser.run(f"document.querySelectorAll('th button')[{place}].focus()")
        for kind in ("keyDown", "keyUp"):  # as a keyboard does
            browser.call("Input.dispatchKeyEvent", type=kind, key=" ", code="Space", text=" ")
        texts = browser.run(shown.format(place))
        values = [float(text) for text in texts if text]
        assert values == sorted(values, reverse=down)
        assert len(set(values)) > 4
        assert texts[len(values) :] == [""] * (len(texts) - len(values)) != []
        sorts = browser.run("[...document.querySelectorAll('th')].map((head) => head.ariaSort)")
        assert sorts[place] == ("descending" if down else "ascending")
    browser.run(f"document.querySelectorAll('th button')[{heads.index('kl.coeff')}].click()")
    coeffs = [float(text) for text in browser.run(shown.format(heads.index("kl.coeff")))]
    assert coeffs == [0, 0, 0.01, 0.01, 0.1, 0.1, 1, 1, 9]


def test_a_finger_gets_the_values_of_a_chart_and_of_a_token(browser, pages):
    browser.open(pages["report"], width=390)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    for selector in (".tip", ".heat u[title]"):
        told = browser.run(f"document.querySelector('{selector}').textContent")
        tap = "dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        browser.run(f"document.querySelector('{selector}').{tap}")
        tip = browser.run("document.getElementById('tip')?.textContent")
        assert tip == told or "log-prob" in tip
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)


GROUPS = "[...document.querySelectorAll('#browser .group')]"
SHOWN = f"{GROUPS}.map((group) => group.querySelector('.prompt').textContent)"


def test_the_browser_of_replies_goes_through_iterations_and_finds_texts(browser, pages):
    for width in WIDTHS:
        browser.open(pages["report"], width=width)
        slider = "document.querySelector('#browser [type=range]')"
        search = "document.querySelector('#browser [type=search]')"
        where = "document.querySelector('#browser output').textContent"

        def press(key: str) -> None:
            for kind in ("keyDown", "keyUp"):
                browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

        def type_in(element: str, value: str) -> None:
            browser.run(f"{element}.value = '{value}'; {element}.dispatchEvent(new Event('input'))")

        assert browser.run(where) == "iteration 60 of 60"
        assert browser.run("document.querySelectorAll('#browser u[title]').length") > 40
        browser.run("document.getElementById('browser').scrollIntoView()")
        press("ArrowLeft")
        assert browser.run(where) == "iteration 9 of 60"
        assert browser.run(SHOWN) == [f"{g} of 9" for g in range(6)]
        replies = browser.run(f"{GROUPS}[0].querySelectorAll('.said .reply').length")
        assert replies == 8, "the whole group"
        said = f"[...{GROUPS}[0].querySelectorAll('.said')]"
        tops = f"{said}.map((e) => e.getBoundingClientRect().top)"
        assert len(set(browser.run(tops))) == 1, "beside each other"
        told = browser.run(f"{GROUPS}[0].textContent")
        for text in ("right answer: unbreakable", "parts: exact 0.25", "reward 0.875", "Be brief."):
            assert text in told
        assert "<b>r900" in told, "no markup"
        browser.run("document.querySelector('#browser .more').click()")
        assert browser.run(SHOWN) == [f"{g} of 9" for g in range(9)]
        assert browser.run("document.querySelector('#browser .more').hidden")
        press("ArrowRight")
        press("ArrowRight")
        assert browser.run(where) == "iteration 60 of 60"
        type_in(slider, "0")
        assert browser.run(where) == "iteration 1 of 60"
        type_in(search, "<B>R73")  # of any iteration, whatever the case
        assert browser.run(SHOWN) == ["iteration 7 3 of 7"]
        press("ArrowRight")
        assert browser.run(SHOWN) == ["iteration 7 3 of 7"], "a search is of all iterations"
        type_in(search, "no such text")
        assert browser.run(SHOWN) == []
        type_in(search, "")
        assert browser.run(where) == "iteration 1 of 60"
        browser.run("document.querySelectorAll('#browser .views button')[1].click()")
        assert browser.run(SHOWN) == [str(k) for k in range(6)]
        names = f"[...{GROUPS}[0].querySelectorAll('.said > .facts')].map((e) => e.textContent)"
        assert browser.run(names) == ["before training", "after training"]
        assert browser.run(OUTSIDE) == []
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.complaints() == []


def test_replies_that_do_not_fit_side_by_side_say_that_they_scroll(browser, pages):
    script = """[...document.querySelectorAll("#browser .group:has(.row)")]
      .map((g) => [g.querySelector(".row").scrollWidth > g.querySelector(".row").clientWidth + 1,
                   g.querySelector(".aside").offsetHeight > 0])"""
    found = []
    for width in (1280, 390):
        browser.open(pages["report"], width=width)
        found += browser.run(script)
    assert [True, True] in found
    assert all(cut == told for cut, told in found)


def test_jump_links_lead_to_their_headings_on_a_phone(browser, pages):
    browser.open(pages["report"], width=390)
    for place in ("replies", "configuration", "curves"):
        browser.run(f"document.querySelector('nav [href=\"#{place}\"]').click()")
        top = f"document.getElementById('{place}').getBoundingClientRect().top"
        until(browser, f"0 < {top} && {top} < innerHeight - 20")
        bottom = browser.run("document.querySelector('nav').getBoundingClientRect().bottom")
        assert bottom <= browser.run(top)
        assert bottom > 0, "the links stay in sight"


def test_a_click_changes_what_stands_against_the_kl_of_a_sweep(browser, pages):
    browser.open(pages["sweep"], width=390)
    seen = "[...document.querySelectorAll('.tab')].map((e) => e.getBoundingClientRect().height > 0)"
    assert browser.run(seen) == [True, False]
    browser.run("document.querySelectorAll('.tabs label')[1].click()")
    assert browser.run(seen) == [False, True]
    assert browser.run(UNREADABLE) == []


def until(browser: Browser, condition: str) -> None:
    """Wait until a JavaScript condition holds, also over reloads."""
    limit = time.monotonic() + 30
    while not browser.run(f"Boolean({condition})"):
        assert time.monotonic() < limit, f"never: {condition}"
        time.sleep(0.05)


def test_a_sweep_that_goes_on_keeps_its_order_and_its_place(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "RELOAD", 0.5)

    def job(coeff: int) -> None:
        words = (f"kl.coeff={coeff}", f"env.dataset={LONG}{coeff}")
        write_run(tmp_path / words[0], *words, scale=1 / (1 + coeff))

    for coeff in range(3):
        job(coeff)
    (tmp_path / "sweep.json").write_text('{"jobs": ["later"]}')
    first = "document.querySelector('tbody td')?.textContent"
    with held(tmp_path):
        browser.open(write_sweep(tmp_path), width=390)
        browser.run("for (const _ of [1, 2]) document.querySelector('th button').click()")
        assert browser.run(first) == "2"
        browser.run("scrollTo(0, 500); document.querySelector('.scroll').scrollLeft = 40")
        browser.run("window.same = true")
        job(3)
        write_sweep(tmp_path)
        until(browser, f"!window.same && document.readyState === 'complete' && {first} === '3'")
        until(browser, "Math.abs(scrollY - 500) < 2")
        assert browser.run("document.querySelector('.scroll').scrollLeft") == 40
        browser.run("window.same = true")
    write_sweep(tmp_path)  # killed
    until(browser, "document.querySelector('.state')?.textContent === 'stopped'")
    browser.run("window.same = true")
    time.sleep(1.5)
    assert browser.run("window.same"), "the page of a dead sweep stays as it is"
    assert browser.complaints() == []


def test_a_button_copies_the_command_before_it_or_selects_it(browser, pages):
    browser.open(pages["sweep"], width=390)
    button, text = "document.querySelector('button.copy')", "document.querySelector('.command')"
    command = browser.run(f"{text}.textContent")
    assert command.startswith("python train.py ")
    assert browser.run(f"{button}.getBoundingClientRect().width") > 20
    clipboard = "Object.defineProperty(navigator, 'clipboard', {{value: {}, configurable: true}})"
    browser.run(clipboard.format("{writeText: async (text) => { window.copied = text; }}"))
    browser.run(f"{button}.click()")
    until(browser, f"{button}.textContent === 'copied'")
    assert browser.run("window.copied") == command
    browser.run(clipboard.format("undefined"))  # as where a page is not trusted
    browser.run(f"{button}.click()")
    until(browser, "!getSelection().isCollapsed")
    assert browser.run("String(getSelection())") == command
    assert browser.complaints() == []


def test_a_running_page_shows_the_next_iteration_at_the_same_place(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "RELOAD", 0.5)
    write_run(tmp_path, state="running")
    with held(tmp_path):
        browser.open(write_report(tmp_path), width=390)
        browser.run("document.querySelector('details').open = true; scrollTo(0, 700)")
        browser.run("document.querySelector('#browser .along button').click()")
        browser.run("scrollTo(0, 700)")
        JsonlTracker(tmp_path, resume=True).log(metrics(61, 1.0), 61)
        write_report(tmp_path)
        until(browser, "document.querySelector('.tiles')?.textContent.includes('61')")
        until(browser, "document.querySelector('details')?.open && Math.abs(scrollY - 700) < 2")
        assert browser.run("document.getElementById('stale').hidden")
        where = "document.querySelector('#browser output').textContent"
        assert browser.run(where) == "iteration 9 of 60", "where its reader was"
        text = (tmp_path / "report.html").read_text()
        long_ago = re.sub(r'data-written="\d+"', 'data-written="1000"', text)
        (tmp_path / "report.html").write_text(long_ago)  # its run was killed
        until(browser, "document.getElementById('stale')?.hidden === false")
        browser.run("getSelection().selectAllChildren(document.querySelector('.command'))")
        count = "setTimeout = (...how) => { window.waits = true; real(...how); }"
        browser.run(f"const real = setTimeout; {count}")
        write_report(tmp_path)
        until(browser, "window.waits")  # after 12 times 0.5 s: a stale page asks seldom
        assert not browser.run("getSelection().isCollapsed"), "who copies is not disturbed"
        browser.run("getSelection().empty()")
        assert browser.complaints() == []
    told = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps({**told, "state": "finished"}))
    write_report(tmp_path)
    until(browser, "document.querySelector('.state')?.textContent === 'finished'")
    browser.run("window.same = true")
    time.sleep(1.5)
    assert browser.run("window.same"), "a finished run's page stays as it is"
