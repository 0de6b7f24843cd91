"""Too much of a learnt reward: Gao's curves in miniature (docs/overoptimisation.md).

    python -m benchmarks.overoptimisation [--seeds 1 2 3] [--coeffs 0 1] [--leash 8 16 64]

For each seed and each size of reward model (the proxy): train it on the packaged pairs (rm_tiny),
then a policy against it (ppo_tldr_tiny, half its rate) at each `kl.coeff`, with an evaluation every
second iteration: held-out accuracy (gold), reward (proxy) and KL of the very same replies. Then 256
replies of the reference to each held-out prompt say what best-of-n gets of the same proxy. One run
after the other, a minute of one core each; what is finished in --folder is not run again. Draws
docs/overoptimisation.svg (--svg) and prints the tables.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from benchmarks.gao import Form, apart
from benchmarks.once import ROOT, limit_once, markdown, train_once
from benchmarks.overoptimisation_picture import draw
from benchmarks.overoptimisation_runs import (
    Points,
    Proxy,
    all_coeffs,
    best_points,
    fit_of,
    having,
    mean_points,
    mean_way,
    near_peak,
    points,
    tilted,
)
from envs.tasks.task import Row
from trainer.metric_names import HELD_REWARD
from trainer.runs.run_files import load_run

WIDTHS = (8, 16, 32, 64)  # of a proxy; a step has four times the weights, 64 those of the policy
SAMPLES = 256  # replies of the reference to a prompt


def main() -> None:
    """Run what is missing, then draw and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--coeffs", nargs="+", default=["0", "1"], help="the first is the free one")
    parser.add_argument(
        "--leash", type=int, nargs="*", help="widths that the others are run on; all"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "overoptimisation")
    parser.add_argument("--svg", type=Path, default=ROOT / "docs" / "overoptimisation.svg")
    args = parser.parse_args()
    base = args.folder.resolve()
    sizes: dict[int, list[Proxy]] = {width: [] for width in args.widths}
    for seed in args.seeds:
        for width in args.widths:
            every = args.leash is None or width in args.leash
            coeffs = args.coeffs if every else args.coeffs[:1]
            sizes[width].append(Proxy(width, seed, base, coeffs))
            work(sizes[width][-1])
    leashed = [leashes(sizes)] if len(all_coeffs(sizes)) > 1 else []
    print("\n\n".join([proxies(sizes), fits(sizes), *leashed, at_one_kl(sizes)]))
    args.svg.write_text(draw(sizes))
    print(f"\n{args.svg}")


def commands(proxy: Proxy) -> dict[Path, list[str]]:
    """Return the overrides of the runs of a proxy, by folder and in order."""
    body, seed = proxy.base / "bodies" / proxy.name, f"seed={proxy.seed}"
    told = {proxy.model.parent: ["experiment=rm_tiny", f"policy.model={body}", seed]}
    for coeff in proxy.coeffs:
        words = ["experiment=ppo_tldr_tiny", f"env.task.reward_model={proxy.model}", seed]
        words += [f"kl.coeff={coeff}", "optimizer.lr=5e-5", "eval.every=2"]
        told[proxy.run(coeff)] = [*words, "eval.num_samples=8", "eval.greedy=false"]
    return told


def work(proxy: Proxy) -> None:
    """Train what is missing of a proxy and its policies, and sample the reference."""
    body = proxy.base / "bodies" / proxy.name
    if not (body / "model.safetensors").is_file():
        build_body(body, proxy.width, proxy.seed)
    for folder, told in commands(proxy).items():
        if not train_once(told, folder):
            raise SystemExit(f"{folder} failed")
    first = proxy.run(proxy.coeffs[0])
    limit_once(first, [first], SAMPLES)


