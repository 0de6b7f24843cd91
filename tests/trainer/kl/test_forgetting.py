"""The forward KL of an evaluation: by enumeration, and by plain forwards of what it samples."""

import itertools
import json
import shutil
from statistics import fmean

import pytest
import torch
from support.policies import make_policy, one_process
from support.runs import do, metrics, train
from support.tasks import Words
from support.updates import tables
from tensordict import TensorDict
from transformers import LlamaConfig, LlamaForCausalLM

from envs.chat_env import ChatEnv
from policies.limits import Limits
from policies.load import load_policy, load_reference
from policies.padding import pad, pad_mask
from policies.scorer import Scorer
from policies.transformers_policy import TransformersPolicy
from trainer.evaluation import Evaluate
from trainer.kl.reference import Reference

V, MOST, END = 4, 3, 0  # vocabulary, most tokens of a response, what ends it
SCALE, FACTOR = 0.7, 1.5  # eval.temperature, kl.reference_temperature


def four_tokens(seed: int) -> TransformersPolicy:
    """Return a policy over a vocabulary of four, in float64."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=V, num_hidden_layers=1, initializer_range=1.0, **sizes)
    scorer, limits = Scorer(LlamaForCausalLM(config).double().eval()), Limits(eos_token_id=(END,))
    tokenizer = load_policy("tiny").tokenizer
    return TransformersPolicy(scorer, tokenizer=tokenizer, renderer=None, limits=limits)


def every_response() -> list[tuple[int, ...]]:
    """Return all responses: up to the first end, or of MOST tokens."""
    whole = itertools.product(range(V), repeat=MOST)
    return sorted({ids[: (*ids, END).index(END) + 1] for ids in whole})


@torch.no_grad()
def test_the_kls_of_states_are_that_of_whole_responses_by_enumeration():
    policy, other, prompt = four_tokens(0), four_tokens(1), (1, 2, 3)
    reference = Reference(policy, load_reference(other, temperature_factor=FACTOR))
    ids = [torch.tensor(prompt + response) for response in every_response()]
    response = [torch.arange(len(row)) >= len(prompt) for row in ids]
    masks = {"all_attention_mask": pad_mask([*map(len, ids)]), "all_response_mask": pad(response)}
    batch = TensorDict({"tokens": {"full": pad(ids)}, "masks": masks}, [len(ids)])
    batch["temperature"] = torch.full((len(ids),), SCALE, dtype=torch.float64)
    batch["group_id"] = torch.zeros(len(ids), dtype=torch.int64)
    log_p, log_q = torch.zeros(len(ids)).double(), torch.zeros(len(ids)).double()
    for i, row in enumerate(ids):
        for at in range(len(prompt), len(row)):
            log_p[i] += tables(policy.model, row, SCALE)[at - 1, row[at]]
            log_q[i] += tables(other.model, row, SCALE * FACTOR)[at - 1, row[at]]
    assert float(log_q.exp().sum()) == pytest.approx(1.0)
    want = float(log_q.exp() @ (log_q - log_p))
    got = reference.forward_kl(batch)
    assert want > 0.1
    assert float(log_q.exp() @ got.sum(-1)) == pytest.approx(want, rel=1e-7)
    assert not got[~batch["masks", "all_response_mask"]].any()


class Counted(Words):
    """Count the rewards."""

    count = 0

    def reward(self, row, response):
        self.count += 1
        return super().reward(row, response)


def evaluate(task: Words, turns: int, **options) -> Evaluate:
    parts = {"task": task, "env": ChatEnv(task, max_turns=turns), "runtime": one_process()}
    return Evaluate(**parts, greedy=False, prompts_per_batch=3, **options)


def measures_the_reference_where_it_writes(turns: int) -> None:
    """Raise AssertionError unless the forward KL is that of the tempered reference's responses."""
    policy, other = make_policy(), load_policy("tiny", max_new_tokens=6)
    reference = Reference(policy, load_reference(other, temperature_factor=FACTOR))
    task, played = Counted(turns), []
    play = evaluate(
        task,
        turns,
        generator=policy,
        retrieve_kl=reference,
        num_samples=0,
        temperature=SCALE,
        forward_kl=2,
    )
    scores, again = play(0)[0], play(1)[0]
    assert task.count == 0, "rewards cost"
    sampled = evaluate(
        Words(turns), turns, generator=other, num_samples=2, temperature=SCALE * FACTOR
    )
    sampled(0, on_batch=lambda _, batch, __: played.extend(batch))
    kls = []
    for row in played:
        real = row["masks", "all_attention_mask"]
        ids, response = row["tokens", "full"][real], row["masks", "all_response_mask"][real]
        p, q = tables(policy.model, ids, SCALE), tables(other.model, ids, SCALE * FACTOR)
        kls.append(float((q.exp() * (q - p)).sum(-1)[response[1:]].sum()))
    assert len(kls) == 8
    assert scores == {"eval/kl_forward": pytest.approx(fmean(kls), rel=1e-4)} == again


