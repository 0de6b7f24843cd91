"""Write sweep.html and sweep.csv, which are updated while a sweep runs."""

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from policies.files import write_text
from trainer.kl.frontier import ACCURACY, EVAL_REWARD, Frontier
from trainer.pages.chart import Series, line_chart, standalone
from trainer.pages.formats import duration
from trainer.pages.frontier_chart import AVERAGED, draw_sweep
from trainer.pages.page import PATIENCE, write_page
from trainer.pages.panels import MAIN, Figure, open_notes
from trainer.pages.responses import TranscriptRow, by_kind, side_by_side
from trainer.pages.summary import repeat_command
from trainer.pages.sweep_jobs import (
    REWARD,
    Job,
    Setting,
    Sweep,
    as_csv,
    best,
    comparable,
    count_states,
    find_sweep_frontier,
    gather,
    grouped,
    load_sweep,
    task_reward,
    varying,
)
from trainer.runs.run_files import read_lines

# A run's sweep metric is the first of these that it logs.
OBJECTIVES = (ACCURACY, "eval/greedy_accuracy", "reward/mean", "loss/total")
PROMPTS, SETTINGS = 8, 6  # largest table of responses side by side
READ = 2**20  # bytes to read of a file, at its start (before training) and its end (after)

Links = dict[str, dict[str, str]]  # text and page of each job


def write_sweep(folder: str | Path) -> Path:
    """Write sweep.csv and sweep.html into a multirun folder; return the path of the page."""
    sweep = load_sweep(folder)
    write_text(sweep.folder / "sweep.csv", as_csv(sweep.jobs))
    path = sweep.folder / "sweep.html"
    patience = PATIENCE if sweep.live else None
    write_page(path, "sweep.html.j2", patience=patience, **_values(sweep))
    return path


def write_comparison(folders: Sequence[Path]) -> Path:
    """Write compare.html, the sweep page of any runs, into the current folder."""
    path, words = Path("compare.html"), shlex.join(map(str, folders))
    texts = {"heading": "Comparison of runs", "rewrite": f"python -m trainer.pages {words}"}
    write_page(path, "sweep.html.j2", **_values(gather(folders)) | texts)
    return path


def sweep_svg(folder: str | Path) -> str:
    """Draw the frontier of a multirun folder as a standalone SVG document."""
    sweep = load_sweep(folder)
    frontier = find_sweep_frontier(sweep)
    by = frontier.metric if frontier else REWARD
    picture = draw_sweep(sweep.jobs, width=480, height=340, by=by, frontier=frontier)
    return standalone([[picture]], width=480, height=340)


def _values(sweep: Sweep) -> dict[str, Any]:
    """Return the values of the template."""
    jobs, settings, keys = sweep.jobs, grouped(sweep.jobs), varying(sweep.jobs)
    frontier, top = find_sweep_frontier(sweep), best(jobs)
    winner = top.finished[0].run if top else None
    begun = [setting for setting in settings if any(job.run.metrics for job in setting.jobs)]
    links = {job.name: {"text": job.label(keys), "page": _page(job, sweep)} for job in jobs}
    warned: dict[tuple[str, str], list[dict[str, str]]] = {}
    for job in jobs:
        notes = [(note["level"], note["title"]) for note in open_notes(job.run)]
        if job.state == "failed":
            notes.append(("error", job.run.status.get("reason") or "failed"))
        for note in notes:
            warned.setdefault(note, []).append(links[job.name])
    return {
        "title": "sweep",
        "heading": f"Sweep of {jobs[0].run.experiment if jobs else sweep.folder.name}",
        "sweep": sweep,
        "progress": _progress(sweep),
        "rewrite": f"python -m trainer.pages {shlex.quote(str(sweep.folder.resolve()))}",
        "best": top,
        "again": repeat_command(winner) if winner else "",
        "objective": next((m for m in OBJECTIVES if winner and winner.series(m)), ""),
        "averaged": AVERAGED,
        "pictures": _pictures(settings, jobs, frontier),
        "frontier": frontier,
        "tables": _tables(jobs, settings, links),
        "warnings": [(*key, warned[key]) for key in sorted(warned)],
        "curves": list(_overlays(begun, keys)),
        "names": [setting.name for setting in begun],
        "responses": _responses(begun),
    }


def _pictures(
    settings: Sequence[Setting], jobs: Sequence[Job], frontier: Frontier | None
) -> list[str]:
    """Draw reward and held-out metrics against KL, first the metrics with a frontier."""
    metrics = [ACCURACY, EVAL_REWARD, REWARD] if frontier else [REWARD, ACCURACY, EVAL_REWARD]
    known = (metric for metric in metrics if any(s.spots(metric) for s in settings))
    return [draw_sweep(jobs, width=380, height=320, by=m, frontier=frontier) for m in known]


