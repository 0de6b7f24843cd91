"""S4: RolloutFromModel, on a tiny GPT-2."""

import json
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from contracts import plain_log_probs
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from transformers import GenerationConfig, GPT2LMHeadModel

from policies import GPT2RewardModel
from specification_rows.row import Page, close, defaults, raises
from specification_rows.shared import checkpoint, folder
from trainer import AdaptiveKLController, ConstantKLController, RolloutFromModel
from trainer.torchrl.prompt_data import DEFAULT_DATASET, PromptData, get_dataloader

S4 = Page("S4")
STEPS = 6
SIZES = ((3, 5), (1, 5), (5, 0), (2, 6))  # tokens of prompt and label of each row
IDS = [3, 50, 0, 70, 0, 61, 62, 5, 9]  # of each row; many of them end a response, one is the pad


@cache
def models() -> tuple[GPT2LMHeadModel, GPT2LMHeadModel, GPT2RewardModel]:
    """Return a model whose responses end early often, a different reference, a reward model."""
    torch.manual_seed(17)  # not that of the checkpoints
    model = GPT2LMHeadModel.from_pretrained(checkpoint("gpt2"))
    model.generation_config.eos_token_id = list(range(60))
    return model, GPT2LMHeadModel(model.config), GPT2RewardModel(str(checkpoint("gpt2")))


def make(**options: Any) -> RolloutFromModel:
    return RolloutFromModel(*models(), **{"max_new_tokens": STEPS, **options})


def batch() -> PromptData:
    mask = torch.arange(9) < torch.tensor([[sum(sizes)] for sizes in SIZES])
    ids = torch.tensor(IDS).expand(4, 9).masked_fill(~mask, 0)
    rindex = torch.tensor([prompt - 1 for prompt, _ in SIZES])
    return PromptData(input_ids=ids, attention_mask=mask, prompt_rindex=rindex, batch_size=[4])


@cache
def rolled() -> tuple[TensorDict, tuple]:
    """Return a rollout with what generate made of its batch."""
    roll = make()
    torch.manual_seed(5)  # some responses end early, some at the limit
    made = roll.generate(batch())
    return roll.create_rollout_td(batch(), *made), made


def chats(td: TensorDict | None = None) -> list[tuple[list[int], list[int]]]:
    """Return the prompt of each row of a rollout and its response up to the first end."""
    out, td = [], rolled()[0] if td is None else td
    for (size, _), tokens in zip(SIZES, td["action"].tolist(), strict=True):
        ends = [i for i, token in enumerate(tokens) if token in make().eos_token_ids]
        out.append((IDS[:size], tokens[: (ends or [STEPS - 1])[0] + 1]))
    return out


