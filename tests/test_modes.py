"""mode=evaluate, export and chat on what runs left behind, against other ways to their numbers."""

import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from contracts import make_policy
from omegaconf import OmegaConf
from pages import Page
from rich.console import Console
from runs import ROOT, asked, do, environment, lines
from safetensors.torch import load_file

import train
from conf.compose import compose_checked, compose_experiment
from conf.modes import MAY
from policies.cache import write_manifest
from policies.load import load_reference
from trainer.modes.chat import chat
from trainer.modes.evaluate import pass_at_k, tally
from trainer.modes.export import card, push
from trainer.modes.run_weights import Weights, choose_weights
from trainer.reports.__main__ import main as report
from trainer.reports.report import write_report
from trainer.runs.folders import quoted
from trainer.runs.launch import prepare
from trainer.runs.lock import held
from trainer.runs.run_files import Run, read_status, read_yaml

# Steps so large that the loss grows: the first checkpoint is the best.
LORA = (
    *("experiment=sft_tiny", "policy.lora.r=2", "policy.device=cpu", "optimizer.lr=0.3"),
    *("trainer.num_iterations=3", "trainer.prompts_per_iteration=4", "env.task.num_rows=40"),
    *("eval.num_samples=0", "eval.greedy=false", "eval.every=1"),
    *("checkpoint.every=1", "checkpoint.keep_best=true"),
)


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory) -> Path:
    """Train an adapter for three iterations, with a checkpoint each and the best one kept."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    prepare(compose_checked(LORA), folder, compose=compose_experiment)
    train.train(OmegaConf.load(folder / "config.yaml"), folder)
    return folder


def test_pass_at_k_is_the_share_of_picks_with_a_right_one():
    for samples in range(1, 7):
        for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            replies = [i < right for i in range(samples)]
            picks = list(itertools.combinations(replies, k))
            assert pass_at_k(samples, right, k) == pytest.approx(fmean(map(any, picks)))


def reply(right: float, reward: float, length: int, kl: float, **more: float) -> dict:
    out = {"right": right, "eval/reward": reward, "response/length_mean": length}
    return out | {"response/truncated_fraction": length > 4, "eval/kl_ref_sequence": kl, **more}


def test_replies_are_summarized_by_hand():
    # four rows of two replies: both, none, one and one right; a fifth row was dropped
    replies = [reply(r, r, 2, 0.5) for r in (1, 1, 0, 0, 1, 0)]
    replies += [{}, {}, reply(1, 1.0, 4, 0.5, part=1.0), reply(0, 0.5, 8, 4.5, part=math.nan)]
    found = tally(replies, 2, {"eval/sampled_accuracy": 0.5})
    assert (found["rows"], found["samples"], found["dropped_rows"]) == (4, 2, 1)
    assert found["eval/pass@1"] == found["eval/sampled_accuracy"] == 0.5
    assert found["eval/pass@2"] == 0.75
    assert found["standard_error"] == pytest.approx((0.5 / 3) ** 0.5 / 2)  # 1, 0, 1/2, 1/2
    assert found["eval/reward"] == pytest.approx(4.5 / 8)
    assert found["part"] == 1.0, "a part that does not fit a reply counts nowhere"
    assert found["eval/kl_ref_sequence"] == pytest.approx(8 / 8)
    assert found["eval/kl_ref"] == pytest.approx(8 / 24)
    names = ("response/length_mean", "response/length_max", "response/truncated_fraction")
    assert [found[name] for name in names] == [24 / 8, 8, 1 / 8]
    assert tally([{}, {}], 2, {}) == {"rows": 0, "dropped_rows": 1}


def test_an_evaluation_measures_what_the_run_did_after_training(small_run, tmp_path, capsys):
    words = ("mode=evaluate", f"resume={small_run.folder}", f"output_dir={tmp_path / 'out'}")
    before = (small_run.folder / "status.json").read_text()
    do(tmp_path / "scratch", *words)
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    last = lines(small_run.folder / "metrics.jsonl")[-1]
    said_by_run = {name: last[name] for name in last if name.startswith("eval/")}
    both = {**found["greedy"], **found["sampled"]}
    assert {name: both[name] for name in said_by_run} == pytest.approx(said_by_run)
    assert found["sampled"]["eval/kl_ref_sequence"] > 0.001
    said = capsys.readouterr().out
    for part in ("the final model, iteration 16, of", "pass@2", "reward_part/exact"):
        assert part in said
    assert (small_run.folder / "status.json").read_text() == before
    assert not (small_run.folder / "eval.json").exists()
    # Against itself the policy has no KL, and more samples change no draw of the first ones.
    do(
        tmp_path / "again",
        *words,
        f"kl.reference={small_run.folder / 'model'}",
        "eval.greedy=false",
    )
    again = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert again["sampled"]["eval/kl_ref_sequence"] == pytest.approx(0, abs=1e-4)
    name = "eval/sampled_accuracy"
    assert again["sampled"][name] == found["sampled"][name]
    assert "greedy" not in again


def test_the_limit_is_made_of_the_model_that_a_run_started_from(small_run, tmp_path):
    """As many replies as the run's own evaluation plays: the very ones, before any training."""
    folder = shutil.copytree(small_run.folder, tmp_path / "kl.coeff=0.1,seed='1'")  # as of a job
    report([str(folder), "--limit", "2"])
    found = json.loads((folder / "limit.json").read_text())
    assert found["rows"] == list(range(16))
    assert found["model"] == json.loads((folder / "status.json").read_text())["model"]["sha256"]
    first, *_, last = lines(folder / "metrics.jsonl")
    right = [value for row in found["success"] for value in row]
    assert first["eval/sampled_accuracy"] == pytest.approx(fmean(right))
    rewards = [value for row in found["reward"] for value in row]
    assert first["eval/reward"] == pytest.approx(fmean(rewards), abs=1e-6)
    assert first["eval/kl_ref_sequence"] == pytest.approx(0, abs=1e-4)
    text = Page(write_report(folder)).text
    assert f"accuracy {last['eval/sampled_accuracy']:.3f}, KL " in text
    assert "2 replies of the reference to each of 16 held-out prompts" in text
    # Without a number it is 64 replies, and the reference that a run names.
    config = asked(["mode=limit", f"resume={quoted(str(folder))}"])
    assert config["eval"]["num_samples"] == 64
    with pytest.raises(ValueError, match="give resume="):
        asked(["mode=limit", "experiment=grpo_tiny"])


