"""What a preflight says of rows, steps and rewards; the rest: tokens.py and costs.py."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from policies.packing import groups
from policies.scorer import max_positions
from trainer.fitting import fit_rows
from trainer.metrics import idle_groups
from trainer.modes.preflight.play import Findings, Iteration
from trainer.trainer import Trainer
from trainer.weight_sync import hand_over

RENDERED = 1000  # rows of a split that are rendered to learn their lengths
SLOW = 0.2  # share of an iteration that rewards may take without a word


def samples(loop: Trainer) -> bool:
    """Return whether the run samples replies: SFT and reward models do not."""
    return hasattr(loop.source, "prompts")


def check_rows(loop: Trainer, settings: dict[str, Any], findings: Findings) -> int:
    """Say how long the rows are and which are too long; return the most tokens of a sequence.

    Rows are prompts where replies are sampled, else whole chats.
    """
    positions = max_positions(loop.policy.model)
    new = settings["policy"]["max_new_tokens"] if samples(loop) else 0
    findings.section("Rows and their length")
    how, splits, longest = settings["env"].get("overlong", "drop"), {}, 1
    try:
        for text in fit_rows(loop, "drop" if how == "error" else how):
            if how == "error":
                findings.problem(f"env.overlong=error ends the run at its start: {text}")
            else:
                findings.say(text)
    except ValueError as error:
        findings.problem(str(error))
    splits["train"] = loop.source.rows
    if samples(loop):
        splits["eval"] = loop.evaluate.rows
    for name, rows in splits.items():
        try:
            sizes = row_lengths(loop, rows)
        except ValueError as error:
            findings.problem(str(error))
            continue
        least, half, most_of, most = (sizes[round(q * (len(sizes) - 1))] for q in (0, 0.5, 0.95, 1))
        longest = most if name == "train" else longest
        findings.say(
            f"{name:<5}  {len(rows)} rows ({len(sizes)} rendered), tokens: least {least}, "
            f"median {half}, 95 % up to {most_of}, most {most}"
        )
    whole = longest + settings["env"]["max_turns"] * new
    whole = max(min(whole, positions or whole), longest)
    findings.say(f"a sequence has at most {whole} tokens, the model takes {positions or 'any'}")
    return whole


def row_lengths(loop: Trainer, rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the lengths in tokens, sorted, of rows spread evenly over a split.

    ValueError if the template cannot render them.
    """
    env, renderer = loop.source.env, loop.policy.renderer
    some = range(0, len(rows), max(-(-len(rows) // RENDERED), 1))
    return sorted(
        len(renderer.render(env.messages(rows[i]), add_generation_prompt=samples(loop)).ids)
        for i in some
    )


def check_steps(
    loop: Trainer, settings: dict[str, Any], findings: Findings, *, longest: int
) -> None:
    """Say how many steps the run takes, and how often it sees the rows."""
    algorithm, trainer = settings["algorithm"], settings["trainer"]
    prompts, iterations = trainer["prompts_per_iteration"], trainer["num_iterations"]
    epochs, minibatches = algorithm["epochs"], algorithm["minibatches"]
    steps, rows = iterations * epochs * minibatches, len(loop.source.rows)
    findings.section(
        "Steps",
        f"{iterations} (iterations) x {epochs} (epochs) x {minibatches} (minibatches) = "
        f"{steps} steps; {iterations * prompts / rows:,.1f} times over the {rows} rows",
    )
    if longest > trainer["micro_batch_tokens"]:
        findings.say("a sequence may be longer than trainer.micro_batch_tokens: it goes alone then")
    if (warmup := settings["optimizer"]["warmup"]) > steps:
        findings.problem(
            f"optimizer.warmup={warmup} is longer than the run's {steps} steps, so that the "
            "learning rate stays below optimizer.lr; lower it"
        )


def check_engine(loop: Trainer, settings: dict[str, Any], findings: Findings) -> None:
    """Say what samples and why, and whether an engine agrees with the policy."""
    asked = f"policy.engine={settings['policy']['engine']}"
    if loop.generator is loop.policy:
        there = "is installed" if find_spec("vllm") else "is not: pip install -e '.[vllm]'"
        findings.section(
            "Engine",
            f"the policy itself samples, as {asked} says; for long replies on a GPU take "
            f"policy.engine=vllm (vLLM {there})",
        )
        return
    engine: Any = loop.generator
    findings.section("Engine", f"{engine.scorer.about} samples, as {asked} says")
    try:
        done = hand_over(loop.policy, engine)
    except RuntimeError as error:
        findings.problem(str(error))
        return
    findings.say(
        f"a probe after a hand-over of weights: {done.after:.2g} nats from the policy's log-probs "
        f"({done.before:.2g} before), at most {engine.tolerance:g}"
    )


def check_rewards(played: Iteration, settings: dict[str, Any], findings: Findings) -> None:
    """Say how fast rewards are, and how many groups would teach nothing."""
    batch, size = played.batch, settings["algorithm"]["group_size"]
    total = batch.get("reward_raw").sum(-1)  # [B]
    findings.section(
        "Rewards",
        f"mean {float(total.mean()):z.3f}, from {float(total.min()):.3g} to "
        f"{float(total.max()):.3g} over {len(total)} replies, in {played.rewards:.3f} s "
        f"({played.rewards / played.seconds:.0%} of the iteration)",
    )
    if played.rewards > max(SLOW * played.seconds, 1.0):
        findings.say("rewards are slow: env.rewards can run them in worker processes or together")
    if size < 2:
        return
    right, idle = batch.get("success").tolist(), float(idle_groups(batch).float().mean())
    rates = [sum(right[i] for i in rows) / len(rows) for rows in groups(batch.get("group_id"))]
    shares = ", ".join(f"{n}: {idle_share(rates, n):.0%}" for n in sorted({size, 4, 8, 16, 32}))
    findings.say(f"groups of {size} that earn one reward all over: {idle:.0%} measured")
    findings.say(
        f"all right or all wrong, at the pass rate {sum(rates) / len(rates):.2f}, by size of the "
        f"group: {shares}"
    )
    if idle == 1:
        findings.judge(
            f"all {len(rates)} groups earn one reward all over: nothing would be learnt; use "
            "easier rows, a larger algorithm.group_size, a warm-up by SFT, or a reward with degrees"
        )


def idle_share(rates: Sequence[float], group: int) -> float:
    """Return the expected share of groups whose replies are all right or all wrong.

    The mean of p^G + (1 - p)^G over the prompts' pass rates: such a group has no advantage.

    >>> round(idle_share([0.18], 4), 3), idle_share([0.0, 0.5], 2)
    (0.453, 0.75)
    """
    return sum(p**group + (1 - p) ** group for p in rates) / len(rates)
