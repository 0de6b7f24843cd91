"""Rollouts of a causal language model, scored by a reward model: one step per token, as TorchRL's.

A row of the data has T0 tokens, a response at most S. A row of `generated` [B, T] has T = T0 + S
tokens: the prompt at its place in the data, the response after it, then padding. The attention
mask, `prompt_rindex` and the response's first end token mark real tokens, never a token's id in the
prompt.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from policies.models.find import token_ids
from policies.padding import compact, widen
from policies.sampler import Sampled, Stop, sample
from policies.scorer import Scorer
from policies.torchrl.generate_kwargs import config_temperature, follow, until_end
from trainer.kl.controllers import KLControllerBase
from trainer.torchrl.prompt_data import PromptData


class RolloutFromModel:
    """Generate and reward responses: a score at the end, a KL penalty at each token.

    `model` and `ref_model` are causal language models of transformers; `reward_model` maps
    input_ids and attention_mask to rewards and end_scores, as a module or a TensorDictModule.
    `kl_coef` is the first coefficient; `kl_scheduler` updates it after every `num_steps` rollouts
    and at each call of `step_scheduler`. `max_new_tokens` is S; scores are clipped to
    +-`score_clip`. EOS and pad ids are from the model and `tokenizer`. All models run in
    eval mode and without gradients.

    >>> from policies import GPT2RewardModel, load_policy
    >>> model = load_policy("tiny").model
    >>> roll = RolloutFromModel(model, model, GPT2RewardModel(model), max_new_tokens=3)
    >>> ids = torch.tensor([[5, 6, 7, 8]])
    >>> batch = PromptData(input_ids=ids, attention_mask=ids > 0, prompt_rindex=torch.tensor([2]),
    ...     batch_size=[1])
    >>> roll.rollout_from_data(batch)["next", "input_ids"].shape
    torch.Size([1, 3, 7])
    """

    def __init__(
        self,
        model: nn.Module,
        ref_model: nn.Module,
        reward_model: nn.Module,
        kl_coef: float = 0.1,
        max_new_tokens: int = 50,
        score_clip: float = 10.0,
        kl_scheduler: KLControllerBase | None = None,
        num_steps: int | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        self.model, self.ref_model, self.reward_model = model, ref_model, reward_model
        self.kl_coef, self.max_new_tokens, self.score_clip = kl_coef, max_new_tokens, score_clip
        self.kl_scheduler, self.num_steps = kl_scheduler, num_steps
        sources = (getattr(model, "generation_config", None), model.config, tokenizer)
        ends = [i for source in sources for i in token_ids(source, "eos_token_id")]
        pads = [i for source in sources for i in token_ids(source, "pad_token_id")]
        self.eos_token_ids = frozenset(ends)
        self.pad_token_id = [*pads, *ends, 0][0]  # never attended, so any id is valid
        self._scorers = [Scorer(m, share_prompts=False) for m in (model, ref_model)]
        self._kl_queue: deque[float] = deque(maxlen=num_steps)

    @torch.no_grad()
    def rollout_from_data(self, batch: PromptData, generation_config: Any = None) -> TensorDict:
        """Return `create_rollout_td` of what `generate` returns for the batch."""
        responses = self.generate(batch, generation_config)
        return self.create_rollout_td(batch, *responses, generation_config=generation_config)

    @torch.no_grad()
    def generate(
        self, batch: PromptData, generation_config: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return generated [B, T], log_probs [B, S, 1] and log_ratio [B, S] of responses.

        Without a GenerationConfig tokens are sampled from the model's full distribution. With one,
        the model's `generate` follows it; its max_new_tokens, if any, is S. log_probs are computed
        while sampling; log_ratio is log p(model) - log p(ref_model) at the sampling temperature;
        both are 0 after the end. Raise ValueError for beams, several responses per prompt and
        stopping criteria without an end token.
        """
        ids, prompt = _prompts(batch)
        steps = getattr(generation_config, "max_new_tokens", None) or self.max_new_tokens
        with _evaluating(self.model, self.ref_model):
            sampled = self._draw(ids, prompt, steps, generation_config)
            alive = widen(sampled.mask.to(ids.device), steps)
            columns = _columns(batch, steps)
            blank = self.pad_token_id
            response = widen(sampled.ids.to(ids.device), steps).masked_fill(~alive, blank)  # [B, N]
            total = ids.shape[1] + steps
            generated = widen(ids.masked_fill(~prompt, blank), total, blank)
            generated = generated.scatter(-1, columns, response)  # [B, T]
            keep = widen(torch.zeros_like(prompt), total).scatter(-1, columns, alive)
            rows = (generated, widen(prompt, total) | keep, keep)  # [B, T] each
            temperature = config_temperature(generation_config)
            scored = [
                scorer(*_moved(scorer, rows), temperature=temperature).log_probs.to(ids.device)
                for scorer in self._scorers
            ]
        policy, reference = scored  # log-probs [B, T]
        log_ratio = (policy - reference).gather(-1, columns)  # [B, N]
        log_probs = widen(sampled.log_probs.to(ids.device), steps)
        return generated, log_probs.unsqueeze(-1), log_ratio

    @torch.no_grad()
    def create_rollout_td(
        self,
        batch: PromptData | TensorDictBase,
        generated: Tensor,
        log_probs: Tensor,
        log_ratio: Tensor,
        *,
        generation_config: Any = None,
    ) -> TensorDict:
        """Return the rollout [B, S] of an environment in which a step is a token.

        Takes the output of `generate` and its `generation_config`, for the EOS ids. Keys:
        action [B, S]; input_ids, attention_mask [B, S, T] before the token and, under "next",
        after it; sample_log_prob [B, S, 1]; next.{terminated, done, reward, reward_raw, reward_kl}
        [B, S, 1]. An episode is done at its first EOS or else at its last step. There reward_raw is
        the clipped end score, minus the label's end score if there is a label. After it, tokens do
        not change and rewards are 0.
        """
        _, prompt = _prompts(batch)
        steps = log_probs.shape[1]
        action = generated.gather(-1, _columns(batch, steps))
        alive = until_end(action, self._ends(generation_config))  # [B, S]
        done = (alive & ~widen(alive[:, 1:], steps)).unsqueeze(-1)  # [B, S, 1]
        rindex = batch.get("prompt_rindex")[:, None]
        place = torch.arange(generated.shape[1], device=generated.device)
        # The last column before each step and after the last one.
        last = rindex + widen(alive.cumsum(-1), steps + 1, side="left")  # [B, S + 1]
        real = widen(prompt, len(place)) | (place > rindex)  # [B, T]
        seen = (place <= last[:, :, None]) & real[:, None]  # [B, S + 1, T]
        score = self._scores(generated, seen[:, -1]) - self._label_scores(batch)  # [B]
        score = score.clamp(-self.score_clip, self.score_clip)
        reward_raw = torch.where(done, score[:, None, None], 0.0)
        reward_kl = -self.kl_coef * log_ratio.unsqueeze(-1)  # [B, S, 1]
        before, after = (
            torch.where(part, generated[:, None], self.pad_token_id)
            for part in (seen[:, :-1], seen[:, 1:])
        )
        td = {
            "action": action,
            "input_ids": before,
            "attention_mask": seen[:, :-1].clone(),
            "sample_log_prob": log_probs,
            "next": {
                "input_ids": after,
                "attention_mask": seen[:, 1:].clone(),
                "done": done,
                "terminated": done.clone(),
                "reward": reward_raw + reward_kl,
                "reward_raw": reward_raw,
                "reward_kl": reward_kl,
            },
        }
        self._measure(log_ratio)
        rollout = TensorDict(td, batch_size=action.shape, device=generated.device)
        return rollout.refine_names(..., "time")

    def step_scheduler(self) -> None:
        """Update the coefficient by the scheduler, if any."""
        if self.kl_scheduler is not None:
            self.kl_coef = float(self.kl_scheduler.update(list(self._kl_queue)))
            self._kl_queue.clear()

    @staticmethod
    def logprobs_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p(label) [*] under logits [*, V]; no shift.

        >>> RolloutFromModel.logprobs_of_labels(torch.zeros(1, 4), torch.tensor([2])).exp().item()
        0.25
        """
        return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def _draw(self, ids: Tensor, mask: Tensor, steps: int, config: Any) -> Sampled:
        """Sample a response to each prompt, by leash's sampler or the model's `generate`."""
        prompts = compact(ids, mask, side="left"), compact(mask, mask, side="left")
        args, ends = _moved(self.model, prompts), self._ends(config)
        if config is None:
            streams = torch.randint(2**62, (len(ids),))
            stop = Stop(ends)
            return sample(self.model, *args, streams=streams, stop=stop, max_new_tokens=steps)
        limits = {"max_new_tokens": steps, "ends": ends, "pad_token_id": self.pad_token_id}
        return follow(self.model, *args, config, **limits)

    def _ends(self, config: Any) -> frozenset[int]:
        return frozenset(token_ids(config, "eos_token_id")) or self.eos_token_ids

    def _scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the end scores [B] of sequences [B, T]."""
        model, names = self.reward_model, ("input_ids", "attention_mask")
        inputs = dict(zip(names, _moved(model, (ids, mask)), strict=True))
        with _evaluating(model):
            if isinstance(model, TensorDictModuleBase):
                score = model(TensorDict(inputs, batch_size=ids.shape[:1]))["end_scores"]
            else:
                _, score = model(**inputs)
        return score.reshape(len(ids)).float().to(ids.device)

    def _label_scores(self, batch: PromptData | TensorDictBase) -> Tensor | float:
        """Return the end score of each row of the data, [B]; 0 for rows without a label."""
        ids, mask = batch.get("input_ids"), batch.get("attention_mask").bool()
        place = torch.arange(ids.shape[1], device=ids.device)
        labelled = (mask & (place > batch.get("prompt_rindex")[:, None])).any(-1)
        return torch.where(labelled, self._scores(ids, mask), 0.0) if labelled.any() else 0.0

    def _measure(self, log_ratio: Tensor) -> None:
        """Queue the KL of a rollout for the scheduler; step it every `num_steps` rollouts."""
        if self.kl_scheduler is None:
            return
        value = log_ratio.sum(-1).mean()  # nats per sequence
        if self.kl_scheduler.takes_rewards:  # a mean over steps, as TorchRL's
            value = -self.kl_scheduler.coeff * log_ratio.mean()
        self._kl_queue.append(float(value))
        if len(self._kl_queue) == self.num_steps:
            self.step_scheduler()