def test_an_evaluation_of_several_tasks_tells_them_apart(small_run, tmp_path, capsys):
    words = ("mode=evaluate", f"resume={small_run.folder}", f"output_dir={tmp_path / 'out'}")
    do(tmp_path / "scratch", *words, "env=mix", "eval.max_rows=8", "eval.greedy=false")
    found = json.loads((tmp_path / "out" / "eval.json").read_text())["sampled"]
    each = [found[f"eval/sampled_accuracy/{task}"] for task in ("sort_digits", "facts")]
    assert each[0] > each[1] == 0  # of which the tiny model knows nothing
    assert found["eval/sampled_accuracy"] == pytest.approx(fmean(each))  # rows in turn
    said = capsys.readouterr().out
    assert "accuracy/sort_digits" in said


def test_an_exported_model_is_the_merged_best_checkpoint(lora_run, tmp_path, capsys, cache):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path / "mine"
    do(tmp_path / "scratch", "mode=export", f"resume={lora_run}", f"output_dir={target}")
    said = capsys.readouterr().out
    kept = {
        p: json.loads((p / "state.json").read_text()) for p in (lora_run / "checkpoints").iterdir()
    }
    best = max(sorted(kept), key=lambda p: kept[p]["objective"])
    assert kept[best]["iteration"] < max(state["iteration"] for state in kept.values())
    assert f"the best checkpoint, iteration {kept[best]['iteration']}, of {lora_run}" in said
    model = AutoModelForCausalLM.from_pretrained(target).state_dict()
    start = AutoModelForCausalLM.from_pretrained(read_status(lora_run)["model"]["name"])
    adapter = load_file(best / "adapter" / "adapter_model.safetensors")
    scale = 32 / 2  # alpha / r
    seen = 0
    for name, before in start.state_dict().items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        change = torch.zeros_like(before)
        if f"{key}.lora_A.weight" in adapter:
            change = scale * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
            seen += bool(change.any())
        torch.testing.assert_close(model[name], before + change)
    assert seen > 4
    chat_ids = AutoTokenizer.from_pretrained(target).apply_chat_template(
        [{"role": "user", "content": "Sort 3"}], add_generation_prompt=True
    )
    assert len(chat_ids) > 0
    page = (target / "README.md").read_text()
    assert yaml.safe_load(page.split("---\n")[1])["tags"] == ["leash"]
    shown = "| `policy.lora.r` | `2` |", "## Results", "![reward and KL over the iterations](curves"
    assert all(part in page for part in shown)
    assert not any(str(place) in page for place in (tmp_path.parent, cache, Path.home()))
    by_iteration = {line["progress/iteration"]: line for line in lines(lora_run / "metrics.jsonl")}
    first, at_best = (by_iteration[i]["loss/total"] for i in (1, kept[best]["iteration"]))
    assert f"| `loss/total` | {first:.3f} | {at_best:.3f} |" in page
    mask = os.umask(0o077)
    os.umask(mask)
    weights = [*lora_run.rglob("*.safetensors"), *filter(Path.is_file, target.rglob("*"))]
    assert {path.stat().st_mode & 0o777 for path in weights} == {0o666 & ~mask}
    assert (target / "curves.svg").read_text().startswith("<svg")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "scratch"]


