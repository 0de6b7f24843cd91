"""Run chats to their end and return one right-padded row [B, T] per trajectory.

A row holds the exact ids of all turns. Sampled tokens have log-probs and are in the response mask;
a turn's task reward is at its last sampled token. Dropped groups have no reward and no loss.
"""

from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from envs.env import Env
from policies.chats.containers import LogProbs, Masks, Tokens
from policies.chats.messages import OF_CHAT
from policies.host import send
from policies.padding import compact, pad, pad_mask, positions, widen
from policies.protocols import Generator
from trainer.batch import RESPONSE

FLAGS = ("success", "truncated", "dropped")


class Trajectories:
    """Growing chats: token fields [B, T], right-padded with 0; flags and reward sums [B].

    `first` is the policy's output of the first turn. A row starts with the prompt in `first`.
    """

    def __init__(self, first: TensorDictBase) -> None:
        prompt = first.get(("masks", "all_attention_mask")) & ~first.get(RESPONSE)  # [B, T]
        size, device = len(prompt), prompt.device
        self.lengths = torch.zeros(size, dtype=torch.int64, device=device)
        kinds = {"ids": torch.int64, "assistant": torch.bool, "response": torch.bool}
        kinds |= {"log_probs": torch.float32, "reward": torch.float32}
        self.tokens = {
            name: torch.zeros(size, 0, dtype=kind, device=device) for name, kind in kinds.items()
        }
        self.flags = {name: torch.zeros(size, dtype=torch.bool) for name in FLAGS}
        self.errors = torch.zeros(size, dtype=torch.float64)
        self.parts: dict[str, Tensor] = {}  # name -> [B] float64, NaN if the part never applied
        self.logged: dict[str, Tensor] = {}  # metric of a transform -> [B] float64, sum over turns
        self.version = first.get("policy_version")
        self.prompts = _last_contents(first, "prompt")
        self.systems = _system_contents(first)
        self.texts: list[list[str]] = [[] for _ in range(size)]
        self.messages: list[list[dict]] = [[] for _ in range(size)]  # only for chats that went on
        ids, assistant = first.get(("tokens", "full")), first.get(("masks", "all_assistant_mask"))
        self.append(torch.arange(size, device=device), prompt, ids=ids, assistant=assistant)

    def append(self, rows: Tensor, mask: Tensor, **values: Tensor) -> None:
        """Append the masked entries of `values` [A, n] to A rows; fields without values get 0."""
        places = mask.nonzero().unbind(1)  # [K] each; each bool index would synchronise the GPU
        column = (self.lengths[rows].unsqueeze(-1) + positions(mask))[places]  # [K]
        row = rows[places[0]]  # [K]
        self.lengths[rows] += mask.sum(-1)
        width = int(self.lengths.max())
        for name, before in self.tokens.items():
            after = widen(before, width)
            if name in values:
                after[row, column] = values[name][places]
            self.tokens[name] = after

    def record(self, rows: Tensor, td: TensorDictBase) -> None:
        """Add one turn of the A unfinished rows: response, log-probs, reward and flags."""
        sampled, log_probs = td.get(RESPONSE), td.get(("log_probs", "full"))
        ids, following, cpu_rows = td.get(("tokens", "full")), td.get("next"), rows.cpu()
        masks = {"assistant": sampled, "response": sampled}
        self.append(rows, sampled, ids=ids, log_probs=log_probs, **masks)
        reward = following.get("reward").squeeze(-1).to(log_probs)
        self.tokens["reward"][rows, self.lengths[rows] - 1] = reward
        self.errors[cpu_rows] += following.get("reward_errors").squeeze(-1).cpu()
        for name, flags in self.flags.items():
            now = following.get(name).squeeze(-1).cpu()
            flags[cpu_rows] = (flags[cpu_rows] | now) if name == "dropped" else now
        for name, value in following.get("reward_part", TensorDict()).items():
            total = self.parts.setdefault(name, torch.full_like(self.errors, torch.nan))
            total[cpu_rows] = _sum(total[cpu_rows], value.squeeze(-1).cpu().double())
        for name, value in following.get("logged", TensorDict()).items():
            total = self.logged.setdefault(name, torch.zeros_like(self.errors))
            total[cpu_rows] += value.cpu().double()
        for row, text in zip(cpu_rows.tolist(), _last_contents(td, "response"), strict=True):
            self.texts[row].append(text)
            if chat := self.messages[row]:
                chat.append({"role": "assistant", "content": text})

    def extend(self, rows: Tensor, td: TensorDictBase, policy: Generator) -> Tensor:
        """Append the tokens after a response: the env's messages and the next generation prompt.

        td [A] is the last turn of the A unfinished rows. Returns the mask of rows that go on, [A]:
        a chat without room for the next prompt ends as truncated.
        """
        before = td.get(("history", "full")).chats()
        after = td.get(("next", "history", "prompt")).chats()
        for row, chat in zip(rows.tolist(), after, strict=True):
            self.messages[row] = [{k: m[k] for k in m if k not in OF_CHAT} for m in chat]
        last = self.tokens["ids"][rows, self.lengths[rows] - 1].tolist()
        unanswered = any(len(a) == len(b) for b, a in zip(before, after, strict=True))
        if "step_count" not in td.get("next") and unanswered:  # the chat would never end
            raise ValueError(
                "expected an env that ends a chat or adds a message, got a chat without either; "
                "give ChatEnv a task or max_turns=1, or append StepCounter(max_steps=...)"
            )
        new = [tokens_between(policy, *turn) for turn in zip(last, before, after, strict=True)]
        sizes = torch.tensor([len(row) for row, _ in new], device=rows.device)
        fits = self.lengths[rows] + sizes <= getattr(policy, "room", torch.inf)  # [A]
        self.flags["truncated"][rows[~fits].cpu()] = True
        if fits.any():
            new = [pair for pair, goes_on in zip(new, fits.tolist(), strict=True) if goes_on]
            ids, assistant = (pad(column).to(rows.device) for column in zip(*new, strict=True))
            mask = pad_mask([len(row) for row, _ in new], device=rows.device)
            self.append(rows[fits], mask, ids=ids, assistant=assistant)
        return fits

    @property
    def attention(self) -> Tensor:
        """Return the mask of real tokens, [B, T]."""
        index = torch.arange(self.tokens["ids"].shape[1], device=self.lengths.device)
        return index < self.lengths.unsqueeze(-1)

    def batch(self, group_id: Tensor, policy: Generator) -> TensorDict:
        """Return the finished trajectories as a batch [B, T] on the policy's device."""
        size, device = len(self.lengths), policy.device
        tokens = {name: value.to(device) for name, value in self.tokens.items()}
        common: Any = {"padded": True, "batch_size": [size]}
        batch = TensorDict(batch_size=[size])
        batch.set("tokens", Tokens(full=tokens["ids"], **common))
        masks = Masks(
            all_attention_mask=self.attention.to(device),
            all_assistant_mask=tokens["assistant"],
            all_response_mask=tokens["response"],
            **common,
        )
        batch.set("masks", masks)
        batch.set("log_probs", LogProbs(full=tokens["log_probs"], **common))
        batch.set("loss_mask", tokens["response"].clone())
        batch.set("reward_raw", tokens["reward"])
        for name, total in self.parts.items():
            batch.set(("reward_part", name), send(total.float(), device))
        for name, total in self.logged.items():
            batch.set(("logged", name), send(total.float(), device))
        for name, flags in self.flags.items():
            batch.set(name, send(flags, device))
        batch.set("reward_errors", send(self.errors.float(), device))
        batch.set("group_id", send(group_id, device))
        batch.set("policy_version", send(self.version, device))
        batch.set("temperature", torch.full((size,), policy.temperature or 1.0, device=device))
        batch.set("prompt", NonTensorStack(*self.prompts))
        batch.set("system", NonTensorStack(*self.systems))
        batch.set("response", NonTensorStack(*["\n".join(texts) for texts in self.texts]))
        batch.set("messages", NonTensorStack(*map(NonTensorData, self.messages)))
        return _mask_dropped_groups(batch)


