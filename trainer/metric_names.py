"""The names under which runs log metrics (docs/metrics.md), to be known before there are any."""

import difflib
import re

NAMES = tuple(
    f"{group}/{name}"
    for group, names in {
        "reward": "mean std raw_mean errors dropped_fraction",
        "kl": "ref ref_sequence ref_k3 ref_full behaviour behaviour_k3 mismatch coeff efficiency",
        "policy": "importance_limited staleness entropy_coeff entropy clip_fraction ratio_max",
        "loss": "total policy kl preference entropy value",
        "sft": "deviation",
        "preference": "accuracy margin",
        "value": "explained_variance clip_fraction",
        "group": "zero_variance_fraction resampled",
        "response": "length_mean length_max truncated_fraction",
        "optim": "lr grad_norm early_stopped skipped_steps",
        "eval": "sampled_accuracy greedy_accuracy reward kl_ref kl_ref_sequence",
        "sync": "probe probe_before",
        "time": "collect_s sample_s score_s update_s sync_s iteration_s",
        "perf": "tokens_per_s peak_memory_gib",
        "progress": "iteration step tokens samples",
    }.items()
    for name in names.split()
)
ACCURACY, HELD_REWARD, HELD_KL = "eval/sampled_accuracy", "eval/reward", "eval/kl_ref_sequence"
MADE = re.compile(r"reward_part/.+|eval/\w+_accuracy/.+|eval/pass@\d+")  # of the task's own names


def unknown(name: str) -> str:
    """Return a hint at what a name that no run logs was meant to be; "" if it is one.

    >>> unknown("eval/sampled_acuracy"), unknown("reward_part/mine")
    ('; did you mean eval/sampled_accuracy?', '')
    >>> unknown("kl")
    '; did you mean kl/ref, kl/ref_sequence or kl/ref_k3?'
    """
    if name in NAMES or MADE.fullmatch(name):
        return ""
    near = [metric for metric in NAMES if name in re.split("[/_]", metric)][:3]
    near = near or difflib.get_close_matches(name, NAMES, 1)
    told = " or ".join(filter(None, [", ".join(near[:-1]), *near[-1:]]))
    return f"; did you mean {told}?" if near else "; docs/metrics.md names all"
