"""Collect: play chats to their end; one row per trajectory comes out, right-padded [B, T].

A row is the exact ids of all turns. Sampled tokens carry their log-probs and the response mask;
each turn's task reward stands on the last token sampled in that turn. A group with a reply that the
task drops has no reward and an empty loss mask.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from envs.env import EnvBase
from policies.chats.containers import LogProbs, Masks, Tokens
from policies.padding import pad, pad_mask, unpad
from policies.wrappers.transformers_wrapper import TransformersWrapper


@dataclass
class Trajectory:
    """One chat as it grows: parallel lists over its tokens, and what happened."""

    ids: list[int]
    assistant: list[bool]
    response: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    reward_errors: float = 0.0
    texts: list[str] = field(default_factory=list)
    dropped: bool = False
    success: bool = False
    truncated: bool = False
    prompt: str = ""

    def __post_init__(self) -> None:
        self.extend(self.ids, assistant=self.assistant, start=0)

    def extend(self, ids: list[int], *, assistant: list[bool], start: int) -> None:
        """Take the whole row `ids`, whose tokens from `start` on are new and were not sampled."""
        new = len(ids) - start
        self.ids, self.assistant = ids, assistant
        self.response += [False] * new
        self.log_probs += [0.0] * new
        self.reward += [0.0] * new

    def reply(self, ids: list[int], log_probs: list[float], reward: float) -> None:
        """Append a sampled reply and its reward."""
        self.ids = self.ids + ids
        self.assistant = self.assistant + [True] * len(ids)
        self.response += [True] * len(ids)
        self.log_probs += log_probs
        self.reward += [0.0] * (len(ids) - 1) + [reward]


def collect(
    prompts: TensorDictBase,
    env: EnvBase,
    policy: TransformersWrapper,
) -> TensorDict:
    """Return the trajectories of all samples of `prompts` [P] as one batch [B, T]."""
    policy = ready(policy, pad_output=True, return_log_probs=True, text_key=None)
    td = env.reset(prompts)
    start, state = td, list(td.keys())
    trajectories: list[Trajectory] = []
    alive = torch.arange(td.batch_size[0])
    while True:
        td = policy(td)
        if not trajectories:
            trajectories = _begin(td)
        td = env.step(td)
        _record([trajectories[i] for i in alive.tolist()], td)
        going = (~td.get(("next", "done"))).squeeze(-1)
        if not going.any():
            return _stack(trajectories, start, policy)
        alive = alive[going]
        _continue(trajectories, alive.tolist(), td, policy)
        ids = [trajectories[i].ids for i in alive.tolist()]
        td = _with_ids(carry(td, state)[going], ids)


def ready(policy: Any, *, input_mode: str = "history", **needed: Any) -> Any:
    """Return the policy, or a version of it with these outputs, written in place.

    Raises ValueError unless it generates one reply to each prompt in this mode.
    """
    needed["inplace"] = True
    if policy.num_samples is not None or policy.input_mode != input_mode or not policy.generate:
        raise ValueError(
            f"collect expects a policy with generate=True, {input_mode=} and "
            "num_samples=None (the env repeats the prompts), got "
            f"{policy.generate}, {policy.input_mode!r}, {policy.num_samples}"
        )
    if policy.limits.narrowed:
        raise ValueError(
            f"collect expects the whole distribution, got {policy.limits.narrowed} in "
            "generate_kwargs, which the log-probs of training could not follow; drop them"
        )
    if all(getattr(policy, name) == value for name, value in needed.items()):
        return policy
    return policy.get_new_version(**needed)


def carry(td: TensorDictBase, state: list[str]) -> TensorDictBase:
    """Return the state that the next turn starts from: its keys of "next", else of td itself."""
    following = td.get("next")
    out = td.empty()
    for key in state:
        out.set(key, following.get(key) if key in following else td.get(key))
    return out


def prolong(
    policy: Any, ids: list[int], before: list[dict], after: list[dict]
) -> tuple[list[int], list[bool]]:
    """Return the ids of a row up to its next reply, and which of the new ones are the assistant's.

    `ids` end in a reply; `before` and `after` are the messages then and at the next prompt.
    """
    if after[: len(before)] != before:
        raise ValueError(
            "expected the next prompt to go on from the sampled turns, got one that a transform "
            "edited; let it add a message instead (AddThinkingPrompt: edit_last_turn=False)"
        )
    start = len(ids)
    ids = policy.renderer.extend(ids, before, after[len(before) :])
    # A reply cut by the token limit was closed: that end of turn is the assistant's.
    closed = ids[start] in policy.stop_ids
    return ids, [closed] + [False] * (len(ids) - start - 1)


def _begin(td: TensorDictBase) -> list[Trajectory]:
    """Return one trajectory per row, holding its prompt."""
    attention = td.get(("masks", "all_attention_mask"))
    full, assistant = td.get(("tokens", "full")), td.get(("masks", "all_assistant_mask"))
    prompt = attention & ~td.get(("masks", "all_response_mask"))
    chats = td.get(("history", "prompt")).chats()
    ids, marks = unpad(full, prompt), unpad(assistant, prompt)
    return [
        Trajectory(i.tolist(), a.tolist(), prompt=chat[-1]["content"])
        for i, a, chat in zip(ids, marks, chats, strict=True)
    ]


def _record(trajectories: list[Trajectory], td: TensorDictBase) -> None:
    """Add one turn's reply, log-probs and reward to each trajectory."""
    mask = td.get(("masks", "all_response_mask"))
    ids = unpad(td.get(("tokens", "full")), mask)
    values = unpad(td.get(("log_probs", "full")), mask)
    following = td.get("next")
    reward = following.get("reward").squeeze(-1).tolist()
    parts = following.get("reward_part", None)
    parts = {} if parts is None else {k: v.squeeze(-1).tolist() for k, v in parts.items()}
    names = ("reward_errors", "dropped", "success", "truncated")
    errors, dropped, success, truncated = (following.get(n).squeeze(-1).tolist() for n in names)
    texts = [chat[-1]["content"] for chat in td.get(("history", "response")).chats()]
    for i, row in enumerate(trajectories):
        row.reply(ids[i].tolist(), values[i].tolist(), reward[i])
        for name, value in parts.items():
            row.parts[name] = _sum(row.parts.get(name, math.nan), value[i])
        row.texts.append(texts[i])
        row.reward_errors += errors[i]
        row.dropped |= dropped[i]
        row.success, row.truncated = success[i], truncated[i]


