"""A few steps of a policy in an environment, to look at; whole chats are collected in trainer."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDictBase, lazy_stack

from envs.env import EnvBase


def rollout(
    env: EnvBase,
    max_steps: int,
    policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
    *,
    tensordict: TensorDictBase | None = None,
    auto_reset: bool = True,
    break_when_any_done: bool = True,
) -> TensorDictBase:
    """Reset, then act and step until an episode of the batch is done; a lazy stack [B, T].

    Without a policy the environment's `rand_action` acts. `tensordict` is what reset is given; with
    auto_reset=False it is the first state. break_when_any_done=False is a ValueError.
    """
    if max_steps < 1 or not break_when_any_done:
        raise ValueError(
            f"expected max_steps >= 1 and break_when_any_done=True, got {max_steps} and "
            f"{break_when_any_done}; LLMCollector goes on with the next chats"
        )
    td = env.reset(tensordict) if auto_reset else tensordict
    if td is None:
        raise ValueError("expected the first state as tensordict with auto_reset=False, got None")
    state, steps = list(td.keys()), []
    while True:
        td = env.step(env.rand_action(td) if policy is None else policy(td))
        steps.append(list(td.unbind(0)))
        following = td.get("next")
        if len(steps) == max_steps or following.get("done").any():
            return lazy_stack([lazy_stack(list(turns)) for turns in zip(*steps, strict=True)])
        before, td = td, td.empty()
        for key in state:
            td.set(key, following.get(key) if key in following else before.get(key))