def collect(
    prompts: TensorDictBase, env: Env, policy: Generator, *, learn: bool = True
) -> TensorDict:
    """Return the trajectories of all samples of `prompts` [P] as one batch [B, T].

    Keys: trainer/batch.py. `policy_version` is the version that sampled a row's first turn. If
    `learn`, raise ValueError for a policy with top-k, top-p or min-p: it does not sample from the
    distribution that training scores.
    """
    if learn:
        check_scored(policy)
    policy = policy.for_rollouts()
    td = env.reset(prompts)
    group_id, keys = td.get("group_id"), list(td.keys())
    data = td.get("row").tolist() if "row" in keys else [{}] * len(group_id)
    answers = ["" if (answer := row.get("answer")) is None else str(answer) for row in data]
    td = policy(td)
    chats = Trajectories(td)
    rows = torch.arange(td.batch_size[0], device=chats.lengths.device)  # [A] unfinished
    while True:
        td = env.step(td)
        chats.record(rows, td)
        unfinished = (~td.get(("next", "done"))).squeeze(-1)
        goes_on = bool(unfinished.any())
        if goes_on:
            rows, td = rows[unfinished.to(rows.device)], td[unfinished]
            fits = chats.extend(rows, td, policy)  # [A]
            goes_on = bool(fits.any())
        if goes_on and not fits.all():
            rows, td = rows[fits], td[fits.cpu()]
        if not goes_on:
            batch = chats.batch(group_id, policy)
            batch.set("row", NonTensorStack(*map(NonTensorData, data)))
            return batch.set("answer", NonTensorStack(*answers))
        td = _with_ids(next_state(td, keys), chats.tokens["ids"][rows], chats.attention[rows])
        td = policy(td)


