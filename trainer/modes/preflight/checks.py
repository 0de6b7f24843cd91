"""The preflight checks of rows, steps and rewards."""

from typing import Any

from tensordict import TensorDictBase

from envs.tasks.task import Task
from policies.scorer import max_positions
from trainer.evaluation import right_otherwise
from trainer.length_filter import drop_long_rows, name_unused
from trainer.metrics import idle_groups
from trainer.modes.preflight.profile import Findings
from trainer.trainer import Trainer

RENDERED = 1000  # rows of a split that are rendered to measure their lengths


def check_rows(loop: Trainer, settings: dict[str, Any], findings: Findings) -> int:
    """Print the lengths of the rows; return the largest number of tokens of a sequence.

    Rows are prompts if responses are sampled, else full chats.
    """
    samples, positions = hasattr(loop.source, "prompts"), max_positions(loop.policy.model)
    env, render = loop.source.env, loop.policy.renderer.render
    splits, longest = {"train": loop.source}, 1
    splits |= {"eval": loop.evaluate} if samples else {}
    findings.section("Rows and their length", *name_unused(loop), *drop_long_rows(loop))
    for name, part in splits.items():
        count = len(part.rows)
        some = (part.rows[i] for i in range(0, count, -(-count // RENDERED) or 1))
        chats = (env.messages(row) for row in some)
        sizes = sorted(len(render(chat, add_generation_prompt=samples).ids) for chat in chats)
        longest = max(longest, sizes[-1])
        findings.say(
            f"{name:<5}  {count} rows ({len(sizes)} rendered), tokens: least {sizes[0]}, "
            f"median {sizes[len(sizes) // 2]}, most {sizes[-1]}"
        )
    new = settings["env"]["max_turns"] * settings["policy"]["max_new_tokens"] if samples else 0
    total = max(min(longest + new, positions or longest + new), longest)
    findings.say(f"a sequence has at most {total} tokens, the model takes {positions or 'any'}")
    return total


def check_steps(loop: Trainer, settings: dict[str, Any], findings: Findings) -> None:
    """Print the number of steps of the run, and how often it uses each row."""
    algorithm, trainer = settings["algorithm"], settings["trainer"]
    prompts, iterations = trainer["prompts_per_iteration"], trainer["num_iterations"]
    epochs, minibatches = algorithm["epochs"], algorithm["minibatches"]
    steps, rows = iterations * epochs * minibatches, len(loop.source.rows)
    findings.section(
        "Steps",
        f"{iterations} (iterations) x {epochs} (epochs) x {minibatches} (minibatches) = "
        f"{steps} steps; {iterations * prompts / rows:,.1f} times over the {rows} rows",
    )
    if (warmup := settings["optimizer"]["warmup"]) > steps:
        findings.problem(
            f"optimizer.warmup={warmup} is longer than the run's {steps} steps; lower it"
        )


def check_rewards(batch: TensorDictBase, findings: Findings) -> None:
    """Print the rewards of the responses, and the share of groups without a gradient."""
    total = batch.get("reward_raw").sum(-1)  # [B]
    findings.section(
        "Rewards",
        f"mean {float(total.mean()):z.3f}, from {float(total.min()):.3g} to "
        f"{float(total.max()):.3g} over {len(total)} responses",
    )
    if len(idle := idle_groups(batch)) == len(total):  # groups of one
        return
    findings.say(f"groups whose responses all earn the same: {float(idle.float().mean()):.0%}")
    if bool(idle.all()):
        findings.problem(
            f"all {len(idle)} groups earn one reward all over: nothing would be learnt; use "
            "easier rows, a larger algorithm.group_size, a warm-up by SFT, or, if the answers are "
            "sentences, a reward of your own (docs/own_task.md)",
            of_responses=True,
        )


def check_match(task: Task, batch: TensorDictBase, findings: Findings) -> None:
    """Print each other `env.match` by which more than twice as many responses would be right."""
    for match, count in right_otherwise(task, batch).items():
        right = int(batch.get("success").sum())
        if count > 2 * right:
            text = f"{right} of {len(batch)} responses are right; {count} would be by env.match="
            if right:
                findings.say(text + match, style="yellow")
            else:
                findings.problem(text + match, of_responses=True)