def _prompts(batch: PromptData | TensorDictBase) -> tuple[Tensor, Tensor]:
    """Return the ids [B, T0] of a batch and the mask of its prompts."""
    ids, mask, rindex = (batch.get(k) for k in ("input_ids", "attention_mask", "prompt_rindex"))
    place = torch.arange(ids.shape[1], device=ids.device)
    prompt = mask.bool() & (place <= rindex[:, None])
    if not (prompt & (place == rindex[:, None])).any(-1).all():
        raise ValueError(f"expected prompt_rindex at attended tokens, got {rindex.tolist()}")
    return ids, prompt


def _columns(batch: PromptData | TensorDictBase, steps: int) -> Tensor:
    """Return the columns of the response's tokens in `generated`, [B, S]."""
    rindex = batch.get("prompt_rindex")
    return rindex[:, None] + 1 + torch.arange(steps, device=rindex.device)


def _moved(module: nn.Module, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the tensors on the module's device."""
    device = next(module.parameters(), tensors[0]).device
    return [tensor.to(device) for tensor in tensors]


@contextmanager
def _evaluating(*modules: nn.Module) -> Iterator[None]:
    """Run modules in eval mode, then restore the mode of each submodule."""
    before = {part: part.training for module in modules for part in module.modules()}
    try:
        for part in before:
            part.training = False
        yield
    finally:
        for part, mode in before.items():
            part.training = mode
