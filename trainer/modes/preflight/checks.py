"""What a preflight says of rows, steps, tokens and rewards; memory, time, disk: costs.py."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.text import Text
from tensordict import TensorDictBase

from policies.packing import groups
from policies.scorer import max_positions
from trainer.fitting import fit_rows
from trainer.metrics import idle_groups
from trainer.modes.preflight.play import Findings, Iteration
from trainer.trainer import Trainer
from trainer.transcripts import token_texts

RENDERED = 1000  # rows of a split that are rendered to learn their lengths
LONG = 60  # tokens of a row shown at each end
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


def check_tokens(loop: Trainer, batch: TensorDictBase, findings: Findings) -> None:
    """Show what is learnt of a real row, and whether it ends as a turn does."""
    colour = findings.console.is_terminal and not findings.console.no_color
    tokenizer, stop_ids = loop.policy.tokenizer, loop.policy.stop_ids
    what, how = "sampled reply" if samples(loop) else "row", "green" if colour else "in [[ ]]"
    text = marked(batch, 0, tokenizer, colour=colour)
    findings.section(f"Tokens: a real {what}, what is learnt of it {how}", text)
    empty, ended = learnt(batch, stop_ids)
    ends = ", ".join(repr(tokenizer.decode([i])) for i in sorted(stop_ids))
    findings.say(
        f"template {loop.policy.renderer.name}; a turn ends by {ends}: {ended} of {len(batch)} "
        f"rows end so, {empty} learn nothing"
    )
    if empty == len(batch):
        findings.problem(
            "no reply has a token to learn; look at after_rollout and at dropped replies"
            if samples(loop)
            else "no row has a token to learn; set policy.chat_template=chatml, or to a template "
            "with {% generation %} tags"
        )
    elif not ended and samples(loop):
        findings.judge(
            f"no reply of {len(batch)} ended by itself; raise policy.max_new_tokens, or begin with "
            "a model that knows this template (policy.chat_template)"
        )
    elif not ended:
        findings.problem(
            "no row ends by an end of turn that is learnt, so that replies would not stop; set "
            "policy.chat_template=chatml"
        )


def marked(batch: TensorDictBase, i: int, tokenizer: Any, *, colour: bool) -> Text:
    """Return row i, the tokens that are learnt in green, without colours in [[ ]]."""
    size = int(batch.get(("masks", "all_attention_mask"))[i].sum())  # rows are right-padded
    texts = token_texts(batch.get(("tokens", "full"))[i, :size].tolist(), tokenizer)
    kept = batch.get("loss_mask")[i, :size].tolist()
    if size > 2 * LONG:
        texts = [*texts[:LONG], f" ... {size - 2 * LONG} tokens ... ", *texts[-LONG:]]
        kept = [*kept[:LONG], False, *kept[-LONG:]]
    out = Text()
    for learns, pairs in groupby(zip(kept, texts, strict=True), key=lambda pair: pair[0]):
        text = "".join(part for _, part in pairs).replace("\n", "\\n")
        text = "".join(c if c.isprintable() else " " for c in text)
        shown = f"[[{text}]]" if learns and not colour else text
        out.append(shown, style="green" if learns else "dim")
    return out


def learnt(batch: TensorDictBase, stop_ids: frozenset[int]) -> tuple[int, int]:
    """Return how many rows learn nothing, and how many end their learnt tokens with a stop id."""
    mask, ids = batch.get("loss_mask"), batch.get(("tokens", "full"))  # [B, T]
    places = mask.int().cumsum(-1).argmax(-1)  # [B] the last kept token
    last = ids.gather(-1, places.unsqueeze(-1)).squeeze(-1).tolist()
    some = mask.any(-1).tolist()
    ended = sum(any_ and token in stop_ids for any_, token in zip(some, last, strict=True))
    return some.count(False), ended


def check_rewards(played: Iteration, settings: dict[str, Any], findings: Findings) -> None:
    """Say how fast rewards are, and how many groups would teach nothing."""
    batch, size = played.batch, settings["algorithm"]["group_size"]
    total = batch.get("reward_raw").sum(-1)  # [B]
    findings.section(
        "Rewards",
        f"mean {float(total.mean()):.3f}, from {float(total.min()):.3g} to "
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
