"""What README and docs promise: commands compose, Python runs, links lead somewhere."""

import gzip
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from support.pages import documented_metrics
from support.runs import ROOT, asked, lines, train_here

import trainer
from conf import schema
from conf.build import make_task
from conf.cli import expand
from conf.compose import compose, compose_checked
from conf.schema import all_keys
from conf.unknown_names import other_names
from envs.tasks import Response
from policies.load import load_policy

DOCS = ROOT / "docs"
TRL = "docs/coming_from_trl.md"
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "SECURITY")]
PAGES += sorted(DOCS.glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES).replace("\\\n", " ")
ELSEWHERE = {"env=verifiers", "env=brief"}  # need a package, or a file of the page
OPEN = ("env.task.", "env.rewards.", "env.transforms.", "policy.chat_template_kwargs.")
OPEN += ("policy.engine.", "env.columns.")
FILES = [
    (str(path.parent.relative_to(ROOT / "conf")), path)
    for path in (ROOT / "conf").rglob("*/*.yaml")
]
RUN = "outputs/grpo_tiny/2026-01-01_00-00-00"


def found(pattern: str) -> list[str]:
    return sorted({match.strip() for match in re.findall(pattern, TEXT, re.M)})


def script(name: str) -> ModuleType:
    """Return a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block(language: str, number: int = 0, *, page: str = "docs/own_task.md") -> str:
    """Return a block of code of a page."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)[number]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Go to a folder with what the pages speak of: data, a model, code, a finished run."""
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(4)]
    said = {"role": "assistant", "content": "a"}
    chats = [{"messages": [{"role": "user", "content": f"Say {i}."}, said]} for i in "abc"]
    pairs = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
    alone = [{"prompt": row["question"], "domain": "math"} for row in rows]
    texts = {"problems": rows, "my": rows, "chats": chats, "pairs": pairs, "prompts": alone}
    texts = {f"{name}.jsonl": "\n".join(map(json.dumps, each)) for name, each in texts.items()}
    config = compose_checked(["experiment=grpo_tiny", "policy.model=tiny"])
    texts |= {
        "sums.jsonl": block("json", page=TRL),
        "my_tasks.py": block("python"),
        "my_rewards.py": block("python", page=TRL),
        "model/config.json": "{}",
        f"{RUN}/config.yaml": yaml.safe_dump(config),
        f"{RUN}/status.json": '{"state": "finished", "iteration": 80}',
        f"{RUN}/metrics.jsonl": '{"progress/iteration": 1, "reward/mean": 1.0}\n',
    }
    for name in ("model", *(f"{RUN}/{x}" for x in (".hydra", "model", "checkpoints/iteration_80"))):
        (tmp_path / name).mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_tasks", "my_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


COMMANDS = found(r"python train\.py(?: (?:[^\n`|#(]|(?<=\w)\()*)?")


def words_of(command: str, program: str = "train.py") -> list[str]:
    """Return a command's words behind its program, less what a page explains beside it."""
    text = re.split(r" {2,}", command.partition(program)[2].strip())[0]
    return shlex.split(re.sub(r"<[\w ]+>", "when", text))


def last_job(words: list[str]) -> list[str]:
    """Return the overrides of the last job of a sweep, as Hydra's basic sweeper makes them."""
    files = [word for word in words if word.startswith("experiment=")]
    params = compose(files, with_hydra=True).hydra.sweeper.get("params") or {}
    every = [*(f"{key}={value}" for key, value in params.items()), *words]
    return BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(every), None)[0][
        -1
    ]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--config-dir" not in c])
def test_a_command_passes_all_checks(command, place):
    for name in ("/path/to/model", "/path/to/teacher", "outputs/sft/model"):
        command = command.replace(name, str(place / "model"))
    words = expand(
        [re.sub("^resume=(?!(last|auto)$).*", f"resume={RUN}", w) for w in words_of(command)]
    )
    overrides = [w for w in words if "=" in w and not w.startswith("-") and "..." not in w]
    if ELSEWHERE & {*overrides} or overrides[-1:] == ["policy/engine=vllm"]:
        return
    if "resume=" in command:
        config = asked(overrides)
        assert f"mode={config['mode']}" in [*overrides, "mode=train"]
        assert config["resume"] == (None if "resume=auto" in words else RUN)
    else:
        job = last_job(overrides) if "-m" in words else overrides
        assert compose_checked(job)["trainer"]["num_iterations"] >= 1


