"""Reward models: a causal language model with a scalar head, one reward per token.

Letters: B rows, T tokens. The reward of token t comes from the hidden state at token t; a
sequence's score is the reward of its last attended token.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GPT2Config, GPT2Model

from policies.chats.renderer import Renderer
from policies.chats.templates import require_template
from policies.files import make_readable
from policies.host import bare, send
from policies.layout import pack_rows
from policies.load import load_policy
from policies.models.find import REWARD_WEIGHTS as WEIGHTS
from policies.models.find import (
    find_model,
    has_adapter,
    is_classifier,
    load_model,
    load_tokenizer,
    no_reward_model,
    token_ids,
)
from policies.padding import pad, pad_mask, positions
from policies.scorer import Scorer, body_of
from policies.transformers_policy import TransformersPolicy


class GPT2RewardModel(nn.Module):
    """Score token by token with the body of a GPT-2, or of any other causal language model.

    `model_path`: a folder, a hub id or a loaded model, whose body is then shared; None is a GPT-2
    with random weights. The head has width 1. It is loaded from a ForSequenceClassification with
    one score or from a folder that `save_pretrained` wrote, otherwise random. Without an attention
    mask the `pad_token_id`s (default: the model's pad, else its EOS) at a row's end are padding.

    >>> from policies.load import load_policy
    >>> reward_model = GPT2RewardModel(load_policy("tiny").model)
    >>> rewards, end_scores = reward_model(torch.tensor([[5, 6, 7]]), torch.ones(1, 3))
    >>> rewards.shape, end_scores.shape
    (torch.Size([1, 3]), torch.Size([1, 1]))
    """

    def __init__(self, model_path: Any = None, pad_token_id: int | None = None) -> None:
        super().__init__()
        model = _load(model_path)
        self.config = model.config
        self.transformer = body_of(model)
        first = next(self.transformer.parameters())
        width = self.config.get_text_config().hidden_size
        new = nn.Linear(width, 1, bias=False, device=first.device, dtype=first.dtype)
        self.lm_head = getattr(model, "score", new)
        if isinstance(model_path, (str, Path)) and (file := Path(model_path) / WEIGHTS).is_file():
            self.load_state_dict(load_file(file))
        fills = [token_ids(self.config, name) for name in ("pad_token_id", "eos_token_id")]
        known = [pad_token_id, *fills[0], *fills[1]]
        self.pad_token_id = next((i for i in known if i is not None), None)
        loss = GPT2RewardModel.compute_reward_loss
        self.compute_reward_loss = partial(loss, pad_token_id=self.pad_token_id)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (rewards [B, T], end_scores [B, 1]), float32, of ids padded on any side."""
        mask = _attended(input_ids, attention_mask, self.pad_token_id)
        hidden = self.transformer(
            input_ids=input_ids, attention_mask=mask, position_ids=positions(mask), use_cache=False
        ).last_hidden_state  # [B, T, H]
        rewards = self.lm_head(hidden).squeeze(-1).float()
        order = torch.arange(mask.shape[-1], device=mask.device)
        return rewards, rewards.gather(-1, (mask * order).amax(-1, keepdim=True))

    @staticmethod
    def compute_reward_loss(
        chosen_batch: Any, rejected_batch: Any, pad_token_id: int | None = None
    ) -> Tensor:
        """Return the mean over pairs of the mean of -log sigmoid(chosen - rejected) over tokens.

        The tokens run from the first difference to the end of the longer sequence. Equal pairs
        are skipped; if all are equal the loss is 0. Both batches hold input_ids, rewards and
        (optional) attention_mask, [B, T], right-padded.
        Source: Stiennon et al. 2020 (arXiv 2009.01325) section 3.4, token by token.
        """
        chosen, rejected = (_read(b, pad_token_id) for b in (chosen_batch, rejected_batch))
        inside = compared_tokens(*chosen[:2], *rejected[:2])
        term = -F.logsigmoid(chosen[2] - rejected[2]) * inside  # [B, T]
        count = inside.sum(-1)
        return (term.sum(-1) / count.clamp(min=1)).sum() / (count > 0).sum().clamp(min=1)

    def save_pretrained(self, folder: str | Path, *, save_original_format: bool = False) -> None:
        """Write config, body and head into a folder that `model_path` takes.

        save_original_format: an argument of transformers, ignored: names are the modules' names.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        weights = {name: value.contiguous() for name, value in self.state_dict().items()}
        save_file(weights, Path(folder) / WEIGHTS)
        make_readable(Path(folder) / WEIGHTS)


def compared_tokens(chosen: Tensor, mask: Tensor, rejected: Tensor, other: Tensor) -> Tensor:
    """Return the mask of the compared tokens of right-padded pairs, [B, T] bool.

    It covers the first difference of ids or masks to the end of the longer row.

    >>> one, two = torch.tensor([[1, 2, 3, 0]]), torch.tensor([[1, 4, 0, 0]])
    >>> compared_tokens(one, one > 0, two, two > 0).int().tolist()
    [[0, 1, 1, 0]]
    """
    differ = (mask != other) | (mask & other & (chosen != rejected))
    return (differ.cumsum(-1) > 0) & (mask | other)


def _load(model: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if model is None:
        return GPT2Model(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()
    if (Path(model) / WEIGHTS).is_file():
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        return AutoModel.from_config(config).eval()
    files = find_model(str(model))
    if not is_classifier(files.folder):
        return load_model(files)
    classifier: Any = load_model(files, dtype="auto", classifier=True)
    labels = classifier.config.num_labels
    if labels != 1 or not hasattr(classifier, "score"):
        raise ValueError(
            f"{files.folder}: expected a causal language model with one score, got "
            f"{type(classifier).__name__} with {labels}"
        )
    return classifier


def _attended(ids: Tensor, mask: Tensor | None, pad_token_id: int | None) -> Tensor:
    """Return the bool mask; without one, all tokens but the pad ids at the end of each row."""
    if mask is not None:
        return mask.bool()
    if pad_token_id is None:
        return torch.ones_like(ids, dtype=torch.bool)
    return (ids != pad_token_id).flip(-1).cumsum(-1).flip(-1) > 0


def _read(batch: Any, pad_token_id: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and rewards of a TensorDict or an object with these attributes."""
    ids, mask, rewards = (
        batch.get(name, None) if hasattr(batch, "get") else getattr(batch, name, None)
        for name in ("input_ids", "attention_mask", "rewards")
    )
    if ids is None or rewards is None:
        raise ValueError("expected a batch with input_ids and rewards; run the reward model on it")
    mask = _attended(ids, mask, pad_token_id)
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("expected right-padded rows: the tokens of a pair are compared by place")
    return ids, mask, rewards


@dataclass(frozen=True)
class Rewards:
    """The reward of each token, [B, T], padding included."""

    rewards: Tensor


class RewardScorer(Scorer):
    """Score sequences with a reward model; arguments that only log-probs need are ignored."""

    def forward(self, tokens: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> Rewards:
        """Return the rewards of tokens [B, T]; an empty result still depends on every parameter."""
        tokens, mask = (send(bare(x), self.device) for x in (tokens, attention_mask))  # [B, T] each
        if not len(tokens):
            anchor = sum(p.flatten()[0].float() * 0 for p in self.parameters())
            return Rewards(tokens.float() + anchor)
        with self.precision():
            return Rewards(self.model(tokens, mask)[0])


def ids_to_end(
    renderer: Renderer, chat: list[dict], *, complete: bool = True, rendered: bool = False
) -> Tensor:
    """Return the ids of a chat to the end of its last turn; a cut turn ends in its last token.

    `rendered`: keep the text that the template writes after a complete turn.
    """
    done = renderer.render(chat, require_assistant=True)
    if rendered and complete:
        return torch.tensor(done.ids)
    end = max(place for place, inside in enumerate(done.assistant) if inside)
    if not complete and done.ids[end] in renderer.stop_ids:
        end -= 1
    return torch.tensor(done.ids[: end + 1])


class ChatRewards:
    """Score chats with a reward model: a folder or hub id that also has tokenizer and template.

    `limit` bounds the padded tokens of one forward. A ForSequenceClassification scores the whole
    text of the template, as its authors do.
    """

    def __init__(self, folder: str | Path, *, limit: int = 2**15) -> None:
        files = find_model(str(folder))
        if fault := no_reward_model(str(files.folder)):  # else the head would be random
            raise ValueError(fault)
        self.rendered = is_classifier(files.folder)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = GPT2RewardModel(files.folder).requires_grad_(False).eval().to(self.device)
        tokenizer = load_tokenizer(files)
        require_template(tokenizer)
        self.renderer, self.limit = Renderer(tokenizer), limit

    @torch.no_grad()
    def __call__(self, chats: list[list[dict]], complete: list[bool] | None = None) -> list[float]:
        """Return the reward at the end of each chat; `complete` (default: all) marks ended ones."""
        complete = [True] * len(chats) if complete is None else complete
        pairs = zip(chats, complete, strict=True)
        rows = [
            ids_to_end(self.renderer, chat, complete=ended, rendered=self.rendered)
            for chat, ended in pairs
        ]
        ids, mask = pad(rows).to(self.device), pad_mask([len(r) for r in rows], device=self.device)
        ends = [self.model(ids[part], mask[part])[1] for part in pack_rows(mask, self.limit)]
        return torch.cat(ends).flatten().tolist()


def load_reward_model(model: str, **options: Any) -> TransformersPolicy:
    """Load `model` as a policy for the trainer, with a reward model on its body.

    Arguments: see `load_policy`. The result cannot generate.
    """
    policy = load_policy(model, **options)
    if has_adapter(policy.model):
        raise ValueError("expected policy.lora.r=0 for a reward model, got an adapter")
    policy.scorer = RewardScorer(GPT2RewardModel(policy.model), autocast=policy.scorer.autocast)
    return policy
