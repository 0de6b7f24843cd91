"""preflight=true: run two iterations, keep nothing, and report the problems and costs of a run.

Every section prints its findings; a problem is a line with its remedy. The result is the number of
problems.
"""

import gc
from typing import Any

from trainer.modes.preflight.checks import check_match, check_rewards, check_rows, check_steps
from trainer.modes.preflight.costs import check_disk, check_memory, check_time
from trainer.modes.preflight.profile import Findings, profile, profile_rest
from trainer.modes.preflight.tokens import check_tokens
from trainer.trainer import Trainer


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Check the run of the settings; return the number of problems."""
    untrained = settings.get("trains_first", ())
    findings = Findings(quiet=not loop.runtime.is_main, untrained=bool(untrained))
    for name in untrained:
        findings.say(f"experiment {name} would be trained first; this looks at its untrained model")
    longest = check_rows(loop, settings, findings)
    check_steps(loop, settings, findings)
    gc.freeze()  # as a run does
    findings.section("Playing two iterations of the run ...")
    first, second = profile(loop, 0), profile(loop, 1)  # the second has AdamW's moments
    check_tokens(loop, first.batch, findings)
    if "reward_raw" in first.batch:
        check_rewards(first.batch, findings)
        check_match(loop.evaluate.task, first.batch, findings)
    rest = profile_rest(loop)
    check_memory(loop, settings, findings, played=second, rest=rest, longest=longest)
    check_time(loop, settings, findings, played=(first, second), rest=rest)
    check_disk(loop, settings, findings)
    return loop.runtime.gather(findings.finish())[0]
