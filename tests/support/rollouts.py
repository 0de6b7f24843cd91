"""RolloutFromModel on a tiny GPT-2, and its values by plain forwards."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from transformers import GPT2LMHeadModel

from policies import GPT2RewardModel
from support.policies import plain_log_probs
from support.wrappers import checkpoint, folder
from trainer import RolloutFromModel
from trainer.torchrl.prompt_data import PromptData, get_dataloader

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
