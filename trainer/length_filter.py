"""Before the first iteration: print what was read of the data, drop rows too long for the model.

Prompts must fit policy.max_prompt_tokens; prompt and policy.max_new_tokens together must fit the
model's positions. Demonstrations and preferences must fit the positions. Rows whose bytes already
fit are not rendered. The generator checks lazily made rows and later turns.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from tensordict import TensorDictBase

from envs.rows import LazyRows, is_listed
from envs.tasks.task import Row, assistant, naming
from policies.chats.renderer import Renderer
from policies.scorer import max_positions
from trainer.evaluation import Evaluate
from trainer.trainer import Trainer

WRITES_END = "set policy.chat_template=<a template that writes one after a response>"
PAUSE = 10.0  # seconds between two progress messages
SAMPLE = 64  # random rows: if none of them fits, the run ends


@dataclass(frozen=True)
class LengthFilter:
    """Find rows whose chat (if `prompt`: whose prompt) has more than `room` tokens.

    For the message: `limit` names the bound, `remedy` says what to change.
    """

    renderer: Renderer
    room: int
    env: Any
    prompt: bool
    limit: str
    remedy: str

    def too_long(self, rows: Sequence[Row], say: Callable[[str], None]) -> dict[int, int]:
        """Return the size in tokens of each row that does not fit, by row index.

        A chat with tools takes milliseconds, so `say` gets a progress message every PAUSE seconds.
        """
        sizes, due = {}, time.monotonic() + PAUSE
        for i, row in enumerate(rows):
            if (size := self._size(row)) > self.room:
                sizes[i] = size
            if time.monotonic() > due:
                say(f"checked {i + 1} of {len(rows)} rows")
                due += PAUSE
        return sizes

    def _size(self, row: Row) -> int:
        """Return the tokens of a row's longest chat; 0 if its bytes already fit."""
        size, chats = 0, [self.env.messages(row)]
        last_turn = "last_turn" in row
        options = {"add_generation_prompt": self.prompt, "require_assistant": not self.prompt}
        if "rejected" in row and not self.prompt:
            chats = [[*chats[0], assistant(row[name])] for name in ("chosen", "rejected")]
        with naming(row):
            for chat in chats:
                most = self.renderer.most_tokens(chat, prompt=self.prompt, last_turn=last_turn)
                if most > self.room:
                    done = self.renderer.render(chat, last_turn=last_turn, **options)
                    size = max(size, len(done.ids))
        return size


def make_filters(loop: Trainer) -> dict[str, LengthFilter]:
    """Return the filters for a run's "train" and "eval" rows, or {} if no bound is set."""
    env, positions = getattr(loop.source, "env", None), max_positions(loop.policy.model)
    limits, plays = loop.generator.limits, hasattr(loop.source, "prompts")
    longest, new = limits.max_prompt_tokens, limits.max_new_tokens
    chat = positions, False, "max_position_embeddings of the model", "take another model"
    prompt = longest, True, "policy.max_prompt_tokens", "raise it"
    if positions is not None and (longest is None or positions - new < longest):
        prompt = positions - new, True, f"{chat[2]} - policy.max_new_tokens", "lower the latter"
    rooms = {"train": prompt if plays else chat}
    if loop.evaluate.plans or loop.evaluate.forgetting:
        rooms |= dict.fromkeys(_evaluations(loop.evaluate), prompt)
    return {
        name: LengthFilter(loop.policy.renderer, room, env, *about)
        for name, (room, *about) in rooms.items()
        if env is not None and room is not None
    }


def _evaluations(evaluate: Evaluate) -> dict[str, Any]:
    """Return an evaluation and those of other rows, by the names of their rows."""
    return {"eval": evaluate} | {f"eval_{name}": x for name, x in evaluate.beside.items()}


def name_unused(loop: Trainer) -> list[str]:
    """Return messages: format and unused columns of each data set, and whether rows are by turn."""
    rows = getattr(loop.source, "rows", [])
    origins = [row["origin"] for row in rows[:SAMPLE] if "origin" in row]
    readers = " except by rewards of your own" if hasattr(loop.source, "prompts") else ""
    messages = list(dict.fromkeys(origin.describe(readers) for origin in origins))
    if (chats := getattr(loop.source, "num_chats", len(rows))) != len(rows):
        messages.append(
            f"the chat template rewrites earlier turns: {chats} chats give {len(rows)} rows, one "
            "for each turn that is learnt"
        )
    return messages


def drop_long_rows(loop: Trainer) -> list[str]:
    """Drop the rows that do not fit; return a message for each kind of rows."""
    messages, parts = [], {"train": loop.source} | _evaluations(loop.evaluate)
    for name, fit in make_filters(loop).items():
        part = parts[name]
        rows = getattr(part, "rows", ())
        if not is_listed(rows) or not rows:
            continue
        some = Random(0).sample(range(len(rows)), min(SAMPLE, len(rows)))
        tried = [rows[i] for i in some]
        sizes = fit.too_long(tried, loop.observers.say)
        if len(sizes) < len(tried):  # else the sample is enough for the error
            tried, sizes = rows, fit.too_long(rows, loop.observers.say)
        if not sizes:
            continue
        some = [f"row {tried[i].get('index', i)} ({n} tokens)" for i, n in islice(sizes.items(), 3)]
        text = f"{len(sizes)} of {len(tried)} {name} rows exceed {fit.room} tokens ({fit.limit}): "
        text += ", ".join([*some, "..."] if len(sizes) > 3 else some)
        if len(sizes) == len(tried):
            alternative = "or give shorter rows or a shorter policy.system_prompt"
            raise ValueError(f"{text}, which leaves none; {fit.remedy}, {alternative}")
        shorter = LazyRows(rows.__getitem__, [i for i in range(len(rows)) if i not in sizes])
        messages.append(f"{text}; dropped")
        setattr(part, "rows", shorter) if name == "train" else part.set_rows(shorter)
    return messages


def find_unlearnt_end(loop: Trainer) -> list[str]:
    """Return a message if an SFT run's first batch has no token or no end of turn in the loss."""
    if getattr(loop.source, "reads_rows", "") != "demonstrations":
        return []
    batch = loop.source(0)
    empty, ended = count_ends(batch, loop.policy.stop_ids)
    if ended:
        return []
    if empty == len(batch):
        return [
            "no row of the first batch has a token to learn; see weight and train of its messages"
        ]
    name = loop.policy.renderer.name
    return [
        f"{name}: no demonstration ends by a learnt end of turn, so the model may not learn to "
        f"stop; {WRITES_END}"
    ]


def count_ends(batch: TensorDictBase, stop_ids: frozenset[int]) -> tuple[int, int]:
    """Count the rows without a token in the loss, and rows whose last such token is a stop id."""
    mask, ids = batch.get("loss_mask"), batch.get(("tokens", "full"))  # [B, T]
    places = mask.int().cumsum(-1).argmax(-1)  # [B] last token in the loss
    last = ids.gather(-1, places.unsqueeze(-1)).squeeze(-1).tolist()
    learns = mask.any(-1).tolist()
    ended = sum(some and token in stop_ids for some, token in zip(learns, last, strict=True))
    return learns.count(False), ended
