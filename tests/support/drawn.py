"""Prompts whose responses all earn the same, and a source that draws others in their place."""

from contracts import Words, make_policy

from envs.chat_env import ChatEnv
from envs.tasks.task import Response, Reward
from trainer.sources import DynamicRollouts


class Many(Words):
    """Eight prompts; responses to some of them all earn the same."""

    flat = ("Sort 1", "Sort 4", "Sort 6")

    def rows(self, split: str) -> list[dict]:
        texts = [f"Sort {i}" for i in range(8)]
        return [{"messages": [{"role": "user", "content": t}], "answer": t} for t in texts]

    def reward(self, row: dict, response: Response) -> Reward:
        value = 0.25 if row["answer"] in self.flat else float(sum(map(ord, response.text)))
        return Reward(total=value, parts={}, success=False)


class Flat(Many):
    flat = tuple(f"Sort {i}" for i in range(8))


def dynamic(runtime, task: Words, rounds: int = 3) -> DynamicRollouts:
    env, policy = ChatEnv(task, group_size=3), make_policy()
    return DynamicRollouts(
        task=task,
        env=env,
        generator=policy,
        runtime=runtime,
        prompts_per_iteration=4,
        rounds=rounds,
    )
