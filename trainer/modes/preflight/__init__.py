"""preflight=true: what a run would do, need and take, by two iterations that nothing keeps.

Every section prints what it found; a problem is a line with its remedy, and their number is the
result.
"""

import gc
from typing import Any

from trainer.modes.preflight.checks import check_rewards, check_rows, check_steps
from trainer.modes.preflight.costs import check_disk, check_memory, check_time
from trainer.modes.preflight.play import Findings, play
from trainer.modes.preflight.tokens import check_tokens
from trainer.trainer import Trainer


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Check the run that the settings describe; return the number of problems."""
    untrained = settings.get("trains_first", ())
    findings = Findings(quiet=not loop.runtime.is_main, untrained=bool(untrained))
    for name in untrained:
        findings.say(f"experiment {name} would be trained first; this looks at its untrained model")
    longest = check_rows(loop, settings, findings)
    check_steps(loop, settings, findings)
    gc.freeze()  # as a run does
    findings.section("Playing two iterations of the run ...")
    first, second = play(loop, 0), play(loop, 1)  # the second begins with the optimizer's moments
    check_tokens(loop, first.batch, findings)
    if "reward_raw" in first.batch:
        check_rewards(first.batch, findings)
    check_memory(loop, settings, findings, played=second, longest=longest)
    check_time(loop, settings, findings, played=(first, second))
    check_disk(loop, settings, findings)
    return loop.runtime.gather(findings.finish())[0]
