"""Check the GPUs of this machine with real runs of leash; write outputs/gpu_check/page.md.

    make gpu-check      without a GPU, or with CUDA_VISIBLE_DEVICES= , at CPU size

With GPUs the checks train the embedded SmolLM2-135M, and the figures are of random weights with
the shapes of Qwen2.5-0.5B; at CPU size all runs train the tiny model.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache, partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.measure import ROOT
from benchmarks.yardstick import BOTH, QUIET
from policies.models.find import EMBEDDED, find_model
from trainer.runs.run_files import load_run, read_lines
from trainer.runs.versions import about_machine

GPUS = torch.cuda.device_count()
PLACE = ROOT / "outputs" / "gpu_check"
SHAPES, SMALL_RANKS = PLACE / "shapes", PLACE / "ranks"
CPU = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
STEPS = 4  # of an iteration
TASK = "experiment=grpo_smollm" if GPUS else "experiment=grpo_tiny launch.threads=1"
WORDS = (
    f"{BOTH} {QUIET} {TASK} optimizer.warmup=0 policy.autocast=null trainer.num_iterations=4"
    f" trainer.prompts_per_iteration=16 algorithm.minibatches={STEPS}"
)
SHORT = "trainer.num_iterations=2"
QWEN = f"policy.model={SHAPES} policy.autocast=bfloat16 policy.max_new_tokens=128"
FIGURES = f"{QWEN} trainer.prompts_per_iteration=8" if GPUS else ""
# Tolerances, (relative, absolute) if two: of all metrics of several ranks, of the first iteration
# in bfloat16, of kl/mismatch (nats per token, docs/metrics.md), of the preflight's memory.
RANKS = (1e-3, 1e-4)
NEAR = {"reward/raw_mean": (0, 0.05), "kl/ref": (0, 0.05), "policy/entropy": (0.05, 0),
        "response/length_mean": (0.05, 0), "optim/grad_norm": (0.5, 0)}  # fmt: skip
FLOAT32, BFLOAT16, MEMORY = 1e-3, 0.05, 1.1

Answer = tuple[bool | str, str]  # passed, or another result; figure


def call(name: str, *command: object, gpus: int = 1, check: bool = True) -> str:
    """Run a command that sees that many GPUs; return its output, which <name>.log keeps."""
    ids = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
    env = os.environ | ({} if GPUS else CPU)
    env["CUDA_VISIBLE_DEVICES"] = ",".join(ids.split(",")[: min(gpus, GPUS)])
    with (log := PLACE / f"{name}.log").open("w") as out:
        code = subprocess.call([*map(str, command)], cwd=ROOT, env=env, stdout=out, stderr=out)
    text = log.read_text()
    if code and check:
        raise RuntimeError(f"{(text.splitlines() or [code])[-1]} ({log})")
    return text


@cache
def train(name: str, more: str = "", *, python: str = sys.executable, gpus: int = 1) -> list[dict]:
    """Run train.py into a folder; return the metrics of its iterations."""
    call(name, python, "train.py", *WORDS.split(), *more.split(), f"output_dir={PLACE / name}",
         gpus=gpus)  # fmt: skip
    return metrics(name)


def metrics(name: str) -> list[dict]:
    return [row for row in read_lines(PLACE / name / "metrics.jsonl") if row["progress/iteration"]]


def measured(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key[:5] not in ("time/", "perf/")}


def apart(one: float, two: float, limit: tuple[float, float]) -> float:
    """Return the difference in units of the tolerance."""
    far = abs(one - two) / (limit[0] * abs(one) + limit[1])
    return math.inf if math.isnan(far) else far


def tests() -> Answer:
    if not GPUS:
        return "not run", "no GPU"
    call("tests", sys.executable, "-m", "pytest", "-m", "gpu", "tests")
    return True, "pytest -m gpu"


def bfloat16() -> Answer:
    one = train("float32")[0]
    two = train("bfloat16", f"{SHORT} policy.autocast=bfloat16")[0]
    near = all(apart(one[name], two[name], limit) <= 1 for name, limit in NEAR.items())
    good = near and one["kl/mismatch"] < FLOAT32 and two["kl/mismatch"] < BFLOAT16
    both = (f"{name} {one[name]:.2g} and {two[name]:.2g}" for name in ("kl/mismatch", *NEAR))
    return good, ", ".join(both)


def ranks(launch: str) -> Answer:
    if GPUS < 2:
        return "not run", "less than two GPUs"
    two = train(launch, f"trainer.num_iterations=1 launch={launch} launch.num_processes=2", gpus=2)
    worst, name, number = max(
        (apart(value, row.get(name, math.nan), RANKS), name, row["progress/iteration"])
        for want, row in zip(train("float32"), two, strict=False)
        for name, value in measured(want).items()
    )
    place = f"{name} of iteration {number}: {worst:.2g} of the tolerance"
    return len(two) == 1 and worst <= 1, f"{STEPS} steps, furthest {place}"


def small_ranks() -> Answer:
    """Run tiny models, on one GPU too; the page has the table."""
    command = (
        "env",
        "PYTHONPATH=tests",
        sys.executable,
        "-m",
        "benchmarks.gpu_ranks",
        SMALL_RANKS,
    )
    call("ranks", *command, gpus=GPUS, check=False)
    results = [line.split(" | ")[-1] for line in (SMALL_RANKS / "table.md").open()][2:]
    return all(each.startswith("pass") for each in results), f"{len(results)} cases, see below"


def resume() -> Answer:
    """Compare to the bit, if the iterations before the resume are equal: deterministic kernels."""
    train("resumed", f"{SHORT} checkpoint.every=2")
    words = f"resume={PLACE / 'resumed'}", "trainer.num_iterations=4"
    call("resume", sys.executable, "train.py", *words)
    runs = [map(json.dumps, map(measured, rows)) for rows in (train("float32"), metrics("resumed"))]
    same = [one == two for one, two in zip_longest(*runs)]
    if not all(same[:2]):
        return "not run", "two runs of the same seed differ: a kernel is not deterministic"
    return all(same), f"resumed after 2: {', '.join(['differs', 'equal'][each] for each in same)}"


def vllm() -> Answer:
    python = Path(sys.executable) if GPUS else ROOT / ".venv-vllm/bin/python"
    if not (find_spec("vllm") if GPUS else python.exists()):
        return "not run", "no vllm in .venv" if GPUS else "no .venv-vllm (make test-vllm)"
    rows = train("vllm", f"{SHORT} policy/engine=vllm", python=str(python))
    probes = [(row["sync/probe_before"], row["sync/probe"]) for row in rows]
    mismatch = max(row["kl/mismatch"] for row in rows)
    good = len(rows) == 2 and all(after < min(before, FLOAT32) for before, after in probes)
    moved = ", ".join(f"{before:.1g} -> {after:.1g}" for before, after in probes)
    return good and mismatch < FLOAT32, f"kl/mismatch {mismatch:.1g}, sync/probe {moved}"


def leash() -> Answer:
    """Return means without the first iteration, which warms up."""
    rows = train("figures", FIGURES)[1:]
    named = {"rollout": "collect", "score": "score", "update": "update", "in all": "iteration"}
    parts = [f"{a} {fmean(row[f'time/{b}_s'] for row in rows):.3g} s" for a, b in named.items()]
    mfu = [f"MFU {fmean(row['perf/mfu'] for row in rows):.1%}"] if "perf/mfu" in rows[0] else []
    speed = f"{fmean(row['perf/tokens_per_s'] for row in rows):,.0f} tokens/s"
    return "figure", ", ".join([*parts, speed, *mfu])


def trl() -> Answer:
    """Return the same of TRL: steps without a rollout are updates alone."""
    if not (python := ROOT / ".venv-trl/bin/python").exists():
        return "not run", "no .venv-trl (make .venv-trl/.ready)"
    train("figures", FIGURES)
    model = load_run(PLACE / "figures").status["model"]["name"]
    call("trl", python, "-m", "benchmarks.yardstick_trl", PLACE / "figures", model, PLACE / "trl")
    lines = [line for line in read_lines(PLACE / "trl" / "log.jsonl") if "step_time" in line]
    steps = [line.get("seconds", line["step_time"]) for line in lines][STEPS:]
    whole = fmean(steps) * STEPS
    update = fmean(seconds for i, seconds in enumerate(steps) if i % STEPS) * STEPS
    parts = {"rollout and score": whole - update, "update": update, "in all": whole}
    return "figure", ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items())


def memory() -> Answer:
    words = (
        *WORDS.split(),
        *FIGURES.split(),
        "preflight=true",
        f"output_dir={PLACE / 'preflight'}",
    )
    text = call("preflight", sys.executable, "train.py", *words, check=False)
    found = re.findall(r"^ +(?:generate|score|update) .* ([\d.]+) ([MG])iB$", text, re.M)
    most = max((float(size) / (1024 if unit == "M" else 1) for size, unit in found), default=0)
    peak = max(row["perf/peak_memory_gib"] for row in train("figures", FIGURES))
    return peak <= MEMORY * most, f"peak {peak:.2f} GiB, forecast {most:.2f} GiB"


CHECKS = {
    "the tests that need a GPU": tests,
    "bfloat16 against float32, iteration 1": bfloat16,
    "two ranks by DDP against one": partial(ranks, "ddp"),
    "two ranks by FSDP2 against one": partial(ranks, "fsdp2"),
    "tiny models on two and four ranks against one": small_ranks,
    "resume, to the bit": resume,
    "vLLM: hand-over and mismatch": vllm,
    "an iteration of leash": leash,
    "an iteration of TRL": trl,
    "memory within the preflight's forecast": memory,
}


def write_shapes() -> None:
    """Write random weights with the shapes of Qwen2.5-0.5B, and SmolLM2's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(find_model(EMBEDDED).folder)
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(SHAPES)
    tokenizer.save_pretrained(SHAPES)


