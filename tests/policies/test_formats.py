"""Checkpoints of the common families and SmolLM2: what is stored, learnt and saved is what plain
transformers says.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import KINDS, STOPS, make_checkpoint
from support.policies import one_process, plain_log_probs, prompts
from support.tasks import Words
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.chat_env import ChatEnv
from policies.load import load_policy, load_reference
from policies.models.fast import products
from policies.models.find import EMBEDDED, quiet
from policies.random import fold
from trainer.checkpoint import save_model
from trainer.collect import collect
from trainer.demonstrations import Demonstrations

G = 16  # responses a prompt: enough for every stop token to end one
RESPONSE = ("masks", "all_response_mask")
CHAT = [
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "Sure, how many apples?"},
    {"role": "assistant", "content": "Tom has 12."},
]
TURN_ENDS = {
    "qwen2": "<|im_end|>",
    "llama": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gpt2": "<|endoftext|>",
}


def plain_model(folder: Path):
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Make one checkpoint of each kind, in which each stop token is likely now and then."""
    out = {}
    for kind in KINDS:
        folder = make_checkpoint(tmp_path_factory.mktemp(kind), kind)
        model = plain_model(folder)
        ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(STOPS[kind])
        weight = model.get_output_embeddings().weight
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            weight[ids] = torch.randn(len(ids), weight.shape[1], generator=draw) * 0.5
        with quiet():
            model.save_pretrained(folder)
        out[kind] = folder
    return out


def attended(batch: TensorDict, i: int, *key: str) -> Tensor:
    return batch.get(key)[i][batch["masks", "all_attention_mask"][i]]


@torch.no_grad()
def ends_of_plain_responses(plain, batch, *scored, stops: set[int], atol: float = 1e-5) -> set[int]:
    """Check log-probs and stop tokens of rows of one response; return the tokens that end them."""
    ends = set()
    for i in range(batch.batch_size[0]):
        ids, response = attended(batch, i, "tokens", "full"), attended(batch, i, *RESPONSE)
        want = plain_log_probs(plain, ids, 1.0)
        for td, expected in ((batch, want * response), *((td, want) for td in scored)):
            got = attended(td, i, "log_probs", "full").double()
            torch.testing.assert_close(got, expected, atol=atol, rtol=0)
        *inside, last = ids[response].tolist()
        assert not stops & set(inside), "generation went on after a stop token"
        assert (last in stops) != bool(batch["truncated"][i])
        assert int(batch["loss_mask"][i].sum()) == len(inside) + 1
        ends.add(last)
    assert stops & ends, "a stop token should have ended some response"
    return ends


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_and_scored_log_probs_are_those_of_a_plain_forward(kind, folders):
    """And every stop token ends a response and is part of it."""
    policy = load_policy(str(folders[kind]), max_new_tokens=8)
    batch = collect(prompts(4), ChatEnv(Words(), group_size=G), policy)
    score = load_reference(policy).get_new_version(score_mask_key=None, log_probs_key="log_probs")
    scored = (score(td.clone()) for td in (batch, batch.exclude("group_id")))  # in groups, alone
    stops = set(policy.tokenizer.convert_tokens_to_ids(STOPS[kind]))
    plain = SimpleNamespace(model=plain_model(folders[kind]))
    ends = ends_of_plain_responses(plain, batch, *scored, stops=stops)
    assert stops < ends, "each stop token should have ended some response, and some were cut"


@pytest.fixture(scope="module")
def smollm():
    return load_policy(EMBEDDED, max_new_tokens=8)