def by_hand(
    model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probs of a response by a plain forward."""
    policy = SimpleNamespace(model=model.eval())
    return plain_log_probs(policy, torch.tensor(prompt + response), temperature)[len(prompt) :]


def end_score(ids: list[int]) -> float:
    given = torch.tensor([ids])
    with torch.no_grad():
        return float(models()[2].eval()(given, torch.ones_like(given))[1])


def loader(batch_size: int = 4) -> Any:
    """Return the page's loader over a local file."""
    path = Path(folder().name) / "tldr.jsonl"
    texts = ({"prompt": f"What is {'the ' * (i % 3)}{i}?", "label": f" {i}."} for i in range(6))
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    more = {"dataset_name": str(path), "tokenizer": checkpoint("gpt2"), "device": "cpu"}
    return get_dataloader(batch_size, block_size=550, tensorclass_type=PromptData, **more)


@S4.rows()
def arguments():
    td, made = rolled()
    yield "RolloutFromModel(model, ref_model, reward_model, kl_coef=0.1, ...): defaults"
    text = """model, ref_model, reward_model, kl_coef=0.1, max_new_tokens=50, score_clip=10.0,
        kl_scheduler=None, num_steps=None"""
    defaults(RolloutFromModel, text)
    yield "arg model: a transformers model; ref_model: a frozen one for the KL penalty"
    alone = RolloutFromModel(models()[0], models()[0], models()[2], max_new_tokens=STEPS)
    assert not alone.rollout_from_data(batch())["next", "reward_kl"].any()
    assert td["next", "reward_kl"].any()
    assert not any(v.requires_grad for v in td.values(include_nested=True, leaves_only=True))
    yield "arg reward_model: input_ids, attention_mask -> rewards, end_scores"
    rewards, end_scores = models()[2](batch().input_ids, batch().attention_mask)
    assert (rewards.shape[:2], end_scores.shape) == ((4, 9), (4, 1))
    yield "arg reward_model: a TensorDictModule"
    keys = {"in_keys": ["input_ids", "attention_mask"], "out_keys": ["rewards", "end_scores"]}
    other = RolloutFromModel(*models()[:2], TensorDictModule(models()[2], **keys))
    close(other.create_rollout_td(batch(), *made)["next", "reward"], td["next", "reward"])
    yield "arg kl_coef: initial KL coefficient"
    more = make(kl_coef=0.5).create_rollout_td(batch(), *made)
    close(more["next", "reward_kl"], 5 * td["next", "reward_kl"])
    yield "arg max_new_tokens"
    assert make(max_new_tokens=3).rollout_from_data(batch()).batch_size == (4, 3)
    yield "arg score_clip: scores are clipped to (-score_clip, score_clip)"
    raw = make(score_clip=0.01).create_rollout_td(batch(), *made)["next", "reward_raw"]
    close(raw.abs().max(), 0.01)
    yield "arg kl_scheduler: KLControllerBase, asked by step_scheduler()"
    adaptive = partial(AdaptiveKLController, init_kl_coef=0.3, target=0.1, horizon=10)
    for control in (adaptive(), ConstantKLController(kl_coef=0.3), None):
        roll = make(kl_coef=0.3, kl_scheduler=control)
        roll.rollout_from_data(batch())
        roll.step_scheduler()
        assert (roll.kl_coef != 0.3) == isinstance(control, AdaptiveKLController)
    yield "arg num_steps: steps between two optimizations"
    roll, found = make(kl_coef=0.3, kl_scheduler=adaptive(), num_steps=2), []
    for _ in range(4):
        roll.rollout_from_data(batch())
        found.append(roll.kl_coef)
    assert 0.3 == found[0] != found[1] == found[2] != found[3]
    yield "arg score_clip=0"
    none = make(score_clip=0).create_rollout_td(batch(), *made)["next", "reward_raw"]
    assert not none.any()


@S4.rows()
def example():
    yield "example: the printed keys, shapes and dtypes (block 100 in place of 550)"
    data = next(loader())
    data.input_ids, data.attention_mask = data.input_ids[:, :100], data.attention_mask[:, :100]
    model = GPT2LMHeadModel.from_pretrained(checkpoint("gpt2"))
    ref_model = GPT2LMHeadModel(GPT2LMHeadModel.config_class(**model.config.to_dict()))
    reward_model = GPT2RewardModel(model_path=str(checkpoint("gpt2")))
    rollout = RolloutFromModel(model, ref_model, reward_model).rollout_from_data(data)
    wide, one, whole = (4, 50, 150), (4, 50, 1), torch.int64
    seen = {"input_ids": (wide, whole), "attention_mask": (wide, torch.bool)}
    rewards = dict.fromkeys(("reward", "reward_raw", "reward_kl"), (one, torch.float32))
    after = {**seen, **rewards, "done": (one, torch.bool)}
    printed = {"action": ((4, 50), whole), "sample_log_prob": (one, torch.float32), **seen}
    printed |= {("next", key): value for key, value in after.items()}
    found = {
        key: (tuple(value.shape), value.dtype)
        for key, value in rollout.items(include_nested=True, leaves_only=True)
    }
    assert found.pop(("next", "terminated")) == (one, torch.bool)
    assert (found, rollout.batch_size) == (printed, (4, 50))
    yield "example: get_dataloader(batch_size, block_size, tensorclass_type, device, ...)"
    assert isinstance(data, PromptData)
    assert next(loader(3)).input_ids.shape == (3, 550)
    yield "example: torchrl.data.rlhf, CarperAI/openai_summarize_tldr"
    assert DEFAULT_DATASET == "CarperAI/openai_summarize_tldr"
    yield "prompt_rindex: the right index of the prompt"
    data = next(loader())
    made = make(max_new_tokens=2).generate(data)[0]
    size = int(data.prompt_rindex[0]) + 1
    assert made[0, :size].tolist() == data.input_ids[0, :size].tolist()


@S4.rows()
def create_rollout_td():
    td, made = rolled()
    after = td["next"]
    yield "create_rollout_td(batch, generated, log_probs, log_ratio), also of a TensorDict"
    defaults(RolloutFromModel.create_rollout_td, "batch, generated, log_probs, log_ratio")
    assert (make().create_rollout_td(batch().to_tensordict(), *made) == td).all()
    yield "create_rollout_td: action, the generated tokens"
    for i, (prompt, response) in enumerate(chats()):
        assert made[0][i, : len(prompt + response)].tolist() == prompt + response
    yield "create_rollout_td: input_ids and attention_mask before each step, and in next after it"
    for i, (prompt, response) in enumerate(chats()):
        for t in range(STEPS):
            for place, count in ((td, t), (after, t + 1)):
                seen = place["input_ids"][i, t][place["attention_mask"][i, t]]
                assert seen.tolist() == prompt + response[:count]
    yield "create_rollout_td: sample_log_prob of each token"
    for i, chat in enumerate(chats()):
        want = by_hand(models()[0], *chat)
        close(td["sample_log_prob"][i, : len(want), 0], want, 1e-4)
    yield "create_rollout_td: terminated at the first EOS or the token limit, done is its copy"
    ends = [[len(response) - 1] for _, response in chats()]
    assert [flags.nonzero().flatten().tolist() for flags in after["terminated"][..., 0]] == ends
    assert {STEPS - 1} < {end[0] for end in ends}
    assert torch.equal(after["done"], after["terminated"])
    yield "create_rollout_td: reward = reward_raw + reward_kl"
    close(after["reward"], after["reward_raw"] + after["reward_kl"])
    yield "create_rollout_td: reward_raw, of the reward model, without the KL term"
    for i, (prompt, response) in enumerate(chats()):
        label = end_score(IDS[: sum(SIZES[i])]) if SIZES[i][1] else 0.0
        want = torch.zeros(STEPS)
        want[len(response) - 1] = end_score(prompt + response) - label  # paid once, at the end
        close(after["reward_raw"][i, :, 0], want, 1e-4)
    yield "create_rollout_td: reward_kl, the KL term"
    for i, chat in enumerate(chats()):
        want = -0.1 * (by_hand(models()[0], *chat) - by_hand(models()[1], *chat))
        close(after["reward_kl"][i, : len(want), 0], want, 1e-4)


@S4.rows()
def generate():
    generated, log_probs, ratio = rolled()[1]
    yield "generate(batch, generation_config=None)"
    defaults(RolloutFromModel.generate, "batch, generation_config=None")
    greedy = GenerationConfig(do_sample=False, max_new_tokens=4)
    one, two = (make().generate(batch(), greedy)[0] for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == (4, 9 + 4)
    yield "generate: the batch has input_ids and prompt_rindex"
    with raises((KeyError, ValueError, AttributeError)):
        make().generate(TensorDict({"input_ids": batch().input_ids}, [4]))
    yield "generate returns generated [B, Ti + To], log_probs_gen and log_ratio"
    shapes = [tuple(value.shape) for value in (generated, log_probs, ratio)]
    assert shapes == [(4, 9 + STEPS), (4, STEPS, 1), (4, STEPS)]
    close(-0.1 * ratio[..., None], rolled()[0]["next", "reward_kl"])
    yield "static logprobs_of_labels(logits, labels)"
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    want = torch.distributions.Categorical(logits=logits).log_prob(labels)
    close(RolloutFromModel.logprobs_of_labels(logits, labels), want)
