"""mode=evaluate, export and chat on what runs left behind, against other ways to their numbers."""

import io
import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path
from statistics import fmean
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import families
from support.policies import make_policy, plain_log_probs
from support.runs import asked, do, lines

import train
from conf.compose import compose_checked, compose_experiment
from policies.files import write_manifest
from policies.load import load_reference
from policies.models.find import find_model
from trainer.checkpoint import FORMAT
from trainer.modes.chat import chat
from trainer.modes.evaluate import pass_at_k, tally
from trainer.modes.export import card, push
from trainer.modes.run_weights import Weights, choose_weights
from trainer.pages.__main__ import main as report
from trainer.runs.launch import prepare
from trainer.runs.run_files import Run, read_status, read_yaml

# Steps so large that the loss grows: the first checkpoint is the best.
LORA = (
    *("experiment=sft_tiny", "policy.lora.r=2", "policy.device=cpu", "optimizer.lr=0.3"),
    *("trainer.num_iterations=3", "trainer.prompts_per_iteration=4", "env.task.num_rows=40"),
    *("eval.num_samples=0", "eval.greedy=false", "eval.every=1"),
    *("checkpoint.every=1", "checkpoint.keep_best=true"),
)


def test_pass_at_k_is_the_share_of_picks_with_a_right_one():
    for samples in range(1, 7):
        for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            responses = [i < right for i in range(samples)]
            picks = list(itertools.combinations(responses, k))
            assert pass_at_k(samples, right, k) == pytest.approx(fmean(map(any, picks)))


def response(right: float, reward: float, length: int, kl: float, **more: float) -> dict:
    out = {"right": right, "eval/reward": reward, "response/length_mean": length}
    return out | {"response/truncated_fraction": length > 4, "eval/kl_ref_sequence": kl, **more}


def test_responses_are_summarized_by_hand():
    # four rows of two responses: both, none, one and one right; a fifth row was dropped
    responses = [response(r, r, 2, 0.5) for r in (1, 1, 0, 0, 1, 0)]
    responses += [
        {},
        {},
        response(1, 1.0, 4, 0.5, part=1.0),
        response(0, 0.5, 8, 4.5, part=math.nan),
    ]
    want = {"rows": 4, "samples": 2, "dropped_rows": 1, "standard_error": (0.5 / 3) ** 0.5 / 2}
    want |= {"eval/sampled_accuracy": 0.5, "eval/pass@1": 0.5, "eval/pass@2": 0.75}
    want |= {"eval/reward": 4.5 / 8, "eval/kl_ref_sequence": 8 / 8, "eval/kl_ref": 8 / 24}
    want |= {"response/length_mean": 24 / 8, "response/length_max": 8}
    want |= {"response/truncated_fraction": 1 / 8, "part": 1.0}  # where there is one
    assert tally(responses, 2, {"eval/sampled_accuracy": 0.5}) == pytest.approx(want)
    assert tally([{}, {}], 2, {}) == {"rows": 0, "dropped_rows": 1}


def test_an_evaluation_measures_what_the_run_did_after_training(small_run, tmp_path):
    words = ("mode=evaluate", f"resume={small_run.folder}", f"output_dir={tmp_path / 'out'}")
    before = (small_run.folder / "status.json").read_text()
    do(tmp_path / "scratch", *words)
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    last = lines(small_run.folder / "metrics.jsonl")[-1]
    by_run = {name: last[name] for name in last if name.startswith("eval/")}
    both = {**found["greedy"], **found["sampled"]}
    assert {name: both[name] for name in by_run} == pytest.approx(by_run)
    assert found["sampled"]["eval/kl_ref_sequence"] > 0.001
    assert (small_run.folder / "status.json").read_text() == before


def test_the_frontier_is_made_of_the_model_that_a_run_started_from(small_run, tmp_path):
    """As many responses as the run's own evaluation plays: the very ones, before any training."""
    folder = shutil.copytree(small_run.folder, tmp_path / "kl.coeff=0.1,seed='1'")  # as of a job
    report([str(folder), "--frontier", "2"])
    found, first = read_yaml(folder / "frontier.json"), lines(folder / "metrics.jsonl")[0]
    assert found["model"] == read_status(folder)["model"]["sha256"]
    right, rewards = (itertools.chain(*found[name]) for name in ("success", "reward"))
    assert first["eval/sampled_accuracy"] == pytest.approx(fmean(right))
    assert first["eval/reward"] == pytest.approx(fmean(rewards), abs=1e-6)


