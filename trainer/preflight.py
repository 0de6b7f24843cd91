"""preflight=true: what a run would do, need and take, by a few iterations that nothing keeps.

Every section prints what it found; a problem is a line with its remedy, and their number is the
result. The formulas are in trainer/preflight_sums.py, what is said of rows in preflight_rows.py.
"""

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import psutil
from rich.console import Console
from rich.text import Text
from tensordict import TensorDictBase

from policies.scorer import max_positions
from trainer import preflight_sums as sums
from trainer.failures import MEMORY, headline
from trainer.preflight_costs import check_disk, check_memory, check_time
from trainer.preflight_memory import Peak
from trainer.preflight_rows import Timed, judged, learnt, lengths, marked, timed_rewards
from trainer.trainer import Clock, Trainer

ENOUGH, MOST = 4.0, 6  # seconds of iterations that are timed, and their number
MEASURED = 1  # the iteration whose memory is told: the first that has the optimizer's moments
SLOW = 0.2  # share of an iteration that rewards may take without a word


class Report:
    """Print sections and collect problems; `quiet` on ranks other than 0."""

    def __init__(self, *, quiet: bool = False, untrained: bool = False) -> None:
        self.console = Console(highlight=False, quiet=quiet)
        self.untrained = untrained  # another experiment would train the model first
        self.problems: list[str] = []
        self.start = time.time() - psutil.Process().create_time()  # seconds to load everything

    def section(self, title: str, *lines: str | Text) -> None:
        """Print lines under a title, which may have been printed."""
        self.console.print(Text(title, style="bold"))
        for line in lines:
            self.say(line)

    def say(self, line: str | Text) -> None:
        """Print a line of a section."""
        self.console.print(Text("  ").append(line), soft_wrap=True)

    def problem(self, text: str) -> None:
        """Note something that is to be changed before the run."""
        self.problems.append(text)
        self.console.print(Text(f"  problem: {text}", style="red"), soft_wrap=True)

    def judge(self, text: str) -> None:
        """Note a problem of what the model says: of one that is still to be trained it is none."""
        if self.untrained:
            self.say(f"of the untrained model: {text}")
        else:
            self.problem(text)

    def finish(self) -> int:
        """Say how many problems there are; return that."""
        count = len(self.problems)
        text = "no problem found" if not count else f"{count} problem{'s' if count > 1 else ''}:"
        self.section(f"preflight: {text}", *[f"- {problem}" for problem in self.problems])
        return count


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Check the run that the settings describe; return the number of problems."""
    first = settings.get("trains_first", ())
    report = Report(quiet=not loop.runtime.is_main, untrained=bool(first))
    for name in first:
        report.say(f"experiment {name} would be trained first; this looks at its untrained model")
    prompt, new = check_prompts(loop, settings, report)
    check_batches(settings, report, longest=prompt + new, rows=len(loop.source.rows))
    played = play(loop, report)
    if played:
        first = played[0]
        check_tokens(loop, first.batch, report)
        if "reward_raw" in first.batch:
            check_rewards(first, settings, report)
        count, group = len(first.batch), settings["algorithm"]["group_size"]
        rows = sums.Rows(count, 0, prompt)
        if new:
            shared = group if loop.policy.scorer.share_prompts else 1
            rows = sums.Rows(count, prompt, new, shared=shared)
        check_memory(loop, settings, played, report, rows)
        check_time(loop, settings, played, report)
    check_disk(loop, settings, report)
    return loop.runtime.gather(report.finish())[0]


class Iteration:
    """A real iteration: its batch, metrics, seconds and the peak memory of each phase."""

    def __init__(self, loop: Trainer, number: int) -> None:
        self.number = number
        self.peaks = {"loaded": Peak(loop.runtime.device).now()}
        self.clock, self.rewards = Clock(), Timed()
        batch = self._phase(loop, "generate", lambda: self._collect(loop))
        self.clock.lap("collect")
        batch = self._phase(loop, "score", lambda: loop.correct(loop.retrieve_kl(batch)))
        self.clock.lap("score")
        self.batch: TensorDictBase = loop.advantage(batch)
        self.metrics = self._phase(loop, "update", lambda: loop.update(self.batch))
        self.clock.lap("update")
        self.seconds = self.clock.seconds()["time/iteration_s"]

    def _collect(self, loop: Trainer) -> TensorDictBase:
        with timed_rewards(loop.source.env.base_env.task) as self.rewards:
            return loop.source(self.number)

    def _phase(self, loop: Trainer, name: str, work: Callable[[], Any]) -> Any:
        peak = Peak(loop.runtime.device, trim=self.number == MEASURED)
        out = work()
        self.peaks[name] = peak.highest()
        return out


def play(loop: Trainer, report: Report) -> list[Iteration]:
    """Play a cold iteration and a warm one, more of these while they are too short to time.

    What they fail at is a problem, on several ranks an error; none is returned then.
    """
    gc.freeze()  # as a run does
    try:
        played = [Iteration(loop, number) for number in (0, 1)]
        while len(played) < MOST and _seconds(loop, played) < ENOUGH:
            played.append(Iteration(loop, len(played)))
        return played
    except (ValueError, OSError, RuntimeError) as error:
        ours = isinstance(error, (ValueError, OSError)) or MEMORY.search(str(error))
        if loop.runtime.ranks > 1 or not ours:
            raise
        report.section("Iterations")
        report.problem(headline(error))
        return []


def _seconds(loop: Trainer, played: list[Iteration]) -> float:
    """Return what the iterations took, the same on every rank: all play as many."""
    return loop.runtime.maxima({"s": sum(done.seconds for done in played)})["s"]


def samples(loop: Trainer) -> bool:
    """Return whether the run samples replies: SFT and reward models do not."""
    return hasattr(loop.source, "prompts")


def check_prompts(loop: Trainer, settings: dict[str, Any], report: Report) -> tuple[int, int]:
    """Say how long the rows are; return the most tokens of a prompt, and of replies to it.

    Rows that are learnt as they are have no replies.
    """
    policy, env = settings["policy"], loop.source.env
    most, room = max_positions(loop.policy.model), policy["max_prompt_tokens"]
    new = settings["env"]["max_turns"] * policy["max_new_tokens"] if samples(loop) else 0
    splits = {"train": loop.source.rows} | ({"eval": loop.evaluate.rows} if new else {})
    report.section("Rows and their length")
    longest = 1
    for name, rows in splits.items():
        try:
            found = lengths(rows, env, loop.policy.renderer, prompts=samples(loop))
        except ValueError as error:
            report.problem(str(error))
            continue
        longest = max(longest, found.at(1)) if name == "train" else longest
        report.say(f"{name:<5}  {found}")
        if new and (over := found.above(room)):
            report.problem(
                f"{over} of {len(found.values)} {name} prompts are longer than "
                f"policy.max_prompt_tokens={room}, which ends the run; raise it to {found.at(1)} "
                "or drop those rows"
            )
        one = policy["max_new_tokens"] if new else 0
        if most is not None and (over := found.above(most - one)):
            report.problem(
                f"{over} of {len(found.values)} {name} rows with up to {one} new tokens do not fit "
                f"the model's {most} positions; drop those rows or lower policy.max_new_tokens"
            )
    new = int(min(new, (most or math.inf) - longest))
    limits = {"policy.max_prompt_tokens": room, "the model's positions": most}
    told = ", ".join(f"{n} {'none' if v is None else v}" for n, v in limits.items())
    report.say(f"limits {told}; a sequence has at most {longest + new} tokens")
    return longest, max(new, 0)


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
        f"{took.seconds / iteration.seconds:.0%} of the iteration",
    )
    if took.seconds > max(SLOW * iteration.seconds, 1.0):
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
