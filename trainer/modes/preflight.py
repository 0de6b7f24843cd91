"""preflight=true: what a run would do, need and take, by a few iterations that nothing keeps.

Every section prints what it found; a problem is a line with its remedy, and their number is the
result. The formulas are in trainer/preflight/sums.py, what is said of rows in rows.py beside it.
"""

import math
from typing import Any

from tensordict import TensorDictBase

from policies.scorer import max_positions
from trainer.preflight import sums
from trainer.preflight.costs import check_disk, check_memory, check_time
from trainer.preflight.play import Iteration, play
from trainer.preflight.report import Report
from trainer.preflight.rows import Lengths, judged, learnt, lengths, marked
from trainer.trainer import Trainer

SLOW = 0.2  # share of an iteration that rewards may take without a word


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Check the run that the settings describe; return the number of problems."""
    first = settings.get("trains_first", ())
    report = Report(quiet=not loop.runtime.is_main, untrained=bool(first))
    for name in first:
        report.say(f"experiment {name} would be trained first; this looks at its untrained model")
    found = row_lengths(loop)
    prompt, new = longest(loop, settings, found)
    check_rows(loop, settings, report, found=found, most=prompt + new)
    check_batches(settings, report, longest=prompt + new, rows=len(loop.source.rows))
    played = play(loop, report)
    if played:
        first = played[0]
        check_tokens(loop, first.batch, report)
        if "reward_raw" in first.batch:
            check_rewards(first, settings, report)
        rows = sums.Rows(len(first.batch), 0, prompt)
        if new:
            shared = settings["algorithm"]["group_size"] if loop.policy.scorer.share_prompts else 1
            rows = sums.Rows(len(first.batch), prompt, new, shared=shared)
        check_memory(loop, settings, report, played=played, rows=rows)
        check_time(loop, settings, report, played=played)
    check_disk(loop, settings, report)
    return loop.runtime.gather(report.finish())[0]


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
    report: Report,
    *,
    found: dict[str, Lengths | ValueError],
    most: int,
) -> None:
    """Say how long the rows are, which are too long, and the `most` tokens of a sequence."""
    positions, room = max_positions(loop.policy.model), settings["policy"]["max_prompt_tokens"]
    new = settings["policy"]["max_new_tokens"] if samples(loop) else 0
    report.section("Rows and their length")
    for name, rows in found.items():
        if isinstance(rows, ValueError):
            report.problem(str(rows))
            continue
        report.say(f"{name:<5}  {rows}")
        if new and (over := rows.above(room)):
            report.problem(
                f"{over} of {len(rows.values)} {name} prompts are longer than "
                f"policy.max_prompt_tokens={room}, which ends the run; raise it to {rows.at(1)} "
                "or drop those rows"
            )
        if positions is not None and (over := rows.above(positions - new)):
            report.problem(
                f"{over} of {len(rows.values)} {name} rows with up to {new} new tokens do not fit "
                f"the model's {positions} positions; drop those rows or lower policy.max_new_tokens"
            )
    limits = {"policy.max_prompt_tokens": room, "the model's positions": positions}
    told = ", ".join(f"{n} {'none' if v is None else v}" for n, v in limits.items())
    report.say(f"limits {told}; a sequence has at most {most} tokens")


def check_batches(settings: dict[str, Any], report: Report, *, longest: int, rows: int) -> None:
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
    report.section(
        "Batches",
        f"{cut.prompts} prompts x {group} = {cut.sequences} sequences an iteration, / {cut.ranks} "
        f"(ranks) = {cut.per_rank} a rank, / {cut.minibatches} (minibatches) = {cut.per_step} a "
        "step on all ranks",
        f"{cut.epochs} (epochs) x {cut.minibatches} (minibatches) = "
        f"{cut.epochs * cut.minibatches} steps an iteration",
        f"micro-batches of {limit} tokens: at most {parts} a step and rank "
        f"(sequences of {longest} tokens)",
        f"{cut.iterations} (iterations) x {cut.epochs * cut.minibatches} = {cut.steps} steps on "
        f"{cut.iterations * cut.sequences} sequences; {passes:.2g} times over the {rows} rows",
    )
    if longest > limit:
        report.say("a sequence may be longer than trainer.micro_batch_tokens: it goes alone then")
    if (warmup := settings["optimizer"]["warmup"]) > cut.steps:
        report.problem(
            f"optimizer.warmup={warmup} is longer than the run's {cut.steps} steps, so that the "
            "learning rate stays below optimizer.lr; lower it"
        )


def check_tokens(loop: Trainer, batch: TensorDictBase, report: Report) -> None:
    """Show what is learnt of a real row, and whether it ends as a turn does."""
    colour = report.console.is_terminal and not report.console.no_color
    text = marked(batch, 0, loop.policy.tokenizer, colour=colour)
    size = int(batch.get(("masks", "all_attention_mask"))[0].sum())
    kept, total = int(batch.get("loss_mask")[0].sum()), len(batch)
    what = "sampled reply" if samples(loop) else "row"
    report.section(f"Tokens: a real {what}; {kept} of {size} are learnt (green)", text)
    ends = ", ".join(repr(loop.policy.tokenizer.decode([i])) for i in sorted(loop.policy.stop_ids))
    empty, ended = learnt(batch, loop.policy.stop_ids)
    report.say(f"template {loop.policy.renderer.name}; a turn ends by {ends}")
    report.say(f"{ended} of {total} rows end so, {empty} learn nothing")
    if empty == total:
        report.problem(
            "no row has a token to learn; set policy.chat_template=chatml, or to a template with "
            "{% generation %} tags"
            if not samples(loop)
            else "no reply has a token to learn; look at algorithm.shaping and at dropped replies"
        )
    elif not ended and not samples(loop):
        report.problem(
            "no row ends by an end of turn that is learnt, so that replies would not stop; set "
            "policy.chat_template=chatml"
        )
    elif not ended:
        report.judge(
            f"no reply of {total} ended by itself; raise policy.max_new_tokens, or begin with a "
            "model that knows this template (policy.chat_template)"
        )


def check_rewards(iteration: Iteration, settings: dict[str, Any], report: Report) -> None:
    """Say how fast rewards are, and how many groups would teach nothing."""
    took, batch, size = iteration.rewards, iteration.batch, settings["algorithm"]["group_size"]
    total = batch.get("reward_raw").sum(-1)
    report.section(
        "Rewards",
        f"mean {float(total.mean()):.3f}, from {float(total.min()):.3g} to "
        f"{float(total.max()):.3g} over {len(total)} replies",
        f"{took.seconds:.3f} s for {took.replies} replies, "
        f"{took.seconds / iteration.total:.0%} of the iteration",
    )
    if took.seconds > max(SLOW * iteration.total, 1.0):
        report.say("rewards are slow: env.rewards can run them in worker processes or together")
    if size < 2:
        return
    found = judged(batch)
    rate = sum(found.rates) / len(found.rates)
    sizes = sorted({size, 4, 8, 16, 32})
    told = ", ".join(f"{n}: {found.predicted(n):.0%}" for n in sizes)
    report.say(f"groups of {size} that earn one reward all over: {found.idle:.0%} measured")
    report.say(f"all right or all wrong, at the pass rate {rate:.2f}, by size of the group: {told}")
    if found.idle == 1:
        report.judge(
            f"all {len(found.rates)} groups earn one reward all over: nothing would be learnt; use "
            "easier rows, a larger algorithm.group_size, a warm-up by SFT, or a reward with degrees"
        )
