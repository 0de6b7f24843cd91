"""Write prompts and read responses of an env as messages, text or tokens.

Messages are authoritative in every input mode; texts and ids accompany them. Generation uses ids in
which only the template opens or closes a turn. In a text the template's markup and a content's
markup look alike, so text mode stores ids as well. Responses have no field tool_calls: calls stay
in the content, where TorchRL's parsers read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from envs.chat_env import Chat, read_history
from policies.chats.containers import ChatHistory, Text, Tokens
from policies.chats.history import History
from policies.chats.renderer import Renderer
from policies.padding import attended, is_ragged, rows
from policies.torchrl.specs import Composite, NonTensor, Unbounded

MODES = ("history", "text", "tokens")

CONTAINERS = {"history": ChatHistory, "text": Text, "tokens": Tokens}

ParsedResponse = tuple[str, bool]  # text of a response, and whether its end-of-turn token ended it


def write_prompt(
    td: TensorDictBase, mode: str, renderer: Any, history: History, ids: list[Tensor] | None = None
) -> TensorDictBase:
    """Write the next prompt into td: messages, in other modes also ids and text [B]."""
    td.set("history", ChatHistory(prompt=history, batch_size=td.batch_size))
    if mode == "text":
        texts = history.apply_chat_template(tokenizer=renderer, add_generation_prompt=True)
        td.set("text", Text(prompt=texts, batch_size=td.batch_size))
    if mode != "history" and ids is None:
        ids = [render_prompt(renderer, chat) for chat in history.chats()]
    if ids is not None:
        write_ids(td, ("tokens", "prompt"), ids)
    return td


def render_prompt(renderer: Renderer, chat: Chat) -> Tensor:
    """Return the ids of a chat with a generation prompt."""
    return torch.tensor(renderer.render(chat, add_generation_prompt=True).ids)


def read_action(
    td: TensorDictBase, mode: str, renderer: Any, role: str
) -> tuple[History, list[Chat], list[ParsedResponse]]:
    """Return the chats with their responses as a history and as messages, and the responses."""
    if mode == "history":
        full = read_history(td, ("history", "full"))
        chats = full.chats()
        pairs = zip(chats, full.get("is_complete"), strict=True)
        return full, chats, [(chat[-1]["content"], bool(flags[-1])) for chat, flags in pairs]
    parsed = read_responses(td, mode, renderer)
    prompt = td.get(("history", "prompt"), None)
    if prompt is None:
        raise ValueError("step expected history.prompt, as reset and step give it, found none")
    responses = [[{"role": role, "content": text, "is_complete": end}] for text, end in parsed]
    full = prompt.extend(History.from_chats(responses), inplace=False, dim=-1)
    return full, full.chats(), parsed


def read_responses(td: TensorDictBase, mode: str, renderer: Any) -> list[ParsedResponse]:
    """Return the responses in an action, without prompts."""
    if mode == "history":
        return read_action(td, mode, renderer, "")[2]
    return (
        read_text_responses(td, renderer) if mode == "text" else read_token_responses(td, renderer)
    )


def chat_specs(shape: torch.Size, mode: str, source: str, parts: list[str]) -> dict[str, Composite]:
    """Return the specs of a ChatEnv; reset reads `source`, `parts` are the reward's."""
    number = Unbounded(shape, dtype=torch.int64)
    names = ("history", mode, "tokens") if mode == "text" else ("history", mode)
    seen = {name: _container(name, "prompt", shape) for name in names}
    flag, value = Unbounded((*shape, 1), dtype=torch.bool), Unbounded((*shape, 1))
    rewards: dict[str, Any] = {"reward": value, "reward_errors": value}
    rewards |= {"success": flag, "dropped": flag}
    if parts:
        rewards["reward_part"] = Composite(dict.fromkeys(parts, value), shape=shape)
    flags = dict.fromkeys(("terminated", "truncated", "done"), flag)
    example = {"messages": [{"role": "user", "content": "a string"}]}
    source_spec = NonTensor(shape, example_data=example if source == "row" else "a string")
    return {
        "full_observation_spec": Composite(
            {**seen, "group_id": number, "turn": number}, shape=shape
        ),
        "full_reward_spec": Composite(rewards, shape=shape),
        "full_done_spec": Composite(flags, shape=shape),
        "full_action_spec": Composite({mode: _container(mode, "full", shape)}, shape=shape),
        "full_state_spec": Composite({source: source_spec}, shape=shape),
    }


def _container(mode: str, field: str, shape: torch.Size) -> Composite:
    spec = CONTAINERS[mode].default_spec(tuple(shape), keys=[field])
    if "padded" in spec:
        del spec["padded"]
    return spec


def make_renderer(tokenizer: Any, template_kwargs: dict[str, Any] | None, mode: str) -> Any:
    """Return a renderer of the template in template_kwargs, else the tokenizer's.

    Return None without a tokenizer; the text and tokens modes raise RuntimeError then.
    """
    kwargs = dict(template_kwargs or {})
    name = kwargs.pop("chat_template_name", None)
    template = kwargs.pop("chat_template", name)
    if kwargs:
        raise ValueError(
            "template_kwargs: expected chat_template or chat_template_name, got "
            f"{sorted(kwargs)}; a prompt is always unpadded, with a generation prompt"
        )
    if tokenizer is None and mode != "history":
        raise RuntimeError(f"input_mode={mode!r} expected a tokenizer to render chats, got None")
    return None if tokenizer is None else Renderer(tokenizer, template)


