"""Chats whose turns another library plays: open episodes, found again by what was said in them.

A task is asked with the messages of a chat and remembers nothing; an environment of others is an
object that goes on from turn to turn. An episode is kept open under its chat; where none is open
(more chats than `at_once`), one is opened and the chat said again, and it must answer as before.
All of it happens in the event loop of one thread, which keeps connections alive in between.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from envs.tasks.task import Message, Reply, Reward, Row, Split, Task


@dataclass(frozen=True)
class Turn:
    """What follows a reply: messages, none at the end of the chat; its reward, none for nothing.

    `state` is the environment's own, for `Episodes.finish`.
    """

    messages: list[Message]
    reward: Reward | None = None
    state: Any = None


class Episode:
    """One chat of an environment."""

    async def answer(self, reply: Reply) -> Turn:
        """Return what follows a reply."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give up what the episode holds."""


class Episodes(Task):
    """The base: a subclass has `_rows` by split, `names` (of its reward parts) and `open`.

    A row has "messages" and "place", a name of its own. `at_once`: episodes open at a time.
    """

    names: Sequence[str] = ()
    _rows: Mapping[str, Sequence[Row]]

    def __init__(self, *, at_once: int) -> None:
        self.at_once = at_once
        self._free = asyncio.Semaphore(at_once)
        self._open: dict[str, list[Episode]] = {}  # by chat, the oldest first
        self._count = 0  # episodes that are open or about to be
        self._turns: dict[int, tuple[Reply, Turn]] = {}  # of the last rewards

    async def open(self, row: Row) -> Episode:
        """Return an episode that begins with the row."""
        raise NotImplementedError

    async def finish(self, rows: Sequence[Row], turns: list[Turn]) -> list[Turn]:
        """Return the turns of these rows once all of them are there."""
        return turns

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split."""
        return self._rows[split]

    def part_names(self) -> list[str]:
        """Return the names of the reward parts, without playing."""
        return sorted(self.names)

    def rewards(self, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Reward]:
        """Return what each reply earns; what follows it is kept for `respond`."""
        turns = _run(self._play(rows, replies))
        self._turns = {id(r): (r, turn) for r, turn in zip(replies, turns, strict=True)}
        nothing = Reward(0.0, dict.fromkeys(self.names, math.nan), False)
        return [turn.reward or nothing for turn in turns]

    def respond(self, row: Row, reply: Reply) -> list[Message]:
        """Return what follows the reply, as `rewards` heard it."""
        if id(reply) not in self._turns:
            self.rewards([row], [reply])
        return self._turns[id(reply)][1].messages

    def close(self) -> None:
        """Close the episodes that wait for a reply."""
        while self._open:
            _run(self._leave(self._take(next(iter(self._open)))))

    async def _play(self, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Turn]:
        pairs = zip(rows, replies, strict=True)
        return await self.finish(rows, await asyncio.gather(*(self._turn(*p) for p in pairs)))

    async def _turn(self, row: Row, reply: Reply) -> Turn:
        """Say the reply in its episode, which is looked for or brought to where the chat is."""
        added = reply.messages[0]["role"] == "system" != row["messages"][0]["role"]
        said = reply.messages[len(row["messages"]) + added :]
        async with self._free:
            key = _key(row, said[:-1])
            episode = self._take(key) if key in self._open else await self._replay(row, said[:-1])
            try:
                turn = await episode.answer(reply)
            except BaseException:
                await self._leave(episode)
                raise
            if turn.messages:
                key = _key(row, [*said, *turn.messages])
                self._open.setdefault(key, []).append(episode)
            else:
                await self._leave(episode)
        return turn

    def _take(self, key: str) -> Episode:
        """Return an open episode of this chat, which is then nobody else's."""
        episode = self._open[key].pop()
        if not self._open[key]:
            del self._open[key]
        return episode

    async def _enter(self, row: Row) -> Episode:
        """Open an episode, for which the oldest that waits makes room; hold `_free` for it."""
        self._count += 1
        try:
            while self._count > self.at_once:  # one waits, for fewer than at_once play
                await self._leave(self._take(next(iter(self._open))))
            return await self.open(row)
        except BaseException:
            self._count -= 1
            raise

    async def _leave(self, episode: Episode) -> None:
        """Close an episode."""
        self._count -= 1
        await episode.close()

    async def _replay(self, row: Row, said: list[Message]) -> Episode:
        """Return a new episode in which this was said; ValueError if it answers otherwise."""
        episode = await self._enter(row)
        for place in (i for i, message in enumerate(said) if message["role"] == "assistant"):
            told = Reply(said[place]["content"], True, said[: place + 1])
            again = (await episode.answer(told)).messages
            before = said[place + 1 : place + 1 + len(again)]
            if not again or _texts(again) != _texts(before):
                await self._leave(episode)
                raise ValueError(
                    f"expected the environment to say {_texts(before)!r:.200} again, got "
                    f"{_texts(again)!r:.200}; let it follow its seed, or play at most "
                    f"{self.at_once} chats in a batch (trainer.prompts_per_iteration)"
                )
        return episode


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns in the thread of all episodes."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="episodes").start()
    return loop


def _texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _key(row: Row, said: Sequence[Message]) -> str:
    return json.dumps([row["place"], _texts(said)])