def check_scored(policy: Generator) -> None:
    """Raise ValueError unless the policy samples from the distribution that it scores."""
    if narrowing := policy.limits.unscored():
        raise ValueError(
            f"training expects samples of the full distribution, got {narrowing}; remove these "
            "keys (docs/kl_estimators.md)"
        )


def next_state(td: TensorDictBase, state: list[str]) -> TensorDictBase:
    """Return the keys `state` of the next turn, from "next" or, if it lacks a key, from td."""
    following = td.get("next")
    out = td.empty()
    for key in state:
        out.set(key, following.get(key) if key in following else td.get(key))
    return out


def tokens_between(
    policy: Any, last: int, before: list[dict], after: list[dict]
) -> tuple[Tensor, Tensor]:
    """Return the ids [n] between two responses of a chat, and their assistant mask [n].

    `last`: last id of the first response; `before`, `after`: messages before and after the env's
    step.
    """
    if after[: len(before)] != before:
        raise ValueError("a transform edited earlier messages; transforms may only add messages")
    ids = torch.tensor(policy.renderer.extend([last], before, after[len(before) :])[1:])
    assistant = torch.zeros(len(ids), dtype=torch.bool)
    # If the token limit cut the response, the first id is the end of turn that was not sampled.
    assistant[0] = int(ids[0]) in policy.stop_ids
    return ids, assistant


def _with_ids(td: TensorDictBase, ids: Tensor, attention: Tensor) -> TensorDictBase:
    """Set the ids so far [A, T], left-padded, as the prompt of the next turn."""
    prompt = compact(ids, attention, side="left")
    td.set("tokens", Tokens(prompt=prompt, padded=True, batch_size=[len(ids)]))
    return td.set("attention_mask", compact(attention, attention, side="left"))


def _last_contents(td: TensorDictBase, field: str) -> list[str]:
    """Return the content of the last message of each chat."""
    return [chat[-1] for chat in td.get(("history", field)).get("content")]


def _system_contents(td: TensorDictBase) -> list[str]:
    """Return the content of each prompt's system message, or ""."""
    prompts = td.get(("history", "prompt"))
    chats = zip(prompts.get("role"), prompts.get("content"), strict=True)
    return [contents[0] if roles[0] == "system" else "" for roles, contents in chats]


def _sum(before: Tensor, value: Tensor) -> Tensor:
    """Return the sum; NaN (the reward part does not apply) counts as 0 unless both are NaN."""
    both = torch.where(before.isnan(), value, before + value)
    return torch.where(value.isnan(), before, both)


def _mask_dropped_groups(batch: TensorDict) -> TensorDict:
    """Set loss mask and rewards to 0 in the groups that have a dropped response."""
    drop = torch.isin(batch.get("group_id"), batch.get("group_id")[batch.get("dropped")])  # [B]
    batch.set("dropped", drop)
    batch.set("loss_mask", batch.get("loss_mask") & ~drop.unsqueeze(-1))
    return batch.set("reward_raw", batch.get("reward_raw").masked_fill(drop.unsqueeze(-1), 0.0))
