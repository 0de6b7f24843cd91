"""The card: a Hydra application of env, policy, RetrieveKL and an SFT or RL loss, on Accelerate."""

import inspect
import json
import os
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from support import contracts
from support.chats import spoken
from support.policies import G, leash, make_wrapper, one_process, prompts, rollout
from support.small_runs import train
from support.specification import ROOT, SCALING, TRACKING, close, page, refused
from support.tasks import Words
from support.updates import COEFF, HIGH, LOW, gradient, prepared
from support.wrappers import KINDS, RESPONSE, folder, generated

import train as script
from conf.compose import compose, compose_experiment
from envs import ChatEnv
from envs.transforms.kl import RetrieveKL
from policies import load_policy, load_reference
from policies.chat_policy import ChatPolicy
from trainer import GRPOLoss, GRPOObjective, Reference, Runtime, SFTLoss

CARD = page("card")


composed = cache(compose_experiment)


@CARD("a Hydra application: python train.py experiment=...")
def test_a_Hydra_application():
    names = {path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")}
    assert {"sft_tiny", "grpo_tiny", "ppo_tiny", "grpo_qwen", "grpo_smollm"} <= names
    assert len((ROOT / "train.py").read_text().splitlines()) <= 150
    assert inspect.signature(script.train).return_annotation in (float, "float")


@CARD("... composes a chat environment")
def test_composes_a_chat_environment():
    assert ChatEnv(Words(), group_size=G).reset(prompts(4)).batch_size == (4 * G,)
    assert composed("grpo_tiny")["env"]["task"]["_target_"].startswith("envs.")


@CARD("... an LLM policy wrapper producing Text / Tokens / Masks / LogProbs")
def test_an_LLM_policy_wrapper_producing_Text_Tokens_Masks_LogProbs():
    assert isinstance(load_policy("tiny"), ChatPolicy)
    assert {key: type(generated()[key]) for key in KINDS} == KINDS


@CARD("... a RetrieveKL transform chain, 0 at the start")
def test_a_RetrieveKL_transform_chain_0_at_the_start():
    reference = Reference(make_wrapper(), load_reference(make_wrapper()))
    assert isinstance(reference.retrieve, RetrieveKL)
    kl = reference(rollout(make_wrapper()))["kl_penalty"]
    close(kl, torch.zeros_like(kl))


@CARD("... whose KL is charged once, over several turns")
def test_whose_KL_is_charged_once_over_several_turns():
    contracts.one_leash()


@CARD("... an SFT loss")
def test_an_SFT_loss():
    assert "SFT" in composed("sft_tiny")["algorithm"]["objective"]["_target_"]
    policy = make_wrapper.__wrapped__()
    loss = SFTLoss(policy.get_new_version(generate=False), tokenizer=policy.tokenizer)
    loss(spoken()).loss_sft.backward()
    assert all(p.grad.any() for p in policy.model.parameters())


@CARD("... or an RL loss (GRPO, PPO)")
def test_or_an_RL_loss_GRPO_PPO():
    for name in ("GRPO", "PPO"):
        assert name in composed(f"{name.lower()}_tiny")["algorithm"]["objective"]["_target_"]


@pytest.mark.runs
@CARD("a run leaves metrics and checkpoints; never a bare kl")
def test_a_run_leaves_metrics_and_checkpoints_never_a_bare_kl():
    path = Path(folder().name) / "run"
    path.mkdir()
    train(path)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert {"kl/ref", "kl/ref_sequence", "kl/coeff", "reward/mean"} <= set(lines[-1])
    assert "kl" not in {name for line in lines for name in line}
    assert {"metrics.jsonl", "status.json", "checkpoints"} <= set(os.listdir(path))


@CARD("swept with one command: python train.py -m ... kl.coeff=0,0.01,0.1,1")
def test_swept_with_one_command():
    for coeff in (0, 0.01, 0.1, 1):
        assert compose(["experiment=grpo_tiny", f"kl.coeff={coeff}"]).kl.coeff == coeff
    assert re.search(r"train\.py -m .*kl\.coeff=", (ROOT / "README.md").read_text())


@CARD("python train.py experiment=grpo_qwen", part=SCALING)
def test_python_train_py_experiment_grpo_qwen():
    cfg = composed("grpo_qwen")
    assert cfg["policy"]["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (cfg["optimizer"]["lr"], cfg["kl"]["coeff"]) == (1e-6, 0.001)
    assert (cfg["algorithm"]["group_size"], cfg["policy"]["temperature"]) == (8, 1.0)


@CARD("W&B", part=TRACKING)
def test_WandB():
    cfg = composed("grpo_qwen")
    assert cfg["tracker"]["_target_"].endswith("WandbTracker")


@CARD("... that uses assistant- or prompt-masked distributions: the masks")
def test_that_uses_assistant_or_prompt_masked_distributions():
    contracts.masks_are_exact()
    policy = make_wrapper()
    batches = [contracts.demonstrations(policy, mask) for mask in ("assistant", "prompt")]
    found = [int(batch["loss_mask"].sum()) for batch in batches]
    assert 0 < found[1] <= found[0]
    assert composed("sft_tiny")["algorithm"]["mask"] == "assistant"


@CARD("... the road's scores are those of the public distributions, for each mask")
def test_the_road_scores_are_those_of_the_public_distributions():
    policy = make_wrapper()
    batches = [contracts.demonstrations(policy, mask) for mask in ("assistant", "prompt")]
    score = policy.get_new_version(generate=False, inplace=False)
    for mask, batch in (("assistant", batches[0]), ("response", rollout(policy))):
        keep, full = batch["loss_mask"], batch["tokens", "full"]
        real = batch["masks", "all_attention_mask"]
        road = policy.scorer(full, real, keep, temperature=batch["temperature"]).log_probs
        td = batch.select("tokens", "masks")
        dist = score.get_dist(td, mask_key=("masks", f"all_{mask}_mask"))
        close(dist.log_prob(full.masked_fill(~keep, -100)), road * keep)


@CARD("... one loss: the public GRPOLoss gives the road's gradient")
def test_one_loss():
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


@CARD("... algorithm.mask=response|assistant|prompt says which tokens")
def test_algorithm_mask_response_assistant_prompt_says():
    sections = yaml.safe_load((ROOT / "conf/keys.yaml").read_text())
    found = {choice for name, keys in sections.items()
             if name.startswith("algorithm") for choice in keys.get("mask", [[]])[-1]}  # fmt: skip
    assert {"response", "assistant", "prompt"} <= found


def refused_setting(name: str, value: str, key: str) -> None:
    """Check that a setting of Accelerate is refused with leash's own key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"ACCELERATE_{name}", value)
        refused(ValueError, key, Runtime, folder().name, device="cpu")


@CARD("Accelerate: prepares the scorer and the optimizer, and reduces; on one CPU")
def test_Accelerate():
    with Runtime(folder().name, device="cpu") as runtime:
        scorer = make_wrapper.__wrapped__().scorer
        optimizer = torch.optim.SGD(scorer.parameters(), lr=0.1)
        assert runtime.accelerator.prepare(scorer, optimizer)[0] is scorer
        assert runtime.device.type == "cpu"
        assert runtime.all_reduce_sum({"a": 2.0}) == {"a": 2.0}


@CARD("Accelerate: gather", part=SCALING)
def test_Accelerate_gather():
    text = "".join(path.read_text() for path in (ROOT / "trainer").rglob("*.py"))
    assert one_process().gather({"a": 1}) == [{"a": 1}]
    assert "torch.distributed.all_gather_object(" in text


@CARD("Accelerate: launching", part=SCALING)
def test_Accelerate_launching():
    assert "num_processes" in composed("grpo_tiny")["launch"]


@CARD("Accelerate: data, scheduler, checkpoint, trackers", part=SCALING)
def test_Accelerate_data_scheduler_checkpoint_trackers():
    text = "".join(path.read_text() for path in (ROOT / "trainer").rglob("*.py"))
    for name in ("load_state", "save_state", "init_trackers", "prepare_scheduler"):
        assert f"accelerator.{name}(" not in text


@CARD("Accelerate: FSDP and DeepSpeed shard the model", no=SCALING)
def test_Accelerate_DeepSpeed():
    text = "".join(path.read_text() for path in (ROOT / "trainer").rglob("*.py"))
    assert "FullyShardedDataParallelPlugin" not in text


@CARD("Accelerate: its mixed precision is honoured or refused")
def test_Accelerate_its_mixed_precision_is_honoured_or_refused():
    refused_setting("MIXED_PRECISION", "bf16", "policy.autocast")


@CARD("Accelerate: its gradient accumulation is honoured or refused")
def test_Accelerate_its_gradient_accumulation_is_honoured():
    refused_setting("GRADIENT_ACCUMULATION_STEPS", "4", "trainer.micro_batch_tokens")


@CARD("Accelerate: its FSDP and DeepSpeed are honoured or refused")
def test_Accelerate_its_FSDP_and_DeepSpeed_are_honoured():
    refused_setting("USE_FSDP", "true", "launch=fsdp2")
    refused_setting("USE_DEEPSPEED", "true", "launch=fsdp2")


@pytest.mark.gpu
@CARD("... across GPUs", part=SCALING)
def test_across_GPUs():
    with Runtime(folder().name) as runtime:
        assert runtime.device.type == "cuda"
