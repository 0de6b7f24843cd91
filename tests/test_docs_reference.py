"""What the reference pages say is what the code has: keys, defaults, messages, files."""

import ast
import importlib.util
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from refusals import refusal

import trainer
from conf.compose import compose_checked, compose_raw
from conf.hints import nearest, other_names
from conf.schema import declared, keys

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
GROUPS = [part for part in declared() if "=" not in part]
OPEN = (
    "env.task.",
    "env.rewards.",
    "env.transforms.",
    "policy.chat_template_kwargs.",
)  # what is below is anybody's


@cache
def maker():
    """Return docs/make_configuration.py as a module."""
    path = DOCS / "make_configuration.py"
    spec = importlib.util.spec_from_file_location("make_configuration", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def rows() -> dict[str, str]:
    """Return the first row of each key of docs/configuration.md."""
    found = re.findall(r"^(\| `([\w.]+)` \|.*)$", (DOCS / "configuration.md").read_text(), re.M)
    return {key: row for row, key in reversed(found)}


def cells(page: Path) -> list[str]:
    """Return the middle cells of the tables of a page: the leash column."""
    table = re.findall(r"^\| [^|]+ \| ([^|]+) \|", page.read_text(), re.M)
    return [cell for cell in table if cell != "leash"]


def test_the_configuration_page_is_of_this_code() -> None:
    stale = maker().page() != (DOCS / "configuration.md").read_text()
    assert not stale, "docs/configuration.md is stale; run: python docs/make_configuration.py"


NO_PEERS = ("common words", "algorithms of others", "leash of before")
PEERS = [library for library in other_names() if library not in NO_PEERS]


def entries(library: str) -> dict[str, tuple[Any, str]]:
    """Return what each name of a library means, with the file that says so."""
    files = {file: names for file, names in other_names()[library].items() if file != "page"}
    return {name: (names[name], file) for file, names in files.items() for name in names}


@pytest.mark.parametrize("library", other_names())
def test_every_name_of_others_has_a_source_and_a_counterpart_that_exists(library) -> None:
    known = rows().keys() | {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
    assert library in NO_PEERS or re.search(r" [\da-f.]{5,}$", library)
    for name, (means, file) in entries(library).items():
        assert re.search(r"\w/\w+\.(py|yaml)$", file), f"{library}: {file}"
        choices = [word for word in means.values() if word] if isinstance(means, dict) else []
        plain = "" if choices else means.partition("; ")[0].partition(" = ")[0]
        for key in plain.split():
            assert key in known or hasattr(trainer, key.partition(".")[2]), key
        for choice in choices:
            assert composes((choice,) if "{" in choice else tuple(choice.split())), name
        assert nearest(f"somewhere.{name}").count(name.rpartition(".")[2]), name


@pytest.mark.parametrize("library", PEERS)
def test_the_names_of_others_are_those_of_their_page(library) -> None:
    pairs = set()
    page = (ROOT / other_names()[library]["page"]).read_text()
    for theirs, ours in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", page, re.M):
        here = {word.partition("=")[0] for span in spans(ours) for word in span.split()}
        pairs |= {(span.partition("=")[0], key) for span in spans(theirs) for key in here or {""}}
    assert len(entries(library)) > 1
    assert library.partition(" ")[2] in page or library.startswith("transformers")
    for name, (means, _) in entries(library).items():
        named = {ours for theirs, ours in pairs if f".{theirs}".endswith(f".{name}")}
        plain = means if isinstance(means, str) else " ".join(filter(None, means.values()))
        keys_of_ours = {w.partition("=")[0] for w in plain.partition("; ")[0].split()[:1]}
        assert named, f"{library}: {name}"
        assert not keys_of_ours or keys_of_ours & named, f"{library}: {name}: {named}"


def test_numbers_of_others_are_computed_and_both_meanings_are_told() -> None:
    """By hand: 64 prompts of 8 replies, split as each peer counts."""
    ours = {"trainer.prompts_per_iteration": 64, "algorithm.group_size": 8, "algorithm.epochs": 2}
    ours |= {"trainer.num_iterations": 100}

    def told(word: str) -> str:
        name, _, value = word.partition("=")
        number = {"true": True, "false": False}.get(value, value)
        return nearest(name, number, look_up=(ours | {"algorithm.minibatches": 4}).get)

    assert "algorithm.minibatches=4 here" in told("ppo_mini_batch_size=16")  # prompts
    assert "algorithm.minibatches=4 here" in told("train.batch_size=128")  # replies
    assert "algorithm.minibatches=8 here" in told("train_global_batch_size=64")
    assert "trainer.prompts_per_iteration=32 here" in told("generation_batch_size=256")
    assert "trainer.num_iterations=10 here" in told("max_steps=80")
    assert "kl.refresh_decay=0.4 here" in told("ref_model_mixup_alpha=0.6")
    assert "algorithm.minibatches here" in told("ppo_mini_batch_size=48"), "no whole number"
    assert "algorithm.minibatches=" not in told("ppo_mini_batch_size=48")
    assert "algorithm.minibatches" not in told("gradient_accumulation_steps=4")
    assert "trainer.prompts_per_iteration here" in told("gradient_accumulation_steps=4")
    assert "mean trainer.num_iterations?" in told("num_iterations=2")
    assert "num_iterations=2 is algorithm.epochs=2 here" in told("num_iterations=2")
    assert "algorithm.clip_low=0.3 algorithm.clip_high=0.3 here" in told("epsilon=0.3")
    assert "loss_type=dr_grpo is algorithm.aggregation=constant" in told("loss_type=dr_grpo")
    assert "loss_type=vespo is missing here" in told("loss_type=vespo")
    assert "use_vllm: the policy itself generates" in told("use_vllm=true")
    assert "policy.chat_template_kwargs here" in told("chat_template_kwargs.enable_thinking=false")
    assert "bf16=true is policy.autocast=bfloat16 here" in told("bf16=true")
    assert "warmup_ratio=0.1 is optimizer.warmup=80 here" in told("warmup_ratio=0.1")
    assert "optimizer.warmup=100 here" in told("warmup_steps=100")
    assert "optimizer.warmup=" not in told("warmup_steps=0.1"), "a share of all steps"
    assert "save_strategy=no is checkpoint.every=0 here" in told("save_strategy=no")
    both = told("train_batch_size=128")  # verl's are prompts, those of OpenRLHF replies
    assert "trainer.prompts_per_iteration=128 here" in both
    assert "OpenRLHF's train_batch_size=128 is algorithm.minibatches=4 here" in both
    assert "counts prompts" in told("batch_size=8")


def test_the_algorithms_of_others_are_answered_with_words_that_run(tmp_path) -> None:
    """DPO is not DAPO misspelt; each remedy is composed on pairs of replies."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (DOCS / "algorithms.md").read_text()
    named = other_names()["algorithms of others"]["conf/algorithm/grpo.yaml"]
    assert len(named) > 25
    for name in named:
        word = name.partition("=")[2].upper().replace("_", "-")
        told = refusal(f"algorithm={word}")
        assert told.startswith(f"algorithm={word}: "), told
        assert "did you mean" not in told
        assert f"`{name.partition('=')[2]}`" in page
        remedies = re.findall(r"(?:[a-z_.]+=[\w.]+ ?)+", told.partition(": ")[2])
        assert remedies, told
        for remedy in remedies:
            assert composes((*remedy.split(), *beside(remedy, path))), remedy
    assert refusal("experiment=dpo_qwen").startswith("experiment=dpo_qwen: leash has no such loss")
    assert "did you mean algorithm=dr_grpo" in refusal("algorithm=drgrpo")
    assert "did you mean algorithm=ppo?" in refusal("algorithm=PPO")


def beside(remedy: str, pairs: Path) -> list[str]:
    """Return what a user adds to a remedy: data, and what goes with SFT and reward models."""
    words = [f"env.dataset={pairs}"] * bool(re.search("=sft_own|=rm_tiny", remedy))
    words += ["env.task.reward_model=experiment:rm_tiny"] * ("env=learnt_reward" in remedy)
    if re.search("algorithm=(sft|reward)", remedy):
        words += ["env=preferences", "kl.coeff=0", "kl.measure=false"]
        words += ["eval.num_samples=0", "eval.greedy=false"]
    return words


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def composes(words: tuple[str, ...]) -> bool:
    try:
        return bool(compose_checked(words))
    except ValueError as error:  # what it says of a package may be so
        return "needs its package" in str(error)


@pytest.mark.parametrize("name", ["coming_from_trl", "coming_from_verl"])
def test_every_key_that_takes_the_place_of_another_exists(name) -> None:
    spans = {s for cell in cells(DOCS / f"{name}.md") for s in re.findall(r"`([^`]+)`", cell)}
    words = [span for span in spans if "=" in span]
    named = [span for span in spans if re.fullmatch(r"[a-z_]+\.[a-z_.]+", span)]
    assert len(words) > 15
    assert len(named) > 30
    assert not [key for key in named if key not in rows()]
    for span in words:
        if re.fullmatch(r"\w+=\w+", span):
            continue  # a file, see the last test
        whole = [span] if "{" in span else shlex.split(span)
        assert composes(tuple(whole))


@pytest.mark.parametrize("name", ["coming_from_trl", "coming_from_verl"])
def test_the_defaults_named_for_leash_are_those_of_its_files(name) -> None:
    text = "\n".join(cells(DOCS / f"{name}.md"))
    found = re.findall(r"`([a-z]+\.[a-z_.]+)` \(`?([\w.-]+)`?\)", text)
    assert len(found) > 12
    for key, value in found:
        assert value in defaults(key), f"{key} is {defaults(key)}, not {value}"


@cache
def files() -> list[DictConfig]:
    """Return what the files of conf/ say without any experiment, for three kinds of algorithms."""
    words = ([], ["algorithm=ppo"], ["algorithm=sft"])
    return [compose_raw(["~experiment", *word]) for word in words]


def defaults(key: str) -> set[str]:
    """Return what the files of a key's group give it."""
    values = [OmegaConf.select(config, key) for config in files()]
    plain = {f"{v:g}" if isinstance(v, float) else str(v).lower() for v in values}
    return plain | {str(value) for value in values}


@cache
def said() -> list[str]:
    """Return every text of the code, with a NUL in place of what is filled in."""
    texts = []
    for path in [ROOT / "train.py", *(p for d in ("conf", "policies", "envs", "trainer") for p in
                 sorted((ROOT / d).rglob("*.py")))]:  # fmt: skip
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                texts.append("".join(p if isinstance(p, str) else "\0" for p in parts))
    rules = yaml.safe_load((ROOT / "trainer" / "reports" / "diagnosis.yaml").read_text())
    texts += [re.sub(r"\{[^}]*\}", "\0", rule["text"]) for rule in rules.values()]
    return texts


def test_quoted_messages_are_those_of_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    lines = "".join(re.findall(r"```\n(.*?)```", page, re.S)).splitlines()
    lines = [re.sub(r"^(error|warning|note)( at iteration \.\.\.)?: ", "", x) for x in lines if x]
    assert len(lines) > 30
    for line in lines:
        pieces = [piece for piece in re.split(r"\.\.\.|; ", line) if len(piece.strip()) > 7]
        assert pieces, line
        for piece in pieces:
            assert any(piece.strip(" :()'") in text for text in said()), f"{line}: {piece!r}"


def test_the_index_names_every_page_and_script() -> None:
    index = (DOCS / "README.md").read_text()
    names = {path.name for path in DOCS.iterdir() if path.suffix in (".md", ".py")} - {"README.md"}
    listed = set(re.findall(r"\]\((\w+\.(?:md|py))\)", index))
    assert names == listed, f"docs/README.md: {names ^ listed}"


def test_links_lead_to_headings() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
            text = (page.parent / target if target else page).read_text()
            titles = re.findall(r"^#+ (.*)$", text, re.M)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_and_files_named_anywhere_exist(page) -> None:
    text = page.read_text()
    if page.stem in ("coming_from_trl", "coming_from_verl"):
        text = re.sub(r"^\| [^|]+ \|", "|", text, flags=re.M)  # theirs
    for key in re.findall(rf"`((?:{'|'.join(GROUPS)})\.[a-z_.]+[a-z_])(?==|`| )", text):
        if (
            key == "eval.json"
            or key.startswith(OPEN)
            or (ROOT / f"{key.replace('.', '/')}.py").exists()
        ):
            continue
        python = key.startswith("trainer.") and hasattr(trainer, key.partition(".")[2])
        called = key in ("env.reset", "env.step")
        whole = any(name.startswith(f"{key}.") for name in rows())
        known = key in rows() or key.removesuffix("._target_") in rows()
        assert known or python or called or whole, f"{page.name}: {key}"
    for key, value in re.findall(rf"[` ]((?:{'|'.join(GROUPS)}|experiment)[a-z_.]*)=(\w+)", text):
        if (ROOT / "conf" / key).is_dir() and (key, value) != ("env", "brief"):
            assert (ROOT / "conf" / key / f"{value}.yaml").exists(), f"{page.name}: {key}={value}"
        elif among := [c for k in keys().get(key, {}).values() for c in k.among or ()]:
            assert value in map(str, among), f"{page.name}: {key}={value}"
    folders = "conf|policies|envs|trainer|tests|docs|benchmarks"
    for name in re.findall(rf"`((?:{folders})/[\w/]+\.(?:py|yaml|md|json|svg))", text):
        made = "conf/env/brief.yaml"  # by the reader
        assert name == made or (ROOT / name).exists(), f"{page.name}: {name}"
