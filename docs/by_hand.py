"""GRPO by hand: the parts of leash in twenty lines of Python, without Hydra and without files.

The tiny model is untrained, its responses are noise; digits are rewarded, so it learns digits.
"""

from envs.chat_env import ChatEnv
from envs.tasks import Response, Reward, Row, Task
from envs.transforms.kl import RetrieveKL
from policies import TransformersPolicy, load_policy, load_reference
from trainer import (
    ConstantKLController,
    GroupAdvantage,
    GRPOObjective,
    Leash,
    Rollouts,
    Runtime,
    Update,
    make_optimizer,
)


class Digits(Task):
    """A response earns the share of its characters that are digits."""

    def rows(self, split: str) -> list[Row]:
        return [{"messages": [{"role": "user", "content": f"Count to {n}."}]} for n in range(2, 10)]

    def reward(self, row: Row, response: Response) -> Reward:
        share = sum(c.isdigit() for c in response.text) / max(len(response.text), 1)
        return Reward(total=share, parts={"digits": share}, success=share == 1)


def train(policy: TransformersPolicy, *, iterations: int) -> list[float]:
    """Train the policy in place; return the mean task reward of each iteration."""
    runtime, leash = Runtime("outputs/by_hand", seed=0), Leash(ConstantKLController(kl_coef=0.01))
    task = Digits()
    env, parts = ChatEnv(task, group_size=8), {"generator": policy, "runtime": runtime}
    source = Rollouts(task=task, env=env, prompts_per_iteration=8, **parts)
    retrieve_kl = RetrieveKL(load_reference(policy))
    advantage = GroupAdvantage(group_size=8, leash=leash)
    scorer, optimizer = runtime.accelerator.prepare(
        policy.scorer, make_optimizer(policy.model, lr=2e-3)
    )
    objective, rate = GRPOObjective(leash=leash), lambda step: 2e-3
    update = Update(scorer, optimizer, objective, runtime, leash=leash, lr=rate)
    rewards = []
    for i in range(iterations):
        batch = advantage(retrieve_kl(source(i)))
        update(batch)
        rewards.append(float(batch["reward_raw"].sum(-1).mean()))
    return rewards


if __name__ == "__main__":
    for i, reward in enumerate(train(load_policy("tiny", max_new_tokens=9), iterations=30)):
        print(f"iteration {i}: reward {reward:.2f}")
