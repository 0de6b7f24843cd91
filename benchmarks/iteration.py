"""Compare an iteration of leash with TRL's and with its own matrix products, in turn.

    make bench ARGS="--cases bfloat16 float32 --repeats 2"

For each case and repeat: leash trains `--iterations` iterations, TRL the same task with the same
settings (benchmarks/yardstick_trl.py), then the floor runs: the products of the linear layers and
of the head, at the shapes and in the dtype of that iteration. Prints seconds per iteration
(mean of all, the first included), CPU seconds per later iteration, and the peak of the memory.
In float32 the floor is printed twice: by torch's products and by leash's
(policies/models/fast/products.py).
The launcher of leash preloads mimalloc, TRL runs as it is: set LD_PRELOAD
for one allocator in both. TRL is left out where --peer does not exist. Nothing is asserted. The ppo
cases need a --peer with trl==1.12.0 (benchmarks/ppo_trl.py); their floor has the policy's products
only.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig

from benchmarks.measure import ROOT, markdown, seconds
from benchmarks.yardstick import BOTH, QUIET, monitor
from policies.models.fast.products import mm
from policies.models.find import find_model
from trainer.runs.run_files import read_lines

SMOLLM = "experiment=grpo_smollm algorithm=grpo kl.coeff=0.02 trainer.prompts_per_iteration=8"
BF16 = f"{SMOLLM} policy.autocast=bfloat16"
PPO = (  # the rewards differ: a rate near 0 keeps the lengths equal
    "experiment=grpo_smollm algorithm=ppo algorithm.epochs=1 algorithm.minibatches=1"
    " algorithm.critic.kind=separate algorithm.critic.lr_scale=1 kl.where=reward kl.estimator=k1"
    " kl.coeff=0.02 policy.autocast=bfloat16 optimizer.lr=1e-9"
)
CASES = {  # name: overrides, threads
    "bfloat16": (BF16, 2),
    "float32": (f"{SMOLLM} policy.autocast=null", 2),
    "full": (f"{BF16} algorithm=grpo_full kl.estimator=full", 2),  # TRL has no exact KL
    "responses": (f"{BF16} policy.max_new_tokens=128", 2),
    "prompts": (f"{BF16} env=answers env.dataset={{long}} env.split=8", 2),
    "group": (f"{BF16} algorithm.group_size=64 trainer.prompts_per_iteration=2", 2),
    "ppo": (f"{PPO} algorithm.group_size=8 trainer.prompts_per_iteration=8", 2),
    "ppo_single": (f"{PPO} algorithm.group_size=1 trainer.prompts_per_iteration=64", 2),
    "tiny": (
        "experiment=grpo_tiny algorithm=grpo kl.coeff=0.02 optimizer.lr=5e-4"
        " trainer.prompts_per_iteration=32 policy.max_new_tokens=32",
        1,
    ),
}


def main() -> None:
    """Run the cases in turn and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["bfloat16", "float32"], choices=CASES)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=4, help="at least 2")
    parser.add_argument("--peer", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    args = parser.parse_args()
    folder = Path(mkdtemp(prefix="leash-iteration-"))
    print(f"torch {torch.__version__}, {args.iterations} iterations, logs in {folder}")
    rows = []
    for name in args.cases:
        for repeat in range(args.repeats):
            place = folder / f"{name}-{repeat}"
            row = [name, *compare(place, name, args.iterations, args.peer.absolute())]
            print(*row, flush=True)
            rows.append(row)
    head = ["case", "leash s", "TRL s", "TRL / leash", "floor s", "leash / floor"]
    print(markdown([*head, "CPU s leash", "CPU s TRL", "GiB leash", "GiB TRL"], rows))


def compare(place: Path, name: str, iterations: int, peer: Path) -> list[str]:
    """Return the figures of one repeat of a case."""
    place.mkdir()
    words, threads = CASES[name]
    words = words.format(long=write_questions(place / "long.jsonl"))
    ours, theirs = place / "leash" / "run", place / "TRL" / "run"
    overrides = [*BOTH.split(), *words.split(), *QUIET.split(), "tracker=none"]
    overrides += [f"trainer.num_iterations={iterations}", f"launch.threads={threads}"]
    command = [sys.executable, "train.py", *overrides, f"output_dir={ours}"]
    monitor(command, place / "leash", threads)
    config = yaml.safe_load((ours / "config.yaml").read_text())
    logged = [row for row in read_lines(ours / "metrics.jsonl") if "reward/mean" in row]
    mine = fmean(row["time/iteration_s"] for row in logged)
    costs, cells = [usage(place / "leash", logged), ("", "")], ["", ""]
    model = find_model(config["policy"]["model"]).folder
    if peer.exists() and config["kl"]["estimator"] != "full":  # TRL has no exact KL
        module = "ppo_trl" if name.startswith("ppo") else "yardstick_trl"
        command = [str(peer), "-m", f"benchmarks.{module}", *map(str, (ours, model, theirs))]
        monitor(command, place / "TRL", threads)
        lines = [row for row in read_lines(theirs / "log.jsonl") if "reward" in row]
        other = fmean(row["seconds"] for row in lines)
        cells, costs[1] = [f"{other:.2f}", f"{other / mine:.2f}"], usage(place / "TRL", lines)
        shutil.rmtree(theirs / "model", ignore_errors=True)  # the ppo cases have none
    torch.set_num_threads(threads)
    kinds = [torch.mm, mm] if config["policy"]["autocast"] is None else [torch.mm]
    least = [floor(config, model, logged, kind) for kind in kinds]
    floors = [", ".join(f"{x:.2f}" for x in xs) for xs in (least, [mine / s for s in least])]
    cells = [f"{mine:.2f}", *cells, *floors]
    return [*cells, *(cost for pair in zip(*costs, strict=True) for cost in pair)]


def usage(folder: Path, logged: list[dict[str, Any]]) -> tuple[str, str]:
    """Return CPU seconds per later iteration and peak GiB of a monitored run."""
    record = json.loads((folder / "usage.json").read_text())
    at = [cpu for _, cpu in record["times"]][: len(logged)]
    return f"{(at[-1] - at[0]) / (len(at) - 1):.2f}", f"{record['peak'] / 2**30:.2f}"


def floor(
    config: dict[str, Any],
    model: Path,
    logged: list[dict[str, float]],
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> float:
    """Return the seconds of the products of one iteration, median of three after a warm-up."""
    shape = AutoConfig.from_pretrained(model)
    dtype = getattr(torch, config["policy"]["autocast"] or config["policy"]["dtype"])
    prompts = config["trainer"]["prompts_per_iteration"]
    responses = prompts * config["algorithm"]["group_size"]
    length = fmean(row["response/length_mean"] for row in logged)
    responded = round(responses * length)
    read = (
        round(logged[-1]["progress/tokens"] / len(logged) / responses - length) * prompts
        + responded
    )
    layers = [torch.randn(size, dtype=dtype) for size in linear_sizes(shape)]
    head = torch.randn(shape.vocab_size, shape.hidden_size, dtype=dtype)

    spaces: dict[tuple[int, int, int], Tensor] = {}  # new memory would cost more than products

    def product(number: int, a: Tensor, b: Tensor) -> Tensor:
        if multiply is not torch.mm:  # oneDNN's has no `out`
            return multiply(a, b)
        size = len(a), b.shape[1]
        if (number, *size) not in spaces:
            spaces[number, *size] = torch.empty(size, dtype=dtype)
        return torch.mm(a, b, out=spaces[number, *size])

    def products(count: int, weights: list[Tensor], *, backward: bool = False) -> None:
        for weight in weights:
            x = torch.full((count, weight.shape[1]), 0.5, dtype=dtype)
            y = product(0, x, weight.T)
            if backward:
                product(1, y, weight), product(1, y.T, x)

    def work() -> None:
        products(read - responded, layers)
        for _ in range(round(length) - 1):
            products(responses, [*layers, head])
        for backward in (False, True):
            products(read, layers, backward=backward)
            products(responded, [head], backward=backward)

    return seconds(work, 3)


def linear_sizes(shape: Any) -> list[tuple[int, int]]:
    """Return the sizes [out, in] of the linear layers of a Llama or Qwen2."""
    wide, inner = shape.hidden_size, shape.intermediate_size
    width = wide // shape.num_attention_heads
    groups = shape.num_key_value_heads * width
    attention = [(wide, wide), (groups, wide), (groups, wide), (wide, wide)]
    return [*attention, (inner, wide), (inner, wide), (wide, inner)] * shape.num_hidden_layers


def write_questions(path: Path) -> Path:
    """Write 64 questions of about 200 tokens for env=answers."""
    trips = [f"Traveller {i} went from town {i} to town {i + 1} by train." for i in range(12)]
    rows = [
        {"question": f"{' '.join(trips)} Where did {i % 12} go?", "answer": f"town {i % 12 + 1}"}
        for i in range(64)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    main()
