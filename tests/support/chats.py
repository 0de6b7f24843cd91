"""Prompts and chats for wrappers and environments, and how outputs are read and compared."""

from collections.abc import Sequence

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from envs.tasks.task import Task, assistant
from policies.chats.containers import ChatHistory, Text, Tokens
from policies.chats.history import History
from policies.padding import pad, pad_mask, rows
from policies.random import fold
from policies.torchrl.transformers_wrapper import TransformersWrapper
from support.policies import make_wrapper


def data(*rows: dict) -> TensorDict:
    """Return what an environment is reset with: rows, each with a stream of its own."""
    td = TensorDict({"stream": fold(0, torch.arange(len(rows)))}, batch_size=[len(rows)])
    return td.set("row", NonTensorStack(*[NonTensorData(row) for row in rows]))


def responded(td: TensorDict, *texts: str, complete: Sequence[bool] = ()) -> TensorDict:
    """Write the responses as a policy would, in history mode."""
    pairs = zip(texts, complete or [True] * len(texts), strict=True)
    said = History.from_chats([[assistant(t) | {"is_complete": c}] for t, c in pairs])
    full = td["history"].prompt.extend(said, inplace=False, dim=-1)
    return td.set(("history", "full"), full)


def start(task: Task, count: int | None = None) -> TensorDict:
    return data(*list(task.rows("train"))[:count])


TEXTS = ("Sort 3", "Write", "the house with the other people")
CHATS = [[{"role": "user", "content": t}] for t in TEXTS]
SPOKEN = [[*c, {"role": "assistant", "content": c[0]["content"][::-1]}] for c in CHATS]


def prompts(mode: str = "history") -> TensorDict:
    """Return three prompts of different lengths in one of the input modes."""
    policy = make_wrapper()
    td = TensorDict({"stream": fold(0, torch.arange(3))}, batch_size=[3])
    texts = [policy.renderer.text(chat, add_generation_prompt=True) for chat in CHATS]
    if mode == "history":
        return td.set("history", ChatHistory(prompt=History.from_chats(CHATS), batch_size=[3]))
    if mode == "text":
        return td.set("text", Text(prompt=texts, batch_size=[3]))
    ids = [torch.tensor(policy.tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts]
    td.set("tokens", Tokens(prompt=pad(ids, side="left"), padded=True, batch_size=[3]))
    return td.set("attention_mask", pad_mask([len(i) for i in ids], side="left"))


def spoken(mode: str = "history") -> TensorDict:
    """Return three whole chats."""
    td = TensorDict(batch_size=[3])
    if mode == "history":
        return td.set("history", ChatHistory(full=History.from_chats(SPOKEN), batch_size=[3]))
    texts = [make_wrapper().renderer.text(chat) for chat in SPOKEN]
    if mode == "text":
        return td.set("text", Text(full=texts, batch_size=[3]))
    ids = [make_wrapper().tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
    return td.set("tokens", lazy_stack([Tokens(full=torch.tensor(i)) for i in ids]))


def scoring(**changes) -> TransformersWrapper:
    return make_wrapper().get_new_version(**{"generate": False, **changes})


def sequences(td) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return (ids, log-probs, response mask) of each row of a generated td, without padding."""
    keys = (("tokens", "full"), ("log_probs", "full"), ("masks", "all_response_mask"))
    columns = [rows(td, key) for key in keys]
    keep = rows(td, ("masks", "all_attention_mask"))
    return [tuple(v[m] for v in row) for *row, m in zip(*columns, keep, strict=True)]


def same(a: TensorDict, b: TensorDict) -> None:
    for (ids, values, mask), (ids2, values2, mask2) in zip(sequences(a), sequences(b), strict=True):
        assert torch.equal(ids, ids2)
        assert torch.equal(mask, mask2)
        torch.testing.assert_close(values, values2, atol=1e-5, rtol=0)
