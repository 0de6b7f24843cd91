"""Environments behind a server of OpenEnv: what they show is the user's, a reply is an action.

The package (`pip install -e '.[openenv]'`) is imported here only, and of it the client that knows
no environment, so none of an environment's code runs in this process.
Left out on purpose: servers that leash starts (docker, the hub), tools over MCP, the task provider.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from envs.data import LazyRows
from envs.tasks.episodes import Episode, Episodes, Turn, run
from envs.tasks.task import Message, Reply, Reward, Row, user
from policies.optional_packages import EXTRAS

EVAL_SEED = 1 << 30  # seeds of the train rows begin below

Look = str | Callable[[Mapping[str, Any]], str]
Act = str | Callable[[str], Mapping[str, Any] | None]


class OpenEnv(Episodes):
    """Episodes of the server at `url`; row i begins with what reset(seed=i, **reset) shows.

    `observation`: the field of an observation that is the user's message, or a function of the
    observation that returns it. `action`: the field of an action that a reply fills, or a function
    of the reply's text; None of it is no action and ends the chat. The reward of a turn is the
    server's; a chat is right whose rewards come to `right_from`. `at_once`: sessions of the server
    (its max_concurrent_envs); with fewer than chats in a batch these are played again from their
    seed at every turn. `key_variable`: the environment variable with the server's bearer token.
    """

    names = ("reward",)

    def __init__(
        self,
        url: str,
        *,
        observation: Look,
        action: Act,
        reset: Mapping[str, Any] | None = None,
        num_rows: int = 1000,
        eval_rows: int = 100,
        right_from: float = 1.0,
        at_once: int = 1,
        timeout: float = 60.0,
        key_variable: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(at_once=at_once)
        self.url, self.right_from, self.timeout = url, right_from, timeout
        self.observation, self.action, self.reset = observation, action, dict(reset or {})
        key = os.environ.get(key_variable or "")
        self.headers = {"Authorization": f"Bearer {key}"} if key else None
        self._client()  # the package is looked for now
        self._first: dict[int, Message] = {}  # by seed
        start = seed * num_rows % EVAL_SEED
        self._rows = {
            "train": LazyRows(self._row, range(start, start + num_rows), listed=False),
            "eval": LazyRows(self._row, range(EVAL_SEED, EVAL_SEED + eval_rows), listed=False),
        }

    async def open(self, row: Row) -> "Session":
        """Return a session that shows what the row shows; ValueError for anything else."""
        session = Session(self, self._client())
        try:
            first = await session.begin(row["seed"])
            if first != row.get("messages", [first])[-1]:
                raise ValueError(
                    f"expected {row['messages'][-1]['content']!r:.100} after reset(seed="
                    f"{row['seed']}) again, got {first['content']!r:.100}; let it follow the seed"
                )
        except BaseException:
            await session.close()
            raise
        return session

    def show(self, observation: Mapping[str, Any]) -> Message:
        """Return an observation as the user's message."""
        if callable(self.observation):
            return user(self.observation(observation))
        if self.observation not in observation:
            known = ", ".join(observation)
            raise ValueError(f"expected env.task.observation in {known}, got {self.observation}")
        return user(str(observation[self.observation]))

    def _client(self) -> Any:
        try:
            from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(EXTRAS["openenv"]) from error
        return GenericEnvClient(self.url, message_timeout_s=self.timeout, headers=self.headers)

    def _row(self, seed: int) -> Row:
        if seed not in self._first:
            self._first[seed] = run(self._look(seed))
        return {"messages": [self._first[seed]], "place": seed, "seed": seed}

    async def _look(self, seed: int) -> Message:
        async with self._free:
            session = await self.enter({"seed": seed})
            await self.leave(session)
            return session.first


class Session(Episode):
    """An episode on a connection of its own."""

    def __init__(self, task: OpenEnv, client: Any) -> None:
        self.task, self.client, self.total = task, client, 0.0
        self.first: Message = {}

    async def begin(self, seed: int) -> Message:
        """Return what the server shows first."""
        result = await self._call("reset", seed=seed, **self.task.reset)
        self.first = self.task.show(result.observation)
        return self.first

    async def answer(self, reply: Reply) -> Turn:
        """Return what the server makes of a reply."""
        act = self.task.action
        action = act(reply.text) if callable(act) else {act: reply.text}
        if action is None:
            return Turn([])
        result = await self._call("step", dict(action))
        earned = float(result.reward or 0.0)
        self.total += earned
        reward = Reward(earned, {"reward": earned}, self.total >= self.task.right_from)
        return Turn([] if result.done else [self.task.show(result.observation)], reward)

    async def close(self) -> None:
        """End the session, which makes its place on the server free."""
        await self.client.disconnect()

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await getattr(self.client, name)(*args, **kwargs)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"OpenEnv, {self.task.url}, {name}: {error}") from error