class Refusing(BaseHTTPRequestHandler):
    """A hub that keeps what it is asked for and permits nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"], json.loads(body)))
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_push_asks_for_a_private_repository_and_what_fails_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    line = r"is written, but not pushed to me/mine: .+; push it by hf upload me/mine "
    with HTTPServer(("127.0.0.1", 0), Refusing) as hub:
        hub.asked = []
        address = f"http://127.0.0.1:{hub.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        with pytest.raises(ValueError, match=line) as refused:
            push(tmp_path, "me/mine")
        hub.shutdown()
    with pytest.raises(ValueError, match=line) as gone:  # nobody is there
        push(tmp_path, "me/mine")
    assert "403" in str(refused.value)
    assert "refused" in str(gone.value)
    assert all(len(str(error.value).splitlines()) == 1 for error in (refused, gone))
    path, login, body = hub.asked[0]
    assert (path, login) == ("/api/repos/create", "Bearer hf_mine")
    assert (body["name"], body["organization"]) == ("mine", "me")
    assert body.get("private") is True or body.get("visibility") == "private"


def test_a_card_names_where_its_model_came_from_and_no_folder(tmp_path):
    model = tmp_path / "a run" / "model"
    model.mkdir(parents=True)
    base = "Qwen/Qwen2.5-0.5B-Instruct"
    first = {"experiment": "sft_qwen", "policy": {"model": base}}
    (tmp_path / "a run" / "config.yaml").write_text(json.dumps(first))
    second = {
        "experiment": "grpo_qwen",
        "policy": {"model": str(model), "system_prompt": "Be {{so}}"},
    }
    second |= {"env": {"dataset": str(tmp_path / "rows.jsonl")}, "api_key": "planted-1", "seed": 3}
    metrics = [{"progress/iteration": i, "reward/mean": i / 4} for i in (1, 2, 3)]
    run = Run(tmp_path, {"model": {"sha256": "f00"}}, second, [], {}, metrics)
    page = card(run, Weights(tmp_path, "the best checkpoint", str(tmp_path), 2), name="mine")
    head = yaml.safe_load(page.split("---\n")[1])
    assert (head["base_model"], head["library_name"]) == (base, "transformers")
    assert "- started from: `a run/model`, sha256 `f00`" in page
    assert "| `reward/mean` | 0.250 | 0.500 |" in page
    assert '| `env.dataset` | `"rows.jsonl"` |\n' in page
    assert '| `policy.system_prompt` | `"Be {{so}}"` |\n' in page
    assert str(tmp_path) not in page
    assert "planted-1" not in page
    # a model of the cache: its configuration is in its manifest
    (tmp_path / "a run" / "config.yaml").unlink()
    about = {"experiment": "sft_qwen", "config": first}
    (tmp_path / "a run" / "MANIFEST.json").write_text(json.dumps({"about": about}))
    assert f"base_model: {base}" in card(run, Weights(tmp_path, "it", "", 2), name="mine")


def make_checkpoint(folder: Path, iteration: int, objective: float | None) -> Path:
    path = folder / "checkpoints" / f"iteration_{iteration:06d}"
    path.mkdir(parents=True)
    state = {"format": 1, "iteration": iteration, "objective": objective}
    (path / "state.json").write_text(json.dumps(state))
    (path / "model").mkdir()
    for name in ("optimizer.safetensors", "model/model.safetensors"):
        (path / name).write_bytes(b"weights")
    write_manifest(path, {"format": 1})
    return path


def test_the_weights_of_a_run_are_its_best_its_last_or_its_newest(tmp_path):
    with pytest.raises(ValueError, match="expected a checkpoint or a final model"):
        choose_weights(tmp_path)
    first, second = make_checkpoint(tmp_path, 2, 0.5), make_checkpoint(tmp_path, 4, 0.25)
    third = make_checkpoint(tmp_path, 6, None)
    assert choose_weights(tmp_path).folder == third
    assert choose_weights(tmp_path, keep_best=True).folder == first
    (third / "state.json").write_text("{}")  # damaged
    assert choose_weights(tmp_path).folder == second
    assert choose_weights(tmp_path).short.endswith("iteration 4")
    (tmp_path / "model").mkdir()
    (tmp_path / "status.json").write_text('{"state": "running", "iteration": 6}')
    assert choose_weights(tmp_path).folder == second  # that model/ is of before it was prolonged
    (tmp_path / "status.json").write_text('{"state": "finished", "iteration": 6}')
    assert choose_weights(tmp_path).folder == tmp_path
    assert choose_weights(tmp_path, keep_best=True).folder == first


def said_by(policy, scorer, *typed: str) -> list[str]:
    out = io.StringIO()
    chat(policy, scorer, Console(file=out, width=500, highlight=False), typed)
    return out.getvalue().splitlines()


def test_a_chat_sets_the_policy_beside_its_reference():
    policy = make_policy.__wrapped__(temperature=0.0)
    reference = load_reference(policy).scorer
    alike = said_by(policy, reference, "Sort 3", "again", "/reset", "Sort 3", "/quit", "never")
    assert [line.split()[0] for line in alike[:3]] == ["policy", "log-ratio", "reference"]
    assert alike[0] == alike[7]  # after /reset it is the first message again
    assert all("log-ratio +0.00 nats" in alike[i] for i in (1, 4, 8))
    assert alike[6] == "a new chat"
    assert len(alike) == 10
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(0.9)
    first = said_by(policy, reference, "Sort 3")[1]
    renderer, tokenizer = policy.renderer, policy.tokenizer
    prompt = renderer.render(
        [{"role": "user", "content": "Sort 3"}], add_generation_prompt=True
    ).ids
    full = policy.model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
        max_new_tokens=policy.max_new_tokens, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.no_grad():
        both = [m(full).logits[0, :-1].log_softmax(-1) for m in (policy.model, reference.model)]
    picked = [x.gather(-1, full[0, 1:, None])[len(prompt) - 1 :, 0] for x in both]
    ratio = float((picked[0] - picked[1]).sum())
    assert abs(ratio) > 0.01
    assert f"log-ratio {ratio:+.2f} nats over {full.shape[1] - len(prompt)} tokens" in first


def test_a_chat_reads_a_pipe_and_leaves_the_run_as_it_was(lora_run):
    before = sorted((p, p.stat().st_mtime_ns) for p in lora_run.rglob("*"))
    command = [sys.executable, str(ROOT / "train.py"), "mode=chat", f"resume={lora_run}"]
    done = subprocess.run(
        [*command, "policy.temperature=0", "policy.max_new_tokens=5"],
        input="Sort 21\n\nSort 3\n", env=environment(), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    _, *said = done.stdout.splitlines()
    assert said[0].startswith("policy     the best checkpoint, iteration")
    assert said[1].endswith("which training started from (the adapter off)")
    assert [line.split()[0] for line in said if line.startswith(("policy", "reference"))] == [
        *("policy", "reference") * 3
    ]
    assert done.stderr == ""
    assert sorted((p, p.stat().st_mtime_ns) for p in lora_run.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mode=chat", "resume={run}", "kl.coeff=1"], r"kl\.coeff cannot change"),
        (["mode=chta", "resume={run}"], "expected mode to be one of train, chat, evaluate, export"),
        (["mode=export", "resume={run}"], "give output_dir=<folder>"),
        (["mode=export", "resume={run}", "output_dir={run}"], "give output_dir=<folder>, not"),
        (["mode=evaluate", "experiment=rm_tiny"], "is for models that reply"),
        (["mode=chat", "resume={run}", "hub=me/mine"], "hub"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_worker_starts(
    words, message, lora_run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        asked([word.format(run=lora_run) for word in words])


@pytest.mark.parametrize("mode", ["chat", "evaluate", "export"])
def test_a_run_without_weights_is_refused_before_a_worker_starts(mode, lora_run, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(lora_run / "config.yaml", run)
    words = [f"mode={mode}", f"resume={run}", *["output_dir=new"] * (mode == "export")]
    (run / "status.json").write_text('{"state": "failed"}')
    with pytest.raises(ValueError, match=f"ended as failed; finish it with resume={run}$"):
        asked(words)
    (run / "status.json").write_text('{"state": "running"}')
    with (
        held(run),
        pytest.raises(ValueError, match="got none: the run is still running; wait until") as caught,
    ):
        asked(words)
    assert "finish it with resume=" not in str(caught.value)


def test_an_evaluation_on_another_task_keeps_the_runs_own_system_prompt(lora_run, tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"question": "1+1", "answer": 2}\n{"question": "1+2", "answer": 3}\n')
    rows = f"env.dataset={path}"
    words = ["mode=evaluate", f"resume={lora_run}", "env=gsm8k", rows]
    assert compose_checked(["env=gsm8k", rows])["policy"]["system_prompt"]
    before = read_yaml(lora_run / "config.yaml")["policy"]["system_prompt"]
    assert asked(words)["policy"]["system_prompt"] == before
    own = asked([*words, "policy.system_prompt=Think."])
    assert own["policy"]["system_prompt"] == "Think."


def test_every_key_that_may_change_is_one(lora_run):
    config = compose_checked([])
    for keys in MAY.values():
        for key in keys:
            node = config
            for part in key.split("."):
                assert part in node, key
                node = node[part]
