"""What a preflight says of rows, batches, tokens and rewards; memory, time, disk: costs.py."""

import math
from typing import Any

from tensordict import TensorDictBase

from policies.scorer import max_positions
from trainer.modes.preflight import sums
from trainer.modes.preflight.findings import Findings
from trainer.modes.preflight.play import Iteration
from trainer.modes.preflight.rows import Lengths, judged, learnt, lengths, marked
from trainer.trainer import Trainer

FEW = 10  # held-out rows whose accuracy is worth a word
SLOW = 0.2  # share of an iteration that rewards may take without a word


def samples(loop: Trainer) -> bool:
    """Return whether the run samples replies: SFT and reward models do not."""
    return hasattr(loop.source, "prompts")


def row_lengths(loop: Trainer) -> dict[str, Lengths | ValueError]:
    """Return how long the rows of each split are, or why the template cannot render them."""
    splits, out = {"train": loop.source.rows}, {}
    if samples(loop):
        splits["eval"] = loop.evaluate.rows
    for name, rows in splits.items():
        try:
            out[name] = lengths(rows, loop.source.env, loop.policy.renderer, prompts=samples(loop))
        except ValueError as error:
            out[name] = error
    return out


def longest(
    loop: Trainer, settings: dict[str, Any], found: dict[str, Lengths | ValueError]
) -> tuple[int, int]:
    """Return the most tokens of a train row, and of the replies that follow it."""
    rows, most = found["train"], max_positions(loop.policy.model)
    row = rows.at(1) if isinstance(rows, Lengths) else 1
    new = settings["env"]["max_turns"] * settings["policy"]["max_new_tokens"]
    return row, max(min(new, (most or math.inf) - row), 0) if samples(loop) else 0


def check_rows(
    loop: Trainer,
    settings: dict[str, Any],
    findings: Findings,
    *,
    found: dict[str, Lengths | ValueError],
    most: int,
) -> None:
    """Say how long the rows are, which are too long, and the `most` tokens of a sequence."""
    positions, room = max_positions(loop.policy.model), settings["policy"]["max_prompt_tokens"]
    new = settings["policy"]["max_new_tokens"] if samples(loop) else 0
    findings.section("Rows and their length")
    for name, rows in found.items():
        if isinstance(rows, ValueError):
            findings.problem(str(rows))
            continue
        findings.say(f"{name:<5}  {rows}")
        if name == "eval" and rows.rows < FEW:
            findings.say("an accuracy of so few rows says little: name more by env.eval_dataset=")
        if new and (over := rows.above(room)):
            findings.problem(
                f"{over} of {len(rows.values)} {name} prompts are longer than "
                f"policy.max_prompt_tokens={room}, which ends the run; raise it to {rows.at(1)} "
                "or drop those rows"
            )
        if positions is not None and (over := rows.above(positions - new)):
            findings.problem(
                f"{over} of {len(rows.values)} {name} rows with up to {new} new tokens do not fit "
                f"the model's {positions} positions; drop those rows or lower policy.max_new_tokens"
            )
    limits = {"policy.max_prompt_tokens": room, "the model's positions": positions}
    told = ", ".join(f"{n} {'none' if v is None else v}" for n, v in limits.items())
    findings.say(f"limits {told}; a sequence has at most {most} tokens")