def messages_of(value: Any, role: str) -> list[list[dict[str, Any]]]:
    """Return the chats of a data entry [P]: texts (of `role`), lists of messages or histories."""
    if isinstance(value, History):
        return value.chats() if value.ndim > 1 else [[m] for m in value.messages()]
    chats = []
    for item in value if isinstance(value, list) else value.tolist():
        if isinstance(item, str):
            item = [{"role": role, "content": item}]
        elif isinstance(item, dict):
            item = [item]
        chats.append(item.messages() if isinstance(item, History) else list(item))
    return chats


def write_action(td: TensorDictBase, mode: str, renderer: Any, role: str) -> TensorDictBase:
    """Write the complete response "a string" to every chat of td as an action."""
    if mode == "history":
        full = [[*c, {"role": role, "content": "a string"}] for c in td["history"].prompt.chats()]
        td.set(("history", "full"), History.from_chats(full))
        return td
    ids = renderer.tokenizer("a string", add_special_tokens=False)["input_ids"]
    ids = torch.tensor([*ids, min(renderer.stop_ids)])
    if mode == "text":
        response = renderer.tokenizer.decode(ids)
        td["text"].full = [prompt + response for prompt in _texts(td, "prompt") or []]
        return td
    prompts = rows(td, ("tokens", "prompt")) or []
    tokens = [Tokens(prompt=p, full=torch.cat([p, ids])) for p in prompts]
    return td.set("tokens", lazy_stack(tokens))


def write_ids(td: TensorDictBase, key: tuple[str, ...], ids: Sequence[Tensor]) -> None:
    """Write unpadded ids, one row each, as `Tokens`."""
    *path, name = key
    td.set(tuple(path), lazy_stack([Tokens(**{name: row}) for row in ids]))


def next_ids(renderer: Renderer, ids: Tensor, before: list[dict], after: list[dict]) -> Tensor:
    """Return the ids of the chat `after`, keeping the sampled `ids` [t] of the chat `before`.

    Closes the turn, adds new messages and the generation prompt. A chat that does not continue
    `before` (a turn was edited) is rendered from scratch.
    """
    if after[: len(before)] != before:
        return render_prompt(renderer, after)
    return torch.tensor(renderer.extend(ids.tolist(), before, after[len(before) :]))


def full_ids(td: TensorDictBase, owner: tuple[str, ...] = ("tokens",)) -> list[Tensor]:
    """Return the ids of prompt and response of each row, without padding."""
    ids = rows(td, (*owner, "full"))
    if ids is None:
        raise ValueError("step expected tokens.full, found none; let a policy write it")
    ragged = is_ragged(td.get(owner))
    return attended(ids, rows(td, ("masks", "all_attention_mask")), ragged=ragged)


def read_token_responses(td: TensorDictBase, renderer: Renderer) -> list[ParsedResponse]:
    """Decode the ids of each response; a response with an end-of-turn token is complete."""
    sampled = rows(td, ("masks", "all_response_mask"))
    if sampled is None:
        responses = _after_prompt(td)
    else:
        pairs = zip(rows(td, ("tokens", "full")) or [], sampled, strict=True)
        responses = [row[mask.bool()] for row, mask in pairs]
    done = []
    for response in responses:
        ended = len(response) > 0 and int(response[-1]) in renderer.stop_ids
        ids = response[:-1] if ended else response
        done.append((renderer.tokenizer.decode(ids.tolist()), ended))
    return done


def _after_prompt(td: TensorDictBase) -> list[Tensor]:
    """Return the ids after the prompt; a padded prompt takes its full width."""
    full_ids(td)  # raises if ids are missing
    full, prompt = rows(td, ("tokens", "full")) or [], rows(td, ("tokens", "prompt"))
    if prompt is None:
        raise ValueError("step expected tokens.prompt beside tokens.full, found none")
    real = rows(td, ("masks", "all_attention_mask"))
    real = [torch.ones_like(row) for row in full] if real is None else real
    triples = zip(full, prompt, real, strict=True)
    return [row[len(p) :][mask[len(p) :].bool()] for row, p, mask in triples]


def read_text_responses(td: TensorDictBase, renderer: Renderer) -> list[ParsedResponse]:
    """Return text.full after text.prompt; a response with an end-of-turn token is complete."""
    prompts, texts = _texts(td, "prompt"), _texts(td, "full")
    if texts is None or prompts is None:
        raise ValueError("step expected text.prompt and text.full, found none")
    ends = [renderer.tokenizer.decode([i]) for i in renderer.stop_ids]
    done = []
    for prompt, text in zip(prompts, texts, strict=True):
        if not text.startswith(prompt):
            raise ValueError(f"expected text.full to begin with text.prompt, got {text[:60]!r}")
        response = text[len(prompt) :]
        end = next((e for e in ends if response.rstrip().endswith(e)), None)
        done.append(
            (response if end is None else response.rstrip().removesuffix(end), end is not None)
        )
    return done


def _texts(td: TensorDictBase, field: str) -> list[str] | None:
    value = td.get(("text", field), None)
    if value is None or isinstance(value, list):
        return value
    return [value] * td.batch_size[0] if isinstance(value, str) else value.tolist()