def build_body(folder: Path, width: int, seed: int) -> None:
    """Write the tiny model at another width, with random weights of this seed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from policies.quiet import quiet
    from policies.tiny import build_tiny

    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        build_tiny(folder)  # the tokenizer and the template are its
        config = AutoConfig.from_pretrained(folder)
        config.hidden_size, config.intermediate_size, config.head_dim = width, 3 * width, width // 2
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def proxies(sizes: Mapping[int, Sequence[Proxy]]) -> str:
    """Return the table of the proxies themselves."""
    rows = []
    for width, found in sizes.items():
        scored = [judged(proxy) for proxy in found]
        liked = [float((p.limit.reward > 0)[p.limit.success == 0].mean()) for p in found]
        body, whole, pairs = (fmean(column) for column in zip(*scored, strict=True))
        rows.append([width, f"{body:.0f}", f"{whole:.0f}", f"{pairs:.3f}", f"{fmean(liked):.3f}"])
    head = ["width", "weights of the body", "with embeddings", "held-out pairs it ranks right"]
    return markdown([*head, "wrong replies it likes better than the right one"], rows)


def judged(proxy: Proxy) -> tuple[int, int, float]:
    """Return weights without and with embeddings, and the share of held-out pairs ranked right."""
    from envs.tasks.task import assistant
    from policies.reward_scorer import ChatRewards

    score, rows = ChatRewards(proxy.model), held_out(proxy)
    better, worse = (
        np.array(score([[*row["messages"], assistant(row[side])] for row in rows]))
        for side in ("chosen", "rejected")
    )
    whole = sum(p.numel() for p in score.model.parameters())
    embeddings = score.model.transformer.get_input_embeddings().weight.numel()
    return whole - embeddings, whole, float((better > worse).mean())


def held_out(proxy: Proxy) -> Sequence[Row]:
    """Return the pairs that a proxy was not trained on, by the configuration of its run.

    Its task splits by a seed of its own, which is not the run's.
    """
    from conf.build import make_task

    return make_task(load_run(proxy.model.parent).config["env"]).rows("eval")


def fits(sizes: Mapping[int, Sequence[Proxy]]) -> str:
    """Return the table of the fits of RL, in both forms, and of best-of-n."""
    rows = []
    for width, found in sizes.items():
        free, best = points(found, found[0].coeffs[0]), best_points(found)
        rows.append([width, "RL", "d (alpha - beta log d)", *fit_cells(free, "rl")])
        rows.append([width, "RL", "d (alpha - beta d)", *fit_cells(free, "best_of")])
        rows.append([width, "best-of-n", "d (alpha - beta d)", *fit_cells(best, "best_of")])
    head = ["width", "of", "form", "alpha", "beta", "RMSE", "largest", "R²", "R², all points"]
    return markdown([*head, "peak fitted: KL, gain", "highest point"], rows)


def fit_cells(measured: Points, form: Form) -> list[str]:
    """Return a fit of the points not below the start, and how well one of all points does."""
    found, whole = fit_of(near_peak(measured), form), fit_of(measured, form)
    peak = found.peak
    told = "-" if peak is None else f"{peak:.2f}, {found(peak):.3f}"
    kl, gain = max(measured, key=lambda point: point[1])
    numbers = (found.alpha, found.beta, found.rmse, found.largest)
    cells = [*(f"{x:.3f}" for x in numbers), *(f"{x.r2:.2f}" for x in (found, whole))]
    return [*cells, told, f"{kl:.2f}, {gain:.3f}"]


def leashes(sizes: Mapping[int, Sequence[Proxy]]) -> str:
    """Return the table of what a penalty moves: with less without, mean and spread of seeds."""
    rows = []
    pairs = (("kl", "gold"), ("kl", "proxy"), ("proxy", "gold"))
    for coeff in all_coeffs(sizes)[1:]:
        columns = []
        for width, every in sizes.items():
            found = having(every, coeff)
            if not found:
                continue
            columns.append([[moved(p, coeff, *pair) for p in found] for pair in pairs])
            kl, gold = mean_way(found, coeff)[-1]
            spent = [fmean(share) for share in zip(*(shares(p, coeff) for p in found), strict=True)]
            end = [
                f"{kl:.2f}, {gold:.2f}",
                ", ".join("-" if math.isnan(x) else f"{x:.2f}" for x in spent),
            ]
            rows.append([coeff, width, *map(spread, columns[-1]), *end])
        means = [spread([fmean(seeds) for seeds in each]) for each in zip(*columns, strict=True)]
        rows.append([coeff, "all, ± of the sizes", *means, "", ""])
    head = ["kl.coeff", "width", "gold at one KL", "proxy at one KL", "gold at one proxy"]
    return markdown([*head, "end: KL, gold", "efficiency there, and without"], rows)


def moved(proxy: Proxy, coeff: str, at: str, what: str) -> float:
    """Return how much higher a penalised policy lies than a free one at one KL, on average."""
    with_, free = (
        [*zip(getattr(way, at), getattr(way, what), strict=True)]
        for way in (proxy.ways[coeff], proxy.ways[proxy.coeffs[0]])
    )
    return fmean(apart(with_, free))


def shares(proxy: Proxy, coeff: str) -> tuple[float, ...]:
    """Return the least KL for the proxy's reward over the KL, at the end and without a penalty.

    That without is of the evaluation nearest in KL.
    """
    held, free = proxy.ways[coeff], proxy.ways[proxy.coeffs[0]]
    near = min(range(len(free.kl)), key=lambda i: abs(free.kl[i] - held.kl[-1]))
    ends = ((held, -1), (free, near))
    found = [proxy.limit.efficiency(HELD_REWARD, w.proxy[i], w.kl[i]) for w, i in ends]
    return tuple(math.nan if share is None else share for share in found)


def spread(values: Sequence[float]) -> str:
    """Return mean and, of several, standard deviation."""
    return f"{fmean(values):+.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def at_one_kl(sizes: Mapping[int, Sequence[Proxy]]) -> str:
    """Return the table of the highest gold by each means: KL and accuracy."""
    rows = []
    for width, found in sizes.items():
        start = fmean(float(p.limit.success.mean()) for p in found)
        ways = [mean_way(having(found, coeff), coeff) for coeff in all_coeffs(sizes)]
        best = mean_points([best_points([p]) for p in found])
        ends = mean_points([tilted(p) for p in found])
        tops = [*map(top, ways), top([(k, start + v) for k, v in best]), top(ends)]
        rows.append([width, f"{start:.3f}", *tops])
    coeffs = [f"RL, kl.coeff={coeff}" for coeff in all_coeffs(sizes)]
    return markdown(["width", "start", *coeffs, "best-of-n", "reference reweighted"], rows)


def top(way: Points) -> str:
    """Return the highest value and where it is."""
    if not way:
        return ""
    kl, value = max(way, key=lambda point: point[1])
    return f"{value:.3f} at {kl:.2f}"


if __name__ == "__main__":
    main()
