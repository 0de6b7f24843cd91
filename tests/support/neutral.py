"""Compare what six small experiments measure here and at a base commit: make neutral [BASE=...].

metrics.jsonl has to be equal to the bit, apart from time/ and perf/. The base is run once and kept
in outputs/neutral, with a cache of its own, so that warm-ups are trained on both sides.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORK = ROOT / "outputs" / "neutral"
TIMED = ("time/", "perf/", "tools/seconds")
CASES = {
    "grpo_tiny": [],
    "ppo_tiny": [],
    "sft_tiny": [],
    "rm_tiny": [],
    "grpo_tools_tiny": [],
    "grpo_smollm": ["trainer.num_iterations=2"],
}


def measure(checkout: Path, out: Path, name: str) -> list[str]:
    """Train one experiment with the code of a checkout; return the lines of its metrics.jsonl."""
    if not (out / name / "metrics.jsonl").exists():
        words = [f"experiment={name}", f"output_dir={out / 'run' / name}", *CASES[name]]
        environment = os.environ | {"LEASH_CACHE": str(out / "cache"), "WANDB_MODE": "offline"}
        shutil.rmtree(out / "run" / name, ignore_errors=True)
        command = [sys.executable, str(checkout / "train.py"), *words]
        subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
        (out / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(out / "run" / name / "metrics.jsonl", out / name)
    lines = (out / name / "metrics.jsonl").read_text().splitlines()
    kept = (
        {k: v for k, v in json.loads(line).items() if not k.startswith(TIMED)} for line in lines
    )
    return [json.dumps(line, sort_keys=True) for line in kept]  # as text: nan equals nan


def main(base: str, *names: str) -> int:
    """Print a line for each experiment; return 1 if one differs."""
    commit = subprocess.check_output(["git", "rev-parse", base], cwd=ROOT, text=True).strip()
    kept = WORK / commit
    if not (checkout := kept / "checkout").exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
        subprocess.run(["git", "checkout", "-q", commit], cwd=checkout, check=True)
    shutil.rmtree(here := WORK / "here", ignore_errors=True)
    differ = 0
    for name in names or CASES:
        before, after = measure(checkout, kept, name), measure(ROOT, here, name)
        pairs = enumerate(zip(before, after, strict=False))
        first = next((f"line {n + 1}" for n, (a, b) in pairs if a != b), None)
        if first is None and len(before) != len(after):
            first = f"{len(before)} and {len(after)} lines"
        differ += first is not None
        print(f"{name:22} {len(after):4} lines  {f'DIFFERS: {first}' if first else 'equal'}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
