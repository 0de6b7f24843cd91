"""Environments of the library verifiers: their rows, turns, stops and rubrics, driven as they are.

The library's own rollout plays each chat; the client that it asks for a completion waits for the
reply that leash sampled. So tokens stay leash's, everything else is the environment's.
Left out on purpose: pictures, environments that rewrite earlier turns, and `verifiers.v1` (all that
0.4 has), whose harnesses are programs that ask for completions over HTTP.
"""

import asyncio
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envs.chat_rows import split_off
from envs.data import made
from envs.tasks.episodes import Episode, Episodes, Turn
from envs.tasks.task import Reward, Row
from envs.tasks.verifiers_rollout import FAILED, Rollout, load, plain
from envs.transforms.tool_parsers import XMLBlockParser


class Verifiers(Episodes):
    """What `name`, an installed module, returns from load_environment(**arguments).

    When its chat is over a reply earns the rubric's weighted sum; the rubric's functions are the
    reward parts, and it is right from the environment's pass_threshold on. A reply on which one of
    them fails is dropped with its group and counted. Without data for evaluation a seeded tenth is
    held out. `max_turns`: at most so many. `parser` reads the calls of an environment with tools.
    """

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        max_turns: int = 1,
        parser: Callable[[str], Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(at_once=1024)
        self.name, self.parser = name, parser or XMLBlockParser()
        self.env = load(name, arguments or {})
        self.names = sorted(set(self.env.rubric._get_reward_func_names()))
        self.together = self.env.rubric.has_group_rewards
        for env in getattr(self.env, "envs", [self.env]):  # an EnvGroup's
            if (turns := env.max_turns) != 1 and max_turns == 1:
                has = turns if turns > 0 else "any number of"
                raise ValueError(f"{name} has {has} turns; set env.max_turns above 1")
            if turns != 1 and self.together:
                raise ValueError(
                    f"{name} compares replies to one prompt, which needs one turn each"
                )
            env.max_turns = min(turns, max_turns) if turns > 0 else max_turns
        train, held_out = self.env.build_dataset(), self.env.build_eval_dataset()
        if train is None:
            raise ValueError(f"expected a dataset of {name} to train on, got one for evaluation")
        places: Sequence[Any] = range(len(train)), range(len(held_out or ()))
        if held_out is None:
            held_out, prompts = train, (json.dumps(prompt) for prompt in train["prompt"])
            places = split_off(prompts, seed=seed)
        self._rows = {
            "train": made(_reader("train", train), places[0]),
            "eval": made(_reader("eval", held_out), places[1]),
        }

    async def open(self, row: Row) -> Episode:
        """Return the rollout of a row, which waits for its first reply."""
        episode = Rollout(self.env, row, self.parser)
        if (asked := await episode.asked()) != row["messages"]:
            await episode.close()
            raise ValueError(f"expected {self.name} to ask what its data asks, got {asked!r:.200}")
        return episode

    async def finish(self, rows: Sequence[Row], turns: list[Turn]) -> list[Turn]:
        """Return the turns with the rewards of the chats that are over."""
        ended: dict[int, list[int]] = {}  # those that are scored together, by what they share
        for i in (i for i, turn in enumerate(turns) if not turn.messages):
            ended.setdefault(id(rows[i]) if self.together else i, []).append(i)
        groups = [[turns[i].state for i in group] for group in ended.values()]
        failures = await asyncio.gather(*map(self._score, groups))
        for group, failed in zip(ended.values(), failures, strict=True):
            for i in group:
                turns[i] = replace(turns[i], reward=self._reward(turns[i].state, failed))
        return turns

    async def _score(self, states: list[Any]) -> list[Any]:
        """Have the library score chats; return what failed, in a function or before."""
        failed = [state["error"] for state in states if state.get("error") is not None]
        FAILED.set(failed)
        async with self._free:
            await self.env.rubric.score_group(states)
            await asyncio.gather(*map(self.env.rubric.cleanup, states))
        if failed:
            warnings.warn(f"{self.name}: {failed[0]!r}: dropped, see reward/errors", stacklevel=2)
        return failed

    def _reward(self, state: Any, failed: list[Any]) -> Reward:
        total, metrics = float(state["reward"]), state["metrics"]
        parts = {name: float(metrics.get(name, math.nan)) for name in self.names}
        right = total >= self.env.pass_threshold
        return Reward(total, parts, right, errors=len(failed), dropped=bool(failed))


def _reader(split: str, data: Any) -> Callable[[Any], Row]:
    """Return what reads a row of the library's data, as the Python numbers and texts that it is."""

    def read(place: Any) -> Row:
        row = data[int(place)]
        return {"messages": plain(row["prompt"]), "place": f"{split} {place}", "input": row}

    return read