@pytest.mark.parametrize("command", found(r"torchrun --[^\n`|(#]*train\.py[^\n`|(#]*"))
def test_a_command_of_a_launcher_composes(command):
    ranks = re.findall(r"nproc[-_]per[-_]node[ =](\d+)", command)[0]
    assert compose_checked([*words_of(command), f"launch.num_processes={ranks}"])


def test_modules_scripts_targets_and_extras_are_there():
    for module in found(r"python -m ([\w.]+)"):
        assert module.startswith("vllm.") or importlib.util.find_spec(module), module
    for name in found(r"python (docs/\S+\.py|tests/\S+\.py|benchmarks/\S+\.py)"):
        assert (ROOT / name).is_file(), name
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    named = {*found(r"`make ([a-z-]+)[ `]"), *found(r"^make ([a-z-]+)\b(?=$| {2}| ARGS)")}
    assert {"setup", "run", "test"} <= named <= {*targets}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in found(r"pip install -e '\.\[([\w,]+)\]'"):
        assert {*extras.split(",")} <= {*project["optional-dependencies"]}


def test_links_lead_to_files_and_headings():
    for page in PAGES:
        for target, _, anchor in re.findall(r"\]\((?!http)([^)#]*)(#([^)]+))?\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name} links to {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
                slugs = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
                assert anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_the_configuration_page_is_of_this_code():
    stale = script("make_configuration").page() != (DOCS / "configuration.md").read_text()
    assert not stale, "docs/configuration.md is stale; run: python docs/make_configuration.py"


@cache
def known_keys() -> set[str]:
    """Return the keys of docs/configuration.md and the sections that they are in."""
    keys = re.findall(r"^\| `([\w.]+)` \|", (DOCS / "configuration.md").read_text(), re.M)
    parts = {key.rpartition(".")[0] for key in keys}
    return {*keys, *parts, "env.reset", "env.step", "eval.json"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_and_files_that_a_page_names_exist(page):
    text = page.read_text()
    if page.stem in ("coming_from_trl", "coming_from_verl"):
        text = re.sub(r"^\| [^|]+ \|", "|", text, flags=re.M)  # theirs
    groups = "|".join(part for part in schema.declared() if "=" not in part)
    for key in re.findall(rf"`((?:{groups})\.[a-z_.]+[a-z_])(?==|`| )", text):
        python = key.startswith("trainer.") and hasattr(trainer, key.partition(".")[2])
        file = (ROOT / f"{key.replace('.', '/')}.py").exists()
        known = key.removesuffix("._target_") in known_keys() or key.startswith(OPEN)
        assert known or python or file, f"{page.name}: {key}"
    for group, name in re.findall(rf"[` ]({groups}|experiment)=(\w+)", text):
        if (group, name) != ("env", "brief") and f"experiment={name}" != "experiment=mine":
            assert (ROOT / "conf" / group / f"{name}.yaml").exists(), f"{page.name}: {name}"
    folders = "conf|policies|envs|trainer|tests|docs|benchmarks"
    for name in re.findall(rf"`((?:{folders})/[\w/]+\.(?:py|yaml|md|json|svg))", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


HINTS = [(page, name) for page, names in other_names().items() for name in names]


@pytest.mark.parametrize(("page", "name"), HINTS)
def test_a_hint_says_what_the_row_of_its_page_says(page, name):
    means, text = other_names()[page][name], (ROOT / page).read_text()
    assert name not in all_keys()
    known = all_keys() | {f"{part}={path.stem}": 0 for part, path in FILES}
    entries = means.values() if isinstance(means, dict) else filter(None, [means])
    words = {
        word for entry in entries for word in re.findall(r"[a-z_/]+[.=][\w.=]+|resume$", entry)
    }
    for word in words:
        known_key = word.partition("=")[0] in known or word.startswith(OPEN)
        assert word in known or known_key, word
    cells = re.findall(rf"(?m)^\|([^|]*`[^`|]*\b{re.escape(name)}\b[^|]*)\|(.*)\|$", text)
    if page != "docs/configuration.md":
        assert re.search(rf"\b{re.escape(name)}\b", text)
        row = " ".join(cell for _, cell in cells)
        assert not words or any(word in row for word in words)
        assert all(word in text for word in words)


def test_the_page_of_metrics_has_what_a_run_logs(small_run):
    logged = {name for line in lines(small_run.folder / "metrics.jsonl") for name in line}
    known = "|".join(re.sub("<.*?>", r"[\\w.-]+", re.escape(n)) for n in documented_metrics())
    assert len(logged) > 30
    assert not [name for name in logged if not re.fullmatch(known, name)]


@pytest.mark.runs
def test_the_script_by_hand_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rewards = script("by_hand").train(load_policy("tiny", max_new_tokens=9), iterations=16)
    assert sum(rewards[-4:]) > 2 * sum(rewards[:4]) > 0


def test_own_task_page_makes_rows_and_shows_what_a_try_prints(place, capsys):
    (place / "my.jsonl").unlink()  # the page writes it
    subprocess.run(["bash", "-euc", block("bash")], check=True)
    exec(block("python", 1), {})
    assert capsys.readouterr().out == block("text")
    words = shlex.split(block("bash", 2))[2:]
    assert make_task(compose_checked(words)["env"]).rows("train")


def test_own_task_page_adds_a_reward(place):
    with (place / "my_tasks.py").open("a") as file:
        file.write('def polite(row, response): return float("please" in response.text)')
    (place / "configs" / "env").mkdir(parents=True)
    (place / "configs" / "env" / "brief.yaml").write_text(block("yaml") + block("yaml", 1))
    words = [f"hydra.searchpath=[file://{place}/configs]", "env=brief", "allow_targets=true"]
    task = make_task(compose_checked(words)["env"])
    row = task.rows("eval")[0]
    for text, total in (("please", 0.2 + 0.2), (row["answer"], 1.0)):
        assert task.reward(row, Response(text, True, [])).total == pytest.approx(total)


def test_trl_page_takes_data_and_function_as_they_are(place):
    command = block("bash", page=TRL).replace("\\\n", " ")
    task = make_task(compose_checked(shlex.split(command)[2:])["env"])
    rows = [*task.rows("train"), *task.rows("eval")]
    assert {row["messages"][0]["content"] for row in rows} == {"What is 2 + 2?", "What is 3 * 4?"}
    texts = [row["columns"]["answer"] for row in rows]
    rewards = task.rewards(
        rows * 2, [Response(f"It is {t}.", True, []) for t in [*texts, "7", "7"]]
    )
    assert [(r.total, r.success) for r in rewards] == [(1, True)] * 2 + [(0, False)] * 2


def test_environments_page_runs_as_it_stands():
    code = re.findall(r"^```python\n(.*?)^```", (DOCS / "environments.md").read_text(), re.S | re.M)
    exec(compile("\n".join(code), "docs/environments.md", "exec"), {})


@pytest.mark.runs
def test_debug_page_has_parts_that_train(place, capsys):
    page = "docs/debug.md"
    code = block("python", page=page)
    assert code.count("\n") <= 50
    (place / "my_parts.py").write_text(code)
    (place / "own" / "experiment").mkdir(parents=True)
    (place / "own" / "experiment" / "mine.yaml").write_text(block("yaml", page=page))
    words = [f"hydra.searchpath=[file://{place}/own]", "experiment=mine", "policy.model=tiny"]
    words += ["trainer.num_iterations=2", "eval.max_rows=4", "trainer.profile=[2]"]
    rows = train_here(place / "run", *words)
    assert [row["length/price"] > 0 for row in rows[1:]] == [False, True]
    assert rows[2]["reward_part/length"] < 0
    trace = place / "run" / "profile" / "iteration_2.json.gz"
    assert "traceEvents" in json.loads(gzip.decompress(trace.read_bytes()))
    assert "1 0.0" in capsys.readouterr().out


def test_the_notebook_runs(tmp_path, monkeypatch, small_run):
    """In a real kernel."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jupyter's own packages
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.read(DOCS / "notebook.ipynb", 4)
        assert not re.search(r"/tmp/|/root/|/home/", str(notebook))
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.outputs = []
            cell.source = cell.source.replace('num_iterations": 24', 'num_iterations": 3')
            cell.source = cell.source.replace('num_samples": 4', 'num_samples": 1')
        place = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    (run,) = Path(tmp_path, "outputs", "grpo_own").iterdir()
    assert [row["progress/iteration"] for row in lines(run / "metrics.jsonl")] == [0, 1, 2, 3]
