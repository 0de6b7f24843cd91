"""Tasks on stateful environments of other libraries: episodes, stored by the messages so far.

A task is stateless and gets the messages of a chat; an external environment keeps state from turn
to turn. An open episode is stored under its chat. If none is open (more chats than `at_once`), a
new one replays the chat and must return the same messages. All episodes run in the event loop of
one thread, which keeps connections alive between turns.
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

from envs.tasks.task import Message, Response, Reward, Row, Split, Task


@dataclass(frozen=True)
class Turn:
    """The messages after a response ([] ends the chat) and its reward (None: no reward).

    `state` is the environment's state, for `Episodes.finish`.
    """

    messages: list[Message]
    reward: Reward | None = None
    state: Any = None


class Episode:
    """One chat of an environment."""

    async def answer(self, response: Response) -> Turn:
        """Return the turn after a response."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release the episode's resources."""


class Episodes(Task):
    """The base: a subclass has `_rows` by split, `names` of its reward parts, and `open`.

    A row has "messages" and "place", a unique name. `at_once`: largest number of open episodes.
    """

    names: Sequence[str] = ()
    _rows: Mapping[str, Sequence[Row]]

    def __init__(self, *, at_once: int) -> None:
        self.at_once = at_once
        self._free = asyncio.Semaphore(at_once)
        self._open: dict[str, list[Episode]] = {}  # chat -> open episodes, the oldest first
        self._count = 0  # episodes that are open or about to be
        self._turns: dict[int, tuple[Response, Turn]] = {}  # turns of the last rewards

    async def open(self, row: Row) -> Episode:
        """Open an episode that begins with the row."""
        raise NotImplementedError

    async def finish(self, rows: Sequence[Row], turns: list[Turn]) -> list[Turn]:
        """Complete the turns of these rows once all rows have a turn."""
        return turns

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split."""
        return self._rows[split]

    def part_names(self) -> list[str]:
        """Return the names of the reward parts without an episode."""
        return sorted(self.names)

    def rewards(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Reward]:
        """Return the reward of each response; store the next messages for `respond`."""
        turns = _run(self._play(rows, responses))
        self._turns = {id(r): (r, turn) for r, turn in zip(responses, turns, strict=True)}
        nothing = Reward(0.0, dict.fromkeys(self.names, math.nan), False)
        return [turn.reward or nothing for turn in turns]

    def respond(self, row: Row, response: Response) -> list[Message]:
        """Return the messages after the response, stored by `rewards`."""
        if id(response) not in self._turns:
            self.rewards([row], [response])
        return self._turns[id(response)][1].messages

    def close(self) -> None:
        """Close all waiting episodes."""
        while self._open:
            _run(self._leave(self._take(next(iter(self._open)))))

    async def _play(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Turn]:
        pairs = zip(rows, responses, strict=True)
        return await self.finish(rows, await asyncio.gather(*(self._turn(*p) for p in pairs)))

    async def _turn(self, row: Row, response: Response) -> Turn:
        """Give the response to the chat's open episode, or to a new one after a replay."""
        added = response.messages[0]["role"] == "system" != row["messages"][0]["role"]
        past = response.messages[len(row["messages"]) + added :]
        async with self._free:
            key = _key(row, past[:-1])
            episode = self._take(key) if key in self._open else await self._replay(row, past[:-1])
            try:
                turn = await episode.answer(response)
            except BaseException:
                await self._leave(episode)
                raise
            if turn.messages:
                key = _key(row, [*past, *turn.messages])
                self._open.setdefault(key, []).append(episode)
            else:
                await self._leave(episode)
        return turn

    def _take(self, key: str) -> Episode:
        """Remove and return an open episode of this chat."""
        episode = self._open[key].pop()
        if not self._open[key]:
            del self._open[key]
        return episode

    async def _enter(self, row: Row) -> Episode:
        """Open an episode, if needed after closing the oldest waiting one; needs `_free`."""
        self._count += 1
        try:
            while self._count > self.at_once:  # one waits, because fewer than at_once have a turn
                await self._leave(self._take(next(iter(self._open))))
            return await self.open(row)
        except BaseException:
            self._count -= 1
            raise

    async def _leave(self, episode: Episode) -> None:
        """Close an episode."""
        self._count -= 1
        await episode.close()

    async def _replay(self, row: Row, past: list[Message]) -> Episode:
        """Replay past messages in a new episode; raise ValueError if its messages differ."""
        episode = await self._enter(row)
        for place in (i for i, message in enumerate(past) if message["role"] == "assistant"):
            response = Response(past[place]["content"], True, past[: place + 1])
            again = (await episode.answer(response)).messages
            before = past[place + 1 : place + 1 + len(again)]
            if not again or _texts(again) != _texts(before):
                await self._leave(episode)
                raise ValueError(
                    f"expected the environment to say {_texts(before)!r:.200} again, got "
                    f"{_texts(again)!r:.200}; let it follow its seed, or play at most "
                    f"{self.at_once} chats in a batch (trainer.prompts_per_iteration)"
                )
        return episode


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in the thread of all episodes; return its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="episodes").start()
    return loop


def _texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def _key(row: Row, messages: Sequence[Message]) -> str:
    return json.dumps([row["place"], _texts(messages)])