def check_batches(settings: dict[str, Any], findings: Findings, *, longest: int, rows: int) -> None:
    """Say how an iteration is cut up, and how much the run takes in all."""
    algorithm, run = settings["algorithm"], settings["trainer"]
    source = algorithm["source"]["_target_"].rpartition(".")[2]
    group = {"Demonstrations": 1, "PreferencePairs": 2}.get(source, algorithm["group_size"])
    cut = sums.Batches(
        prompts=run["prompts_per_iteration"],
        group=group,
        ranks=settings["launch"]["num_processes"],
        minibatches=algorithm["minibatches"],
        epochs=algorithm["epochs"],
        iterations=run["num_iterations"],
    )
    limit = run["micro_batch_tokens"]
    parts = cut.backwards(limit=limit, longest=longest)
    passes = cut.iterations * cut.prompts / rows
    findings.section(
        "Batches",
        f"{cut.prompts} prompts x {group} = {cut.sequences} sequences an iteration, / {cut.ranks} "
        f"(ranks) = {cut.per_rank} a rank, / {cut.minibatches} (minibatches) = {cut.per_step} a "
        "step on all ranks",
        f"{cut.epochs} (epochs) x {cut.minibatches} (minibatches) = "
        f"{cut.epochs * cut.minibatches} steps an iteration",
        f"micro-batches of {limit} tokens: at most {parts} a step and rank "
        f"(sequences of {longest} tokens)",
        f"{cut.iterations} (iterations) x {cut.epochs * cut.minibatches} = {cut.steps} steps on "
        f"{cut.iterations * cut.sequences} sequences; {passes:,.1f} times over the {rows} rows",
    )
    if longest > limit:
        findings.say("a sequence may be longer than trainer.micro_batch_tokens: it goes alone then")
    if (warmup := settings["optimizer"]["warmup"]) > cut.steps:
        findings.problem(
            f"optimizer.warmup={warmup} is longer than the run's {cut.steps} steps, so that the "
            "learning rate stays below optimizer.lr; lower it"
        )


def check_tokens(loop: Trainer, batch: TensorDictBase, findings: Findings) -> None:
    """Show what is learnt of a real row, and whether it ends as a turn does."""
    colour = findings.console.is_terminal and not findings.console.no_color
    text = marked(batch, 0, loop.policy.tokenizer, colour=colour)
    size = int(batch.get(("masks", "all_attention_mask"))[0].sum())
    kept, total = int(batch.get("loss_mask")[0].sum()), len(batch)
    what, how = "sampled reply" if samples(loop) else "row", "green" if colour else "in [[ ]]"
    findings.section(f"Tokens: a real {what}; {kept} of {size} are learnt ({how})", text)
    ends = ", ".join(repr(loop.policy.tokenizer.decode([i])) for i in sorted(loop.policy.stop_ids))
    empty, ended = learnt(batch, loop.policy.stop_ids)
    findings.say(f"template {loop.policy.renderer.name}; a turn ends by {ends}")
    findings.say(f"{ended} of {total} rows end so, {empty} learn nothing")
    if empty == total:
        findings.problem(
            "no row has a token to learn; set policy.chat_template=chatml, or to a template with "
            "{% generation %} tags"
            if not samples(loop)
            else "no reply has a token to learn; look at after_rollout and at dropped replies"
        )
    elif not ended and not samples(loop):
        findings.problem(
            "no row ends by an end of turn that is learnt, so that replies would not stop; set "
            "policy.chat_template=chatml"
        )
    elif not ended:
        findings.judge(
            f"no reply of {total} ended by itself; raise policy.max_new_tokens, or begin with a "
            "model that knows this template (policy.chat_template)"
        )


def check_rewards(iteration: Iteration, settings: dict[str, Any], findings: Findings) -> None:
    """Say how fast rewards are, and how many groups would teach nothing."""
    took, batch, size = iteration.rewards, iteration.batch, settings["algorithm"]["group_size"]
    total = batch.get("reward_raw").sum(-1)
    findings.section(
        "Rewards",
        f"mean {float(total.mean()):.3f}, from {float(total.min()):.3g} to "
        f"{float(total.max()):.3g} over {len(total)} replies",
        f"{took.seconds:.3f} s for {took.replies} replies, "
        f"{took.seconds / iteration.total:.0%} of the iteration",
    )
    if took.seconds > max(SLOW * iteration.total, 1.0):
        findings.say("rewards are slow: env.rewards can run them in worker processes or together")
    if size < 2:
        return
    found = judged(batch)
    rate = sum(found.rates) / len(found.rates)
    sizes = sorted({size, 4, 8, 16, 32})
    told = ", ".join(f"{n}: {found.predicted(n):.0%}" for n in sizes)
    findings.say(f"groups of {size} that earn one reward all over: {found.idle:.0%} measured")
    findings.say(
        f"all right or all wrong, at the pass rate {rate:.2f}, by size of the group: {told}"
    )
    if found.idle == 1:
        findings.judge(
            f"all {len(found.rates)} groups earn one reward all over: nothing would be learnt; use "
            "easier rows, a larger algorithm.group_size, a warm-up by SFT, or a reward with degrees"
        )
