"""The card: a Hydra application of env, policy, RetrieveKL and an SFT or RL loss, on Accelerate."""

import inspect
import json
import os
import re
from functools import cache
from pathlib import Path

import contracts
import pytest
import torch
import yaml
from contracts import G, Words, leash, make_wrapper, one_process, prompts, rollout
from small_runs import train
from steps import COEFF, HIGH, LOW, gradient, prepared
from wrapped import spoken

import train as script
from conf.compose import compose, compose_experiment
from envs import ChatEnv
from envs.transforms.kl import RetrieveKL
from policies import load_policy, load_reference
from policies.chat_policy import ChatPolicy
from specification_rows.containers import KINDS, RESPONSE, generated
from specification_rows.row import ROOT, Page, close, refused
from specification_rows.shared import folder
from trainer import GRPOLoss, GRPOObjective, Reference, Runtime, SFTLoss

CARD = Page("card")
composed = cache(compose_experiment)


@CARD.rows()
def application():
    yield "a Hydra application: python train.py experiment=..."
    names = {path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")}
    assert {"sft_tiny", "grpo_tiny", "ppo_tiny", "grpo_qwen", "grpo_smollm"} <= names
    assert len((ROOT / "train.py").read_text().splitlines()) <= 150
    assert inspect.signature(script.train).return_annotation in (float, "float")
    yield "... composes a chat environment"
    assert ChatEnv(Words(), group_size=G).reset(prompts(4)).batch_size == (4 * G,)
    assert composed("grpo_tiny")["env"]["task"]["_target_"].startswith("envs.")
    yield "... an LLM policy wrapper producing Text / Tokens / Masks / LogProbs"
    assert isinstance(load_policy("tiny"), ChatPolicy)
    assert {key: type(generated()[key]) for key in KINDS} == KINDS
    yield "... a RetrieveKL transform chain, 0 at the start"
    reference = Reference(make_wrapper(), load_reference(make_wrapper()))
    assert isinstance(reference.retrieve, RetrieveKL)
    kl = reference(rollout(make_wrapper()))["kl_penalty"]
    close(kl, torch.zeros_like(kl))
    yield "... whose KL is charged once, over several turns"
    contracts.one_leash()
    yield "... an SFT loss"
    assert "SFT" in composed("sft_tiny")["algorithm"]["objective"]["_target_"]
    policy = make_wrapper.__wrapped__()
    loss = SFTLoss(policy.get_new_version(generate=False), tokenizer=policy.tokenizer)
    loss(spoken()).loss_sft.backward()
    assert all(p.grad.any() for p in policy.model.parameters())
    yield "... or an RL loss (GRPO, PPO)"
    for name in ("GRPO", "PPO"):
        assert name in composed(f"{name.lower()}_tiny")["algorithm"]["objective"]["_target_"]


@CARD.rows(needs="runs")
def a_run_on_disk():
    yield "a run leaves metrics and checkpoints; never a bare kl"
    path = Path(folder().name) / "run"
    path.mkdir()
    train(path)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert {"kl/ref", "kl/ref_sequence", "kl/coeff", "reward/mean"} <= set(lines[-1])
    assert "kl" not in {name for line in lines for name in line}
    assert {"metrics.jsonl", "status.json", "checkpoints"} <= set(os.listdir(path))


@CARD.rows()
def experiments():
    yield "swept with one command: python train.py -m ... kl.coeff=0,0.01,0.1,1"
    for coeff in (0, 0.01, 0.1, 1):
        assert compose(["experiment=grpo_tiny", f"kl.coeff={coeff}"]).kl.coeff == coeff
    assert re.search(r"train\.py -m .*kl\.coeff=", (ROOT / "README.md").read_text())
    yield "python train.py experiment=grpo_qwen"
    cfg = composed("grpo_qwen")
    assert cfg["policy"]["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (cfg["optimizer"]["lr"], cfg["kl"]["coeff"]) == (1e-6, 0.001)
    assert (cfg["algorithm"]["group_size"], cfg["policy"]["temperature"]) == (8, 1.0)
    yield "W&B"
    assert cfg["tracker"]["_target_"].endswith("WandbTracker")


@CARD.rows()
def masked_distributions():
    yield "... that uses assistant- or prompt-masked distributions: the masks"
    contracts.masks_are_exact()
    policy = make_wrapper()
    batches = [contracts.demonstrations(policy, mask) for mask in ("assistant", "prompt")]
    found = [int(batch["loss_mask"].sum()) for batch in batches]
    assert 0 < found[1] <= found[0]
    assert composed("sft_tiny")["algorithm"]["mask"] == "assistant"
    yield "... the road's scores are those of the public distributions, for each mask"
    score = policy.get_new_version(generate=False, inplace=False)
    for mask, batch in (("assistant", batches[0]), ("response", rollout(policy))):
        keep, full = batch["loss_mask"], batch["tokens", "full"]
        real = batch["masks", "all_attention_mask"]
        road = policy.scorer(full, real, keep, temperature=batch["temperature"]).log_probs
        td = batch.select("tokens", "masks")
        dist = score.get_dist(td, mask_key=("masks", f"all_{mask}_mask"))
        close(dist.log_prob(full.masked_fill(~keep, -100)), road * keep)
    yield "... one loss: the public GRPOLoss gives the road's gradient"
    policy = make_wrapper.__wrapped__()
    policy.model.requires_grad_(True)
    batch, _ = prepared(policy)
    objective = GRPOObjective(clip_low=LOW, clip_high=HIGH, leash=leash(COEFF))
    road, _ = gradient(policy, objective, batch)
    policy.model.zero_grad()
    actor = policy.get_new_version(generate=False, inplace=False)
    more = {"kl_to_ref_coeff": COEFF, "entropy_bonus": False}
    out = GRPOLoss(actor, clip_epsilon=(LOW, HIGH), **more)(batch)
    (out.loss_objective + out.loss_kl_to_ref).backward()
    public = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    assert float((public - road).norm() / road.norm()) < 1e-4
    assert batch[RESPONSE].any()
    yield "... algorithm.mask=response|assistant|prompt says which tokens"
    sections = yaml.safe_load((ROOT / "conf/keys.yaml").read_text())
    found = {choice for name, keys in sections.items()
             if name.startswith("algorithm") for choice in keys.get("mask", [[]])[-1]}  # fmt: skip
    assert {"response", "assistant", "prompt"} <= found


def refused_setting(name: str, value: str, key: str) -> None:
    """Check that a setting of Accelerate is refused with leash's own key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"ACCELERATE_{name}", value)
        refused(ValueError, key, Runtime, folder().name, device="cpu")


@CARD.rows()
def accelerate():
    text = "".join(path.read_text() for path in (ROOT / "trainer").rglob("*.py"))
    yield "Accelerate: prepares the scorer and the optimizer, and reduces; on one CPU"
    with Runtime(folder().name, device="cpu") as runtime:
        scorer = make_wrapper.__wrapped__().scorer
        optimizer = torch.optim.SGD(scorer.parameters(), lr=0.1)
        assert runtime.accelerator.prepare(scorer, optimizer)[0] is scorer
        assert runtime.device.type == "cpu"
        assert runtime.all_reduce_sum({"a": 2.0}) == {"a": 2.0}
    yield "Accelerate: gather"
    assert one_process().gather({"a": 1}) == [{"a": 1}]
    assert "torch.distributed.all_gather_object(" in text
    yield "Accelerate: launching"
    assert "num_processes" in composed("grpo_tiny")["launch"]
    yield "Accelerate: data, scheduler, checkpoint, trackers"
    for name in ("load_state", "save_state", "init_trackers", "prepare_scheduler"):
        assert f"accelerator.{name}(" not in text
    yield "Accelerate: FSDP and DeepSpeed shard the model"
    assert "FullyShardedDataParallelPlugin" not in text
    yield "Accelerate: its mixed precision is honoured or refused"
    refused_setting("MIXED_PRECISION", "bf16", "policy.autocast")
    yield "Accelerate: its gradient accumulation is honoured or refused"
    refused_setting("GRADIENT_ACCUMULATION_STEPS", "4", "trainer.micro_batch_tokens")
    yield "Accelerate: its FSDP and DeepSpeed are honoured or refused"
    refused_setting("USE_FSDP", "true", "launch=fsdp2")
    refused_setting("USE_DEEPSPEED", "true", "launch=fsdp2")


@CARD.rows(needs="gpu")
def on_a_gpu():
    yield "... across GPUs"
    with Runtime(folder().name) as runtime:
        assert runtime.device.type == "cuda"