def _sum(before: float, value: float) -> float:
    """Return the sum of those of two values that apply: a part that does not is NaN."""
    return value if math.isnan(before) else before if math.isnan(value) else before + value


def _continue(trajectories: list[Trajectory], alive: list[int], td: TensorDictBase, policy) -> None:
    """Append what the template puts between a reply and the next generation prompt."""
    before = td.get(("history", "full")).chats()
    after = td.get(("next", "history", "prompt")).chats()
    going = (~td.get(("next", "done"))).squeeze(-1).nonzero().squeeze(-1).tolist()
    for i, k in zip(alive, going, strict=True):
        if len(after[k]) == len(before[k]) and "step_count" not in td.get("next"):
            raise ValueError(  # the policy would answer itself for ever
                "expected an env that ends a chat or answers it, got one that does neither; give "
                "ChatEnv a task or max_turns=1, or append StepCounter(max_steps=...)"
            )
        row = trajectories[i]
        ids, new = prolong(policy, row.ids, before[k], after[k])
        row.extend(ids, assistant=row.assistant + new, start=len(row.ids))


def _with_ids(td: TensorDictBase, ids: list[list[int]]) -> TensorDictBase:
    """Give the next turn's input its exact ids as the prompt."""
    prompt = pad([torch.tensor(row) for row in ids], side="left")
    td.set("tokens", Tokens(prompt=prompt, padded=True, batch_size=[len(ids)]))
    return td.set("attention_mask", pad_mask([len(row) for row in ids], side="left"))


def _drop(batch: TensorDict) -> None:
    """Take whole groups with a dropped reply out of the loss mask and of the rewards."""
    lost = torch.isin(batch.get("group_id"), batch.get("group_id")[batch.get("dropped")])  # [B]
    batch.set("dropped", lost)
    batch.set("loss_mask", batch.get("loss_mask") & ~lost.unsqueeze(-1))
    batch.set("reward_raw", batch.get("reward_raw").masked_fill(lost.unsqueeze(-1), 0.0))


def _stack(trajectories: list[Trajectory], start: TensorDictBase, policy) -> TensorDict:
    """Return finished trajectories as a batch, a row each."""
    size = len(trajectories)
    device = policy.device

    def dense(name: str, dtype: torch.dtype) -> Tensor:
        return pad([torch.tensor(getattr(t, name), dtype=dtype) for t in trajectories]).to(device)

    response = dense("response", torch.bool)
    out = TensorDict(batch_size=[size])
    out.set("tokens", Tokens(full=dense("ids", torch.int64), padded=True, batch_size=[size]))
    masks = Masks(
        all_attention_mask=pad_mask([len(t.ids) for t in trajectories], device=device),
        all_assistant_mask=dense("assistant", torch.bool),
        all_response_mask=response,
        padded=True,
        batch_size=[size],
    )
    out.set("masks", masks)
    gen = LogProbs(full=dense("log_probs", torch.float32), padded=True, batch_size=[size])
    out.set("log_probs", gen)
    out.set("loss_mask", response.clone())
    out.set("reward_raw", dense("reward", torch.float32))
    for name in trajectories[0].parts:
        values = torch.tensor([t.parts[name] for t in trajectories])
        out.set(("reward_part", name), values.to(device))
    for name in ("success", "truncated", "dropped", "reward_errors"):
        out.set(name, torch.tensor([getattr(t, name) for t in trajectories], device=device))
    _drop(out.set("group_id", start.get("group_id").to(device)))
    out.set("policy_version", start.get("policy_version").to(device))  # of the first turn
    out.set("temperature", torch.full((size,), policy.temperature or 1.0, device=device))
    out.set("prompt", NonTensorStack(*[t.prompt for t in trajectories]))
    return out.set("response", NonTensorStack(*["\n".join(t.texts) for t in trajectories]))
