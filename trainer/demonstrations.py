"""Batches of demonstrations for SFT, and their log-probs by the start policy."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from envs.chat_env import ChatEnv
from envs.rows import LazyRows
from envs.tasks.task import Message, Row, Task, naming
from policies.chats.containers import Masks, Tokens
from policies.chats.pieces import OUTSIDE
from policies.chats.renderer import Rendered
from policies.load import load_reference
from policies.padding import pad, pad_mask
from policies.protocols import Policy
from policies.scorer import score_batch
from trainer.runtime import Runtime
from trainer.sources import pick_rows


class Demonstrations:
    """Render the iteration's demonstrations; `mask` selects the tokens of the loss.

    "assistant": every assistant turn; "prompt": only the last turn, all before is its prompt.
    Messages whose numbers are in a row's "unlearnt" are never in the loss. If the template rewrites
    earlier turns, each turn becomes a row (`rows_by_turn`).
    """

    reads_rows = "demonstrations"  # the value of algorithm.rows

    def __init__(
        self,
        *,
        task: Task,
        env: ChatEnv,
        policy: Policy,
        runtime: Runtime,
        prompts_per_iteration: int,
        mask: str = "assistant",
    ) -> None:
        self.rows: Sequence[dict[str, Any]] = task.demonstrations()
        self.num_chats = len(self.rows)
        if policy.renderer.rewrites_turns:
            self.rows = rows_by_turn(self.rows, last_only=mask == "prompt")
        self.env, self.policy = env, policy
        self.runtime, self.size = runtime, prompts_per_iteration
        self.prompt_masked = mask == "prompt"

    def __call__(self, iteration: int) -> TensorDict:
        """Return this rank's demonstrations of the iteration, [B, T]."""
        chosen = pick_rows(iteration, size=len(self.rows), count=self.size, seed=self.runtime.seed)
        rows = [self._render(self.rows[i]) for i in chosen[self.runtime.local_slice(self.size)]]
        ids, assistant, learnt = zip(*rows, strict=True)
        batch = make_batch(ids, self.policy.device, assistant)
        return batch.set("loss_mask", pad(learnt, False).to(self.policy.device))

    def _render(self, row: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, assistant mask and loss mask of a row."""
        messages, render = self.env.messages(row), self.policy.renderer.render
        added = len(messages) - len(row["messages"])  # 1 for a system prompt
        with naming(row):
            done = render(messages, require_assistant=True, last_turn="last_turn" in row)
            ids, assistant = torch.tensor(done.ids), torch.tensor(done.assistant)  # [T] each
            if "last_turn" in row:
                return ids, assistant, assistant
            unlearnt = {place + added for place in row.get("unlearnt", ())}
            return ids, assistant, self._learnt(messages, done, unlearnt)

    def _learnt(self, messages: Sequence[Message], done: Rendered, unlearnt: set[int]) -> Tensor:
        """Return the loss mask, [T]."""
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [i for i in places if i not in unlearnt]
        if self.prompt_masked:
            wanted = [i for i in wanted if i == places[-1]]
        # A template may mark one more token at the chat's end (Phi-3): part of the last turn.
        turn = torch.tensor(done.turns).clamp(max=len(places) - 1)  # [T]
        marked = len(set(turn.tolist()) - {OUTSIDE})
        if wanted != places and marked < len(places):
            raise ValueError(
                f"expected {len(places)} assistant turns in the mask of "
                f"{self.policy.renderer.name}, to learn some of them, got {marked}"
            )
        return torch.isin(turn, torch.tensor([places.index(i) for i in wanted]))  # [T]


def rows_by_turn(rows: Sequence[Row], *, last_only: bool = False) -> Sequence[Row]:
    """Return a row for each assistant turn in the loss: the chat up to this turn.

    Only the row's last turn is in the loss. A thinking template keeps the thought of the last turn
    and drops earlier thoughts, so each turn is learnt in the context in which it is sampled later.

    >>> chat = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    >>> [len(row["messages"]) for row in rows_by_turn([{"messages": chat}])]
    [2, 4]
    """

    def turns(row: Row) -> list[int]:
        places = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
        places = places[-1:] if last_only else places
        return [i for i in places if i not in row.get("unlearnt", ())]

    def make(place: tuple[int, int]) -> Row:
        row = {k: v for k, v in rows[place[0]].items() if k != "unlearnt"}
        return row | {"messages": row["messages"][: place[1] + 1], "last_turn": True}

    places = [(i, turn) for i, row in enumerate(rows) for turn in turns(row)]
    if not places:
        raise ValueError(f"expected a turn to learn, got {len(rows)} chats without; see weight")
    return LazyRows(make, places, listed=getattr(rows, "listed", True))


def make_batch(
    ids: Sequence[Tensor], device: Any, assistant: Sequence[Tensor] | None = None
) -> TensorDict:
    """Return token rows from data as a batch [B, T] at temperature 1."""
    size = len(ids)
    masks = Masks(
        all_attention_mask=pad_mask([len(row) for row in ids], device=device),
        all_assistant_mask=None if assistant is None else pad(assistant, False).to(device),
        padded=True,
        batch_size=[size],
    )
    batch = TensorDict(batch_size=[size])
    batch.set("tokens", Tokens(full=pad(ids).to(device), padded=True, batch_size=[size]))
    batch.set("masks", masks)
    return batch.set("temperature", torch.ones(size, device=device))


class ReferenceLogProbs:
    """Score demonstrations with the start policy, for objectives that stay near it.

    Writes ref_log_probs.full [B, T] at the tokens of the loss mask.
    """

    def __init__(self, *, policy: Policy, micro_batch_tokens: int | None = None) -> None:
        self.scorer, self.limit = load_reference(policy).scorer, micro_batch_tokens

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Add the log-probs to the batch."""
        ref = score_batch(self.scorer, batch, batch.get("loss_mask"), limit=self.limit)
        return batch.set(("ref_log_probs", "full"), ref)