@torch.no_grad()
@pytest.mark.parametrize("turns", [1, 2])
def test_the_forward_kl_is_of_what_the_tempered_reference_writes(turns):
    measures_the_reference_where_it_writes(turns)


def test_prompts_to_retain_are_measured_as_held_out_ones(tmp_path):
    policy, path = make_policy(), tmp_path / "retain.jsonl"
    rows = [{"prompt": row["answer"], "label": 3} for row in Words().rows("eval")]
    path.write_text("\n".join(map(json.dumps, rows)))
    reference = Reference(policy, load_reference(load_policy("tiny", max_new_tokens=6)))
    options = {"generator": policy, "retrieve_kl": reference, "num_samples": 1, "forward_kl": 1}
    scores, records = evaluate(Words(), 1, retain=str(path), **options)(0)
    assert scores["eval_retain/kl_forward"] == pytest.approx(scores["eval/kl_forward"])
    assert [name for name in scores if "retain" in name] == ["eval_retain/kl_forward"]
    assert len(records) == 4
    assert (
        len(evaluate(Words(), 1, retain=str(path), max_rows=3, **options).beside["retain"].rows)
        == 3
    )


@pytest.mark.runs
def test_a_run_with_an_adapter_and_its_resume_and_evaluation_measure_the_same(tmp_path):
    path, cut = tmp_path / "retain.jsonl", tmp_path / "cut"
    path.write_text('{"prompt": "Say hello."}\n{"prompt": "Name a colour."}')
    words = ("policy.model=tiny", "policy.lora.r=4", "optimizer.lr=1e-2", "checkpoint.every=1")
    words += ("kl.measure=true", "kl.estimator=full", "eval.max_rows=8", "eval.num_samples=1")
    words += ("eval.forward_kl=2", f"eval.retain={path}", "trainer.num_iterations=2")
    done = train("experiment=sft_tiny", *words, f"output_dir={tmp_path / 'whole'}")
    assert done.code == 0, done.text
    names = "eval/kl_forward", "eval_retain/kl_forward"
    first, *_, last = metrics(tmp_path / "whole")
    assert [first[name] for name in names] == [0, 0]
    assert min(last[name] for name in names) > 1e-4
    shutil.copytree(tmp_path / "whole", cut)
    shutil.rmtree(cut / "checkpoints" / "iteration_000002")
    done = train(f"resume={cut}")
    assert done.code == 0, done.text
    assert [metrics(cut)[-1][name] for name in names] == [last[name] for name in names]
    do(tmp_path / "scratch", "mode=evaluate", f"resume={cut}", f"output_dir={tmp_path}/out")
    found = json.loads((tmp_path / "out" / "eval.json").read_text())["sampled"]
    assert [found[name] for name in names] == pytest.approx([last[name] for name in names])
    path.write_text('{"prompt": "Say hello."}\n{"prompt": "Name a number."}')
    done = train(f"resume={cut}", "trainer.num_iterations=3")
    assert "eval.retain" in done.text
    assert done.code != 0
    path.unlink()
    do(tmp_path / "scratch", "mode=export", f"resume={cut}", f"output_dir={tmp_path}/model")