@pytest.mark.runs
def test_an_exported_model_is_the_merged_best_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, target = tmp_path / "run", tmp_path / "mine"
    prepare(compose_checked(LORA), run, compose=compose_experiment, worker=train.worker)
    train.train(OmegaConf.load(run / "config.yaml"), run)
    do(tmp_path / "scratch", "mode=export", f"resume={run}", f"output_dir={target}")
    kept = {p: read_yaml(p / "state.json") for p in sorted((run / "checkpoints").iterdir())}
    best = max(kept, key=lambda p: kept[p]["objective"])
    assert kept[best]["iteration"] < max(state["iteration"] for state in kept.values())
    model = AutoModelForCausalLM.from_pretrained(target).state_dict()
    start = AutoModelForCausalLM.from_pretrained(read_status(run)["model"]["name"])
    adapter = load_file(best / "adapter" / "adapter_model.safetensors")
    seen = 0
    for name, before in start.state_dict().items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        change = torch.zeros_like(before)
        if f"{key}.lora_A.weight" in adapter:
            product = adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
            change = 32 / 2 * product  # alpha / r
            seen += bool(change.any())
        torch.testing.assert_close(model[name], before + change)
    assert seen > 4
    assert AutoTokenizer.from_pretrained(target).chat_template
    assert (target / "README.md").exists()
    assert (target / "curves.svg").read_text().startswith("<svg")


