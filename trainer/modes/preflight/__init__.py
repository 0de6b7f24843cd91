"""preflight=true: what a run would do, need and take, by a few iterations that nothing keeps.

Every section prints what it found; a problem is a line with its remedy, and their number is the
result. The parts, and the formulas, are in trainer/modes/preflight/.
"""

from typing import Any

from trainer.modes.preflight import sums
from trainer.modes.preflight.checks import (
    check_batches,
    check_rewards,
    check_rows,
    check_tokens,
    longest,
    row_lengths,
)
from trainer.modes.preflight.costs import check_disk, check_memory, check_time
from trainer.modes.preflight.findings import Findings
from trainer.modes.preflight.play import play
from trainer.trainer import Trainer


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Check the run that the settings describe; return the number of problems."""
    untrained = settings.get("trains_first", ())
    findings = Findings(quiet=not loop.runtime.is_main, untrained=bool(untrained))
    for name in untrained:
        findings.say(f"experiment {name} would be trained first; this looks at its untrained model")
    found = row_lengths(loop)
    prompt, new = longest(loop, settings, found)
    check_rows(loop, settings, findings, found=found, most=prompt + new)
    check_batches(settings, findings, longest=prompt + new, rows=len(loop.source.rows))
    played = play(loop, findings)
    if played:
        first = played[0]
        check_tokens(loop, first.batch, findings)
        if "reward_raw" in first.batch:
            check_rewards(first, settings, findings)
        rows = sums.Rows(len(first.batch), 0, prompt)
        if new:
            shared = settings["algorithm"]["group_size"] if loop.policy.scorer.share_prompts else 1
            rows = sums.Rows(len(first.batch), prompt, new, shared=shared)
        check_memory(loop, settings, findings, played=played, rows=rows)
        check_time(loop, settings, findings, played=played)
    check_disk(loop, settings, findings)
    return loop.runtime.gather(findings.finish())[0]