def _progress(sweep: Sweep) -> str:
    """Return the number of jobs by state, and the time left."""
    states = [count_states(sorted(job.state for job in sweep.jobs))] if sweep.jobs else []
    if sweep.left:
        states.append(f"{sweep.left} {'to come' if sweep.live else 'not begun'}")
    line = f"{len(sweep.jobs) + sweep.left} jobs: {', '.join(states)}"
    took = [(job.state, job.run.status.get("seconds", 0.0)) for job in sweep.jobs]
    if sweep.live and (done := [seconds for state, seconds in took if state == "finished"]):
        running = [seconds for state, seconds in took if state == "running"]
        rest = sum(max(fmean(done) - seconds, 0.0) for seconds in running)
        line += f"; about {duration(fmean(done) * sweep.left + rest)} left"
    return line


def _page(job: Job, sweep: Sweep) -> str:
    """Return the address of a job's page, "" if it has none yet."""
    page = job.run.folder / "report.html"
    return quote(os.path.relpath(page, sweep.folder)) if page.is_file() else ""


def _tables(jobs: Sequence[Job], settings: Sequence[Setting], links: Links) -> list[dict[str, Any]]:
    """Return a table of settings, if one has several jobs, and a table of jobs."""
    keys, single = varying(jobs), [Setting(job.name, "", [job]) for job in jobs]
    tables = [_table(single, keys, links)] if jobs else []
    if len(settings) < len(jobs):
        tables.insert(0, _table(settings, [key for key in keys if key != "seed"], links))
    return tables


def _table(settings: Sequence[Setting], keys: Sequence[str], links: Links) -> dict[str, Any]:
    """Return columns and rows that differ between settings, and the values that do not."""
    first = {key: [s.jobs[0].overrides.get(key, "-") for s in settings] for key in keys}
    columns, same = first or {"job": [setting.name for setting in settings]}, {}
    for title in settings[0].jobs[0].reached:
        cells = [setting.cell(title) for setting in settings]
        if len(set(cells)) == 1 < len(cells):
            same |= {title: cells[0]} if cells[0] else {}
        elif cells not in columns.values() and title.replace("/", ".") not in columns:
            columns[title] = cells  # kl/coeff only if kl.coeff has no column
    rows = [
        [{"text": name, "page": links[s.jobs[0].name]["page"] if len(s.jobs) == 1 else ""}, *cells]
        for s, (name, *cells) in zip(settings, zip(*columns.values(), strict=True), strict=True)
    ]
    return {"columns": [*columns], "rows": rows, "same": same}


def _overlays(begun: Sequence[Setting], keys: Sequence[str]) -> Iterator[Figure]:
    """Draw the curves of all jobs in one chart; the seeds of a setting share a hue."""
    for panel in (panel for panel in MAIN if panel.swept):
        series = []
        for hue, job in ((hue, job) for hue, setting in enumerate(begun) for job in setting.jobs):
            name = task_reward(job.run) if panel.swept == REWARD else panel.swept
            if points := job.run.series(name):
                series.append(Series(job.label(keys), points, hue, name.startswith("eval/")))
        if series:
            which = f", {panel.metrics[panel.swept]}" if len(panel.metrics) > 1 else ""
            how = {"title": panel.title, "unit": panel.unit + which, "named": False}
            chart = line_chart(series, least=panel.least, **how)
            yield Figure(chart, f"healthy: {panel.healthy}", [panel.swept])


def _responses(settings: Sequence[Setting]) -> list[dict[str, TranscriptRow]]:
    """Return responses to the same held-out prompts: before training, then by coefficient."""
    before: dict[str, TranscriptRow] = {}
    columns: dict[str, dict[str, TranscriptRow]] = {}
    for setting in sorted(settings, key=lambda s: s.mean("kl/coeff") or 0.0):
        rows = read_lines(setting.jobs[0].run.folder / "transcripts.jsonl", most=READ)
        kinds = by_kind(rows)
        columns |= {setting.name: kinds["after"]} if "after" in kinds else {}
        before = before or kinds.get("before", {})
    columns = dict([*columns.items()][:: math.ceil(len(columns) / SETTINGS) or 1])
    if before and comparable([job for setting in settings for job in setting.jobs]):
        columns = {"before training": before, **columns}
    return side_by_side(columns, PROMPTS)
