"""What wastes KL: GRPO with one thing changed at a time, against the limit (docs/kl.md).

    python -m benchmarks.kl_study [--seeds 1 2 3] [--coeffs 0.1 0.3 1]
    python -m benchmarks.kl_study --only no_std k1_no_std_linear --coeffs 0.1 0.3
    python -m benchmarks.kl_study --experiment grpo_smollm --seeds 1 --limit 64 \
        --coeffs 0.02 0.1 0.3 1

Each way (a line of WAYS) is run at each coefficient on each seed, one after the other; what is
finished in --folder is not run again. Then the reference is sampled once (--limit replies to each
held-out prompt, as by `python -m trainer.reports <run> --limit 512`), and a table printed: held-out
accuracy, KL in nats a reply, and efficiency, the least KL for what was reached over what was spent,
of the means of the seeds (fewer, where some failed, are counted). Efficiencies of one column are of
different accuracies: a row that stands higher at every accuracy is the better frontier.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.once import ROOT, limit_once, markdown, train_once
from trainer.limit import Limit
from trainer.reports.limits import Reached, held_out
from trainer.runs.run_files import load_run

# Where all start: k3 in the loss, a constant rate; 20,480 replies, of SmolLM2 768.
BASE = {
    "grpo_tiny": (
        "algorithm=grpo kl.estimator=k3 optimizer.schedule=constant"
        " trainer.num_iterations=80 trainer.prompts_per_iteration=32"
    ),
    "grpo_smollm": (
        "algorithm=grpo kl.estimator=k3 optimizer.schedule=constant"
        " trainer.num_iterations=12 trainer.prompts_per_iteration=8"
    ),
}
SMOLLM = ("default", "full_linear", "full_linear_small24")  # other ways have rates of grpo_tiny
LINEAR, NO_STD = "optimizer.schedule=linear", "algorithm.scale_by_std=false"
FULL = f"kl.estimator=full {LINEAR}"
REWARD = "kl.estimator=k1 kl.where=reward"
WAYS = {  # a name, and what it changes
    "default": "",
    "linear": LINEAR,
    "half_lr": "optimizer.lr=2.5e-4",
    "no_std": NO_STD,
    "k1": REWARD,
    "k2": "kl.estimator=k2",
    "full": "kl.estimator=full",
    "k3_mini2": "algorithm.minibatches=2",
    "k3_ratio_mini2": "kl.estimator=k3_ratio algorithm.minibatches=2",
    "k1_linear": f"{REWARD} {LINEAR}",
    "k2_linear": f"kl.estimator=k2 {LINEAR}",
    "full_linear": FULL,
    "k1_no_std_linear": f"{REWARD} {LINEAR} {NO_STD}",
    "k2_no_std_linear": f"kl.estimator=k2 {LINEAR} {NO_STD}",
    "full_no_std_linear": f"{FULL} {NO_STD}",
    "full_linear_double_lr": f"{FULL} optimizer.lr=1e-3",
    "full_linear_constant": f"{FULL} algorithm.aggregation=constant",
    "full_linear_mini2": f"{FULL} algorithm.minibatches=2",
    "full_linear_entropy": f"{FULL} algorithm.entropy_coeff=0.01",
    "full_linear_groups": f"{FULL} algorithm.group_size=16 trainer.prompts_per_iteration=16",
    "full_linear_lora": f"{FULL} policy.lora.r=8 optimizer.lr=2e-3",
    "full_stop": "kl.estimator=full eval.every=8 trainer.patience=2",
    "full_linear_small": f"{FULL} trainer.num_iterations=160 trainer.prompts_per_iteration=16",
    "full_linear_small240": f"{FULL} trainer.num_iterations=240 trainer.prompts_per_iteration=16",
    "full_linear_small24": f"{FULL} trainer.num_iterations=24 trainer.prompts_per_iteration=4",
    "full_linear_long": f"{FULL} trainer.num_iterations=160",
}


def main() -> None:
    """Run what is missing, then print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--coeffs", nargs="+", default=["0.1", "0.3", "1"])
    parser.add_argument("--only", nargs="+", choices=WAYS, help="ways")
    parser.add_argument("--experiment", default="grpo_tiny", choices=BASE)
    parser.add_argument("--limit", type=int, default=512, help="replies of the reference")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "kl_study")
    args = parser.parse_args()
    tiny = args.experiment == "grpo_tiny"
    only = args.only or [
        way for way in WAYS if (way != "full_linear_small24" if tiny else way in SMOLLM)
    ]
    base = args.folder.resolve() / args.experiment
    start = [f"experiment={args.experiment}", *BASE[args.experiment].split()]
    for way in only:
        for coeff in args.coeffs:
            for seed in args.seeds:
                told = [*start, *WAYS[way].split(), f"kl.coeff={coeff}", f"seed={seed}"]
                train_once([*distinct(told), "eval.num_samples=16"], base / way / coeff / str(seed))
    runs = [path.parent for path in sorted(base.glob("*/*/*/metrics.jsonl"))]
    limit = limit_once(base, runs, args.limit)
    print(table(base, only, args.coeffs, args.seeds, limit))


def distinct(told: Sequence[str]) -> list[str]:
    """Return overrides, of those for one key the last."""
    return list({word.partition("=")[0]: word for word in told}.values())


def table(
    base: Path, ways: Sequence[str], coeffs: Sequence[str], seeds: Sequence[int], limit: Limit
) -> str:
    """Return the table: a row for each way, a cell for each coefficient."""
    rows = []
    for way in ways:
        cells = []
        for coeff in coeffs:
            ends = [end(base / way / coeff / str(seed), limit.metric) for seed in seeds]
            cells.append(cell([found for found in ends if found], limit, of=len(seeds)))
        rows.append([way, *cells])
    return markdown(["kl.coeff", *coeffs], rows)


def end(folder: Path, metric: str) -> Reached | None:
    """Return the last evaluation of a finished run, None without one."""
    run = load_run(folder) if folder.exists() else None
    found = held_out(run, metric) if run and run.state == "finished" else []
    return found[-1] if found else None


def cell(ends: Sequence[Reached], limit: Limit, *, of: int) -> str:
    """Return accuracy, KL and efficiency of some seeds: means, and efficiency of the means."""
    if not ends:
        return "-"
    value, kl = (fmean(getattr(end, name) for end in ends) for name in ("value", "kl"))
    share = limit.efficiency(limit.metric, value, kl)
    text = f"{value:.3f} {kl:.2f} **{'-' if share is None else format(share, '.2f')}**"
    return text if len(ends) == of else f"{text} ({len(ends)} of {of} seeds)"


if __name__ == "__main__":
    main()
