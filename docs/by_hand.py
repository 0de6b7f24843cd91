"""GRPO by hand: the parts of leash in twenty lines of Python, without Hydra and without files.

The untrained tiny model earns nothing on this task; give main() the model of a sft_tiny run.
"""

from envs import ChatEnv
from envs.tasks import SortDigits
from envs.transforms import RetrieveKL
from policies import load_policy, load_reference
from trainer import (
    ConstantKLController,
    GroupAdvantage,
    GRPOObjective,
    Rollouts,
    Runtime,
    Update,
    make_optimizer,
)


def main(model: str = "tiny", iterations: int = 3) -> list[float]:
    """Train a model on sorting digits; return the mean task reward of each iteration."""
    runtime, kl = Runtime("outputs/by_hand", seed=0), ConstantKLController(kl_coef=0.01)
    policy = load_policy(model, max_new_tokens=9)
    task = SortDigits()
    source = Rollouts(
        task=task, env=ChatEnv(task, group_size=8), policy=policy, runtime=runtime, size=16
    )
    retrieve_kl = RetrieveKL(ref_model=load_reference(policy), add_to_reward=False)
    advantage = GroupAdvantage(group_size=8, kl=kl)
    scorer, optimizer = runtime.accelerator.prepare(
        policy.scorer, make_optimizer(policy.model, lr=5e-4)
    )
    update = Update(scorer, optimizer, GRPOObjective(kl=kl), runtime, lr=lambda step: 5e-4)
    rewards = []
    for i in range(iterations):
        batch = advantage(retrieve_kl(source(i)))
        update(batch)
        rewards.append(float(batch["reward_raw"].sum(-1).mean()))
    return rewards


if __name__ == "__main__":
    print(main())