def main() -> int:
    """Run all checks, write and print the page; return 1 if one failed."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    if GPUS:
        write_shapes()
    rows = [("check", "result", "figure", "seconds"), ("---",) * 4]
    for name, work in CHECKS.items():
        start = time.perf_counter()
        try:
            result, figure = work()
        except Exception as error:  # a run failed, or logged too little
            result, figure = False, f"{type(error).__name__}: {error}"
        result = {True: "pass", False: "FAIL"}.get(result, result)
        rows.append((name, result, figure, f"{time.perf_counter() - start:.0f}"))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    about = about_machine(torch.device("cuda" if GPUS else "cpu"), max(GPUS, 1))
    if GPUS:
        query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv")
        about["GPUs"] = "; ".join(call("smi", *query, check=False).splitlines()[1:])
    title = f"# gpu-check at {'GPU' if GPUS else 'CPU'} size, {time.strftime('%Y-%m-%d %H:%M')}"
    page = [title, "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    page += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    if (table := SMALL_RANKS / "table.md").exists():
        page += ["", *table.read_text().splitlines()]
    (PLACE / "page.md").write_text("\n".join(page) + "\n")
    print("\n".join(page))
    return int(any(result == "FAIL" for _, result, *_ in rows))


if __name__ == "__main__":
    sys.exit(main())
