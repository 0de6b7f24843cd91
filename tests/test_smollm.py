"""The real SmolLM2 samples, scores and is saved; its template is tried in test_chat_template.py."""

import pytest
import torch
from contracts import Words
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.chat_env import ChatEnv
from policies.load import load_policy
from policies.models import EMBEDDED
from policies.random import fold
from trainer.checkpoint import save_model
from trainer.collect import collect

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def policy():
    return load_policy(EMBEDDED, max_new_tokens=8)


@torch.no_grad()
def test_sampled_and_scored_log_probs_are_those_of_a_plain_forward(policy):
    row = {"messages": CHAT}
    td = TensorDict({"stream": fold(1, torch.arange(1))}, [1])
    td.set("row", NonTensorStack(NonTensorData(row)))
    batch = collect(td, ChatEnv(Words(), group_size=2), policy)
    scored = policy.get_new_version(generate=False, inplace=False)(batch)
    attention, response = batch["masks", "all_attention_mask"], batch["masks", "all_response_mask"]
    ended = 0
    for i in range(2):
        ids, kept = batch["tokens", "full"][i][attention[i]], response[i][attention[i]]
        table = policy.model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        want = torch.cat([torch.zeros(1), table.gather(-1, ids[1:, None]).squeeze(-1)])
        for out, expected in ((batch, want * kept), (scored, want)):
            got = out["log_probs", "full"][i][attention[i]].double()
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)
        ended += int(ids[-1] == policy.tokenizer.eos_token_id)
        assert bool(ids[-1] == policy.tokenizer.eos_token_id) != bool(batch["truncated"][i])
    assert ended, "some reply should end by itself, so that its end-of-turn token is checked"


@pytest.mark.runs
def test_the_saved_model_loads_in_plain_transformers(policy, tmp_path):
    save_model(policy, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids == policy.renderer.render(CHAT, add_generation_prompt=True).ids
    with torch.no_grad():
        got, want = (m(input_ids=torch.tensor([ids])).logits for m in (model, policy.model))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.eos_token_id
