"""A reference whose prompt ends with a hint: its scores are those of the hinted chat by itself."""

import pytest
import torch
from support.policies import G, leash, padded_left, prompts, scaled
from support.runs import SMALL, metrics, train
from support.tasks import Words
from support.updates import double_policy, each_token, gradient, tables

from envs.chat_env import ChatEnv
from trainer.collect import collect
from trainer.kl.hints import Hint
from trainer.kl.reference import Reference
from trainer.objectives import DistilObjective

TEXT = "The answer is {answer}."


def by_itself(policy, reference, batch, i: int) -> list[torch.Tensor]:
    """Return log p(. | hinted chat so far) [V] before each response token of row i."""
    row = batch["row"][i]
    (user,) = row["messages"]
    told = {"role": "user", "content": f"{user['content']}\nThe answer is {row['answer']}."}
    chat = [{"role": "system", "content": "Be brief."}, told]
    options = {"add_generation_prompt": True, "return_dict": False}
    prompt = policy.tokenizer.apply_chat_template(chat, **options)
    response = batch["tokens", "full"][i][batch["masks", "all_response_mask"][i]]
    ids = torch.cat([torch.tensor(prompt), response])
    return list(tables(reference.model, ids, batch["temperature"][i])[len(prompt) - 1 :])


@torch.no_grad()
@pytest.mark.parametrize("pad", [lambda batch: batch, padded_left], ids=["right", "left"])
def test_a_hint_gives_the_scores_of_the_hinted_chat_to_the_tokens_of_the_policy(pad):
    policy = double_policy()
    env = ChatEnv(Words(), group_size=G, system_prompt="Be brief.")
    batch, reference = collect(prompts(), env, policy), scaled(policy, 0.95)
    batch = pad(Reference(policy, reference)(batch))
    scored = Reference(policy, reference, hint=Hint(TEXT, env=env, policy=policy))
    mask = batch["masks", "all_response_mask"]
    want = torch.zeros_like(batch["log_probs", "full"]).double()
    theirs = []
    for i, sampled in enumerate(mask):
        q = by_itself(policy, reference, batch, i)
        theirs += q
        for t, each in zip(sampled.nonzero().squeeze(-1).tolist(), q, strict=True):
            want[i, t] = each[batch["tokens", "full"][i, t]]
    assert (want - batch["ref_log_probs", "full"]).abs().max() > 0.01, "the hint should matter"
    for keep_states in (False, True):
        got = scored(batch.clone(), keep_states=keep_states)
        torch.testing.assert_close(got["ref_log_probs", "full"], want, rtol=0, atol=1e-6)
        k1 = (batch["log_probs", "full"] - want) * mask
        torch.testing.assert_close(got["kl_penalty"], k1, rtol=0, atol=1e-6)
    if pad is padded_left:
        return
    ours = [p for *_, p in each_token(policy.model, batch)]
    kl = [(p.exp() * (p - q)).sum() for p, q in zip(ours, theirs, strict=True)]
    objective = DistilObjective(leash=leash(estimator="full"))
    with torch.enable_grad():
        _, logged = gradient(policy, objective, got, reference=reference.scorer)
    assert logged["kl/ref_full"] == pytest.approx(float(torch.stack(kl).mean()), rel=1e-5)


@pytest.mark.runs
def test_a_run_learns_from_the_start_policy_that_reads_the_answer(tmp_path):
    folder = tmp_path / "run"
    words = ("policy.model=tiny", "teacher.hint='The answer is {answer}.'", f"output_dir={folder}")
    words += ("kl.estimator=k3_ratio", "teacher.estimator=full", "trainer.num_iterations=2")
    done = train(*SMALL, *words)
    assert done.code == 0, done.text
    lines = [line for line in metrics(folder) if "loss/total" in line]
    assert lines[0]["kl/ref_sequence"] == pytest.approx(0.0, abs=1e-4)
    assert lines[0]["kl/teacher_full"] > 1e-4
