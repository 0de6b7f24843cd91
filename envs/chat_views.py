"""A chat as messages: what an env writes for a prompt, and how it reads a reply.

The messages are the truth in every input mode; texts and ids stand beside them (chat_modes.py).
Left out on purpose: replies that call tools in fields of their own (tool_calls).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from policies.chats.containers import ChatHistory
from policies.chats.history import History

MODES = ("history", "text", "tokens")
POLICY_KEYS = (*MODES, "masks", "log_probs")  # what a policy writes, new in every turn

Chat = list[dict[str, Any]]
Said = tuple[str, bool]  # the text of a reply, and whether it ended by its own end-of-turn token


def write_prompt(
    td: TensorDictBase,
    mode: str,
    renderer: Any,
    history: History,
    ids: list[Tensor] | None = None,
) -> TensorDictBase:
    """Write the next prompt into td: messages, in the other modes also its ids and text [B]."""
    td.set("history", ChatHistory(prompt=history, batch_size=td.batch_size))
    if mode != "history":
        from envs.chat_modes import write_rendered

        write_rendered(td, mode, renderer, history, ids)
    return td


def read_action(
    td: TensorDictBase, mode: str, renderer: Any, role: str
) -> tuple[History, list[Chat], list[Said]]:
    """Return the chats with their replies, as a history and as messages, and the replies."""
    if mode == "history":
        full = read_history(td, ("history", "full"))
        chats = full.chats()
        pairs = zip(chats, full.get("is_complete"), strict=True)
        return full, chats, [(chat[-1]["content"], bool(flags[-1])) for chat, flags in pairs]
    said = read_replies(td, mode, renderer)
    prompt = td.get(("history", "prompt"), None)
    if prompt is None:
        raise ValueError("step expected history.prompt, as reset and step give it, found none")
    replies = [[{"role": role, "content": text, "is_complete": end}] for text, end in said]
    full = prompt.extend(History.from_chats(replies), inplace=False, dim=-1)
    return full, full.chats(), said


def read_replies(td: TensorDictBase, mode: str, renderer: Any) -> list[Said]:
    """Return what the replies in an action say, the prompts left out."""
    if mode == "history":
        return read_action(td, mode, renderer, "")[2]
    from envs.chat_modes import said_in_text, said_in_tokens

    return said_in_text(td, renderer) if mode == "text" else said_in_tokens(td, renderer)


def read_history(td: TensorDictBase, key: tuple[str, ...]) -> History:
    """Return the history at a key (container, field); a bare History as the container is one."""
    owner = td.get(key[:-1], None)
    found = owner if isinstance(owner, History) else td.get(key, None)
    if found is None:
        raise ValueError(
            f"step expected {'.'.join(key)}, found none; let a policy in history mode write it, or "
            "set it to the prompt extended by the reply"
        )
    return found


def change_chats(td: TensorDictBase, changes: dict[int, Callable[[Chat], Chat]]) -> None:
    """Change the next prompt of some rows; ids of the prompt as it was are dropped."""
    if not changes:
        return
    chats = list(td.get(("history", "prompt")).unbind(0))
    for row, change in changes.items():
        chats[row] = History.from_chats(change(chats[row].messages()))
    td.set(("history", "prompt"), lazy_stack(chats))
    td.exclude("tokens", inplace=True)