def test_the_real_smollm2_samples_and_scores_as_a_plain_forward_does(smollm):
    row = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    td = TensorDict({"stream": fold(1, torch.arange(1))}, [1])
    td.set("row", NonTensorStack(NonTensorData(row)))
    batch = collect(td, ChatEnv(Words(), group_size=2), smollm)
    scored = smollm.get_new_version(generate=False, inplace=False)(batch)
    stops = {smollm.tokenizer.eos_token_id}
    ends_of_plain_responses(smollm, batch, scored, stops=stops, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_follows_the_sampled_ids_whichever_stop_token_ended_them(kind, folders):
    policy = load_policy(str(folders[kind]), max_new_tokens=8)
    batch = collect(prompts(4), ChatEnv(Words(2), group_size=G, max_turns=2), policy)
    tokenizer = policy.tokenizer
    asked, again = ({"role": "user", "content": text} for text in ("x", "again"))
    chat = [asked, {"role": "assistant", "content": "RESPONSE"}, again]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    tail = tokenizer(text.partition("RESPONSE")[2], add_special_tokens=False)["input_ids"]
    assert tail[0] == tokenizer.convert_tokens_to_ids(TURN_ENDS[kind])
    ends = set()
    for i in range(batch.batch_size[0]):
        ids = attended(batch, i, "tokens", "full")
        response = attended(batch, i, *RESPONSE)
        first = int(response.int().argmax())
        stop = first + int((~response[first:]).int().argmax())  # of the first response
        last = int(ids[stop - 1])
        gap = tail[1:] if last == tail[0] else tail  # what is not the template's end gets it
        assert ids[stop : stop + len(gap)].tolist() == gap
        assert response[stop + len(gap) :].all()
        ends.add(last)
    assert set(tokenizer.convert_tokens_to_ids(STOPS[kind])) < ends


@pytest.mark.parametrize("kind", KINDS)
def test_sft_learns_the_response_and_the_token_that_ends_the_turn(kind, folders):
    policy = load_policy(str(folders[kind]))
    parts = {"task": Words(), "env": ChatEnv(Words()), "policy": policy}
    batch = Demonstrations(**parts, runtime=one_process(), prompts_per_iteration=4)(0)
    end = policy.tokenizer.convert_tokens_to_ids(TURN_ENDS[kind])
    learnt = [batch["tokens", "full"][i][batch["loss_mask"][i]].tolist() for i in range(4)]
    assert [ids[-1] for ids in learnt] == [end] * 4
    assert all(end not in ids[:-1] for ids in learnt)
    wanted = {row["messages"][-1]["content"] for row in Words().demonstrations()}
    assert {policy.tokenizer.decode(ids[:-1]).strip() for ids in learnt} == wanted


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("smollm2", marks=pytest.mark.runs)])
def test_the_saved_model_is_what_was_trained(kind, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", False)  # the same products in both
    policy = load_policy(str(folders.get(kind, EMBEDDED)))
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(1.1)
    save_model(policy, tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), plain_model(tmp_path)
    ids = tokenizer.apply_chat_template(CHAT, return_dict=True, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == policy.renderer.render(CHAT).ids
    with torch.no_grad():
        got, want = model(input_ids=ids).logits, policy.model(input_ids=ids).logits
    torch.testing.assert_close(got, want, atol=1e-6 if kind in KINDS else 1e-4, rtol=0)
    stops = tokenizer.convert_tokens_to_ids(STOPS.get(kind, [tokenizer.eos_token]))
    assert {*torch.tensor([model.generation_config.eos_token_id]).flatten().tolist()} == {*stops}


def test_a_model_without_chat_template_needs_one_named_and_keeps_it_when_saved(folders, tmp_path):
    bare, out = tmp_path / "bare", tmp_path / "out"
    save_model(load_policy(str(folders["qwen2"])), bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="chat_template=chatml"):
        load_policy(str(bare))
    policy = load_policy(str(bare), chat_template="chatml", max_new_tokens=4)
    assert policy.tokenizer.convert_tokens_to_ids("<|im_end|>") in policy.stop_ids
    save_model(policy, out)
    ids = AutoTokenizer.from_pretrained(out).apply_chat_template(CHAT, return_dict=False)
    assert ids == policy.renderer.render(CHAT).ids
