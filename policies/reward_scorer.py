"""A reward model where the trainer expects a scorer, and one that scores whole chats."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.chats.chat_template import Renderer
from policies.chats.templates import require_template
from policies.load import load_policy
from policies.models import find_model, has_adapter, load_tokenizer
from policies.packing import pack_rows
from policies.padding import pad, pad_mask
from policies.reward_model import WEIGHTS, GPT2RewardModel
from policies.scorer import Scorer
from policies.wrappers.transformers_wrapper import TransformersWrapper


@dataclass(frozen=True)
class Rewards:
    """The reward of each token, [B, T]; padding has one too."""

    rewards: Tensor


class RewardScorer(Scorer):
    """Score sequences with a reward model; what only log-probs need is ignored."""

    def forward(self, tokens: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> Rewards:
        """Return the rewards of tokens [B, T]; no rows give none, tied to every parameter."""
        if not len(tokens):
            anchor = sum(p.flatten()[0].float() * 0 for p in self.parameters())
            return Rewards(tokens.float() + anchor)
        with self.precision():
            return Rewards(self.model(tokens, attention_mask)[0])


def ids_to_end(renderer: Renderer, chat: list[dict], *, complete: bool = True) -> Tensor:
    """Return the ids of a chat up to the end of its last turn; a cut one ends in its last token."""
    done = renderer.render(chat, continue_final_message=not complete, require_assistant=complete)
    if not complete:
        return torch.tensor(done.ids)
    end = max(place for place, kept in enumerate(done.assistant) if kept)
    return torch.tensor(done.ids[: end + 1])


class ChatRewards:
    """Score chats by the reward model in a folder, which holds its tokenizer and template too.

    `limit` bounds the padded tokens of one forward.
    """

    def __init__(self, folder: str | Path, *, limit: int = 2**15) -> None:
        found = find_model(str(folder))
        if not (found.folder / WEIGHTS).is_file():  # its head would be random
            raise ValueError(f"expected a reward model with {WEIGHTS}, got {found.folder}")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = GPT2RewardModel(found.folder).requires_grad_(False).eval().to(self.device)
        tokenizer = load_tokenizer(found)
        require_template(tokenizer)
        self.renderer, self.limit = Renderer(tokenizer), limit

    @torch.no_grad()
    def __call__(self, chats: list[list[dict]], complete: list[bool] | None = None) -> list[float]:
        """Return the reward at the end of each chat; `complete` (default: all) says which ended."""
        complete = [True] * len(chats) if complete is None else complete
        pairs = zip(chats, complete, strict=True)
        rows = [ids_to_end(self.renderer, chat, complete=ended) for chat, ended in pairs]
        ids, mask = pad(rows).to(self.device), pad_mask([len(r) for r in rows], device=self.device)
        ends = [self.model(ids[part], mask[part])[1] for part in pack_rows(mask, self.limit)]
        return torch.cat(ends).flatten().tolist()


def load_reward_model(model: str, **options: Any) -> TransformersWrapper:
    """Return what a trainer calls its policy, with a reward model on the body of `model` inside.

    Arguments are those of `load_policy`. Its tokenizer and template render chats; it cannot
    generate.
    """
    policy = load_policy(model, **options)
    if has_adapter(policy.model):
        raise ValueError(
            "expected policy.lora.r=0 for a reward model, got an adapter: its folder holds the "
            "whole body that scores later"
        )
    policy.scorer = RewardScorer(GPT2RewardModel(policy.model), autocast=policy.scorer.autocast)
    return policy