def test_a_push_goes_to_a_private_repository(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.modes.export.HfApi", hub := MagicMock())
    push(tmp_path, "me/mine")
    assert hub().create_repo.call_args.kwargs["private"]
    assert hub().upload_folder.call_args.kwargs["folder_path"] == tmp_path


@pytest.mark.parametrize("started_from", ["config.yaml", "MANIFEST.json"])
def test_a_card_names_the_model_of_the_hub_and_no_folder_and_no_secret(tmp_path, started_from):
    """It started from the model of another run, or of a warm-up in the cache."""
    model, base = tmp_path / "a run" / "model", "Qwen/Qwen2.5-0.5B-Instruct"
    model.mkdir(parents=True)
    first = {"experiment": "sft_qwen", "policy": {"model": base}}
    first = {"about": {"config": first}} if started_from == "MANIFEST.json" else first
    (tmp_path / "a run" / started_from).write_text(json.dumps(first))
    config = {"api_key": "planted-1", "policy": {"model": str(model), "system_prompt": "{{so}}"}}
    config["env"] = {"dataset": str(tmp_path / "rows.jsonl")}
    metrics = [{"progress/iteration": i, "reward/mean": i / 4} for i in (1, 2, 3)]
    run = Run(tmp_path, {"model": {"sha256": "f00"}}, config, [], {}, metrics)
    page = card(run, Weights(tmp_path, "the best checkpoint", str(tmp_path), 2), name="mine")
    assert yaml.safe_load(page.split("---\n")[1])["base_model"] == base
    assert "| `reward/mean` | 0.250 | 0.500 |" in page, "from the first to that of the weights"
    assert "{{so}}" in page
    assert [text for text in (str(tmp_path), "planted-1") if text in page] == []


def make_checkpoint(folder: Path, iteration: int, objective: float | None) -> Path:
    path = folder / "checkpoints" / f"iteration_{iteration:06d}"
    (path / "model").mkdir(parents=True)
    state = {"format": FORMAT, "iteration": iteration, "objective": objective}
    (path / "state.json").write_text(json.dumps(state))
    for name in ("optimizer.safetensors", "model/model.safetensors"):
        (path / name).write_bytes(b"weights")
    write_manifest(path, {"format": FORMAT})
    return path


def test_the_weights_of_a_run_are_its_best_its_last_or_its_newest(tmp_path):
    with pytest.raises(ValueError, match="checkpoint"):
        choose_weights(tmp_path)
    first, second = make_checkpoint(tmp_path, 2, 0.5), make_checkpoint(tmp_path, 4, 0.25)
    third = make_checkpoint(tmp_path, 6, None)
    assert choose_weights(tmp_path).folder == third
    assert choose_weights(tmp_path, keep_best=True).folder == first
    (third / "state.json").write_text("{}")  # damaged
    assert choose_weights(tmp_path).folder == second
    (tmp_path / "model").mkdir()
    (tmp_path / "status.json").write_text('{"state": "running", "iteration": 6}')
    assert choose_weights(tmp_path).folder == second  # that model/ is of before it was prolonged
    (tmp_path / "status.json").write_text('{"state": "finished", "iteration": 6}')
    assert choose_weights(tmp_path).folder == tmp_path
    assert choose_weights(tmp_path, keep_best=True).folder == first
    for path in (first, second):
        (path / "state.json").write_text("{}")
    (tmp_path / "status.json").write_text('{"state": "failed"}')
    assert choose_weights(tmp_path).folder == tmp_path  # no checkpoint is whole, the model is


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Return a folder with a run of all weights and one of an adapter."""
    place = tmp_path_factory.mktemp("runs")
    for trained in families.TRAINED:
        families.run(find_model("tiny").folder, place / trained, trained)
    return place


@pytest.mark.runs
@pytest.mark.parametrize("damage", ["cut", "not finite", "lacks one"])
@pytest.mark.parametrize(
    ("trained", "mode"), [("all", "evaluate"), ("all", "chat"), ("all", "export"),
                          ("adapter", "export")],
)  # fmt: skip
def test_a_damaged_final_model_is_refused_and_moved_away_the_newest_checkpoint_is_taken(
    two_runs, trained, mode, damage, tmp_path, monkeypatch
):
    run = shutil.copytree(two_runs / trained, tmp_path / "run")
    places = {"all": "model.safetensors", "adapter": "adapter/adapter_model.safetensors"}
    path = run / "model" / places[trained]
    weights = {name: weight.clone() for name, weight in load_file(path).items()}
    with safe_open(path, "pt") as file:
        about = file.metadata()
    last = max(weights)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "not finite":
        weights[last].view(-1)[-1] = math.inf
        save_file(weights, path, metadata=about)
    else:
        del weights[last]
        save_file(weights, path, metadata=about)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    words = [f"mode={mode}", f"resume={run}"]
    words += [] if mode == "chat" else [f"output_dir={tmp_path / 'out'}"]
    words += ["eval.num_samples=1"] if mode == "evaluate" else []
    name = path.name if damage == "cut" else last.removeprefix("base_model.model.")
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        do(tmp_path / "scratch", *words)
    assert str(run / "model") in str(error.value)
    shutil.rmtree(run / "model")
    do(tmp_path / "scratch", *words)


def printed_by(policy, scorer, *typed: str) -> list[str]:
    out = io.StringIO()
    chat(policy, scorer, Console(file=out, width=500, highlight=False), typed)
    return out.getvalue().splitlines()


def test_a_chat_sets_the_policy_beside_its_reference():
    policy = make_policy.__wrapped__(temperature=0.0)
    reference = load_reference(policy).scorer
    alike = printed_by(policy, reference, "Sort 3", "again", "/reset", "Sort 3", "/quit", "never")
    assert alike[0] == alike[7]  # after /reset it is the first message again
    assert all("log-ratio +0.00 nats" in alike[i] for i in (1, 4, 8))
    assert len(alike) == 10
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(0.9)
    first = printed_by(policy, reference, "Sort 3")[1]
    asking = [{"role": "user", "content": "Sort 3"}]
    prompt = policy.renderer.render(asking, add_generation_prompt=True).ids
    options = {"max_new_tokens": policy.max_new_tokens, "pad_token_id": 0, "do_sample": False}
    attended = torch.ones(1, len(prompt))
    full = policy.model.generate(torch.tensor([prompt]), attention_mask=attended, **options)[0]
    mine, other = (plain_log_probs(m, full, 1.0)[len(prompt) :] for m in (policy, reference))
    ratio = float((mine - other).sum())
    assert abs(ratio) > 0.01
    assert f"log-ratio {ratio:+.2f} nats over {len(full) - len(prompt)} tokens" in first


def test_a_chat_answers_the_lines_of_stdin_by_the_weights_of_a_run(
    small_run, tmp_path, monkeypatch, capsys
):
    said = "Sort 3 1\n" + "long " * 9_000 + "\n\n/quit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    do(tmp_path / "scratch", "mode=chat", f"resume={small_run.folder}")
    text = capsys.readouterr().out
    model = read_status(small_run.folder)["iteration"]
    assert f"policy     the final model, iteration {model}, of {small_run.folder}" in text
    assert "which training started from" in text
    assert text.count("log-ratio") == 1, "of the one line that could be answered"
    assert "log-ratio +0.00" not in text, "it was trained"
    assert re.search(r"a row has 270\d\d tokens", text)
    assert sys.stdin.read() == "never\n"


REFUSED = [
    (["mode=chat", "kl.coeff=1"], r"kl\.coeff"),
    (["mode=evaluate", "eval.train_rows=7"], r"eval\.train_rows"),
    (["mode=export"], "output_dir"),
    (["mode=export", "output_dir=run"], "output_dir"),
    (["mode=frontier"], r"kl\.measure"),
    (["mode=chat"], "failed; finish it with resume=run"),
]


@pytest.mark.parametrize(("words", "key"), REFUSED)
def test_a_mode_refuses_other_keys_and_runs_without_weights(words, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "run" / "checkpoints" / "iteration_000001"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(compose_checked(LORA)))
    (tmp_path / "run" / "status.json").write_text('{"state": "failed"}')
    if "finish" in key:
        checkpoint.rmdir()
    with pytest.raises(ValueError, match=key):
        asked(["resume=run", *words])
