"""What a preflight finds of rows, steps and rewards."""

from collections.abc import Sequence
from typing import Any

from policies.scorer import max_positions
from trainer.fitting import fit_rows
from trainer.metrics import idle_groups
from trainer.modes.preflight.play import Findings, Iteration
from trainer.trainer import Trainer

RENDERED = 1000  # rows of a split that are rendered to learn their lengths
SLOW = 0.2  # share of an iteration that rewards may take without a word


def check_rows(loop: Trainer, settings: dict[str, Any], findings: Findings) -> int:
    """Print how long the rows are and which are too long; return the most tokens of a sequence.

    Rows are prompts where replies are sampled, else whole chats.
    """
    samples, positions = hasattr(loop.source, "prompts"), max_positions(loop.policy.model)
    splits, longest = {"train": loop.source}, 1
    splits |= {"eval": loop.evaluate} if samples else {}
    findings.section("Rows and their length")
    try:
        for text in fit_rows(loop):
            findings.say(text)
        for name, part in splits.items():
            sizes = row_lengths(loop, part.rows, prompt=samples)
            longest = max(longest, sizes[-1])
            findings.say(
                f"{name:<5}  {len(part.rows)} rows ({len(sizes)} rendered), tokens: least "
                f"{sizes[0]}, median {sizes[len(sizes) // 2]}, most {sizes[-1]}"
            )
    except ValueError as error:
        findings.problem(str(error))
    new = settings["env"]["max_turns"] * settings["policy"]["max_new_tokens"] if samples else 0
    whole = max(min(longest + new, positions or longest + new), longest)
    findings.say(f"a sequence has at most {whole} tokens, the model takes {positions or 'any'}")
    return whole


def row_lengths(loop: Trainer, rows: Sequence[dict[str, Any]], *, prompt: bool) -> list[int]:
    """Return the lengths in tokens, sorted, of rows spread evenly over a split."""
    env, render = loop.source.env, loop.policy.renderer.render
    some = (rows[i] for i in range(0, len(rows), max(-(-len(rows) // RENDERED), 1)))
    return sorted(len(render(env.messages(row), add_generation_prompt=prompt).ids) for row in some)


def check_steps(loop: Trainer, settings: dict[str, Any], findings: Findings) -> None:
    """Print how many steps the run takes, and how often it sees the rows."""
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
            f"optimizer.warmup={warmup} is longer than the run's {steps} steps, so that the "
            "learning rate stays below optimizer.lr; lower it"
        )


def check_rewards(played: Iteration, findings: Findings) -> None:
    """Print how fast rewards are, and how many groups would teach nothing."""
    total = played.batch.get("reward_raw").sum(-1)  # [B]
    findings.section(
        "Rewards",
        f"mean {float(total.mean()):z.3f}, from {float(total.min()):.3g} to "
        f"{float(total.max()):.3g} over {len(total)} replies, in {played.rewards:.3f} s "
        f"({played.rewards / played.seconds:.0%} of the iteration)",
    )
    if played.rewards > max(SLOW * played.seconds, 1.0):
        findings.say("rewards are slow: env.rewards can run them in worker processes or together")
    if len(idle := idle_groups(played.batch)) == len(total):  # groups of one
        return
    findings.say(f"groups whose replies all earn the same: {float(idle.float().mean()):.0%}")
    if bool(idle.all()):
        findings.judge(
            f"all {len(idle)} groups earn one reward all over: nothing would be learnt; use "
            "easier rows, a larger algorithm.group_size, a warm-up by SFT, or a reward with degrees"
        )
