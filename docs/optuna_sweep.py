"""Search with Optuna for the settings with the most reward - LAMBDA * KL.

    pip install -e '.[optuna]'
    python docs/optuna_sweep.py multirun/optuna 20 experiment=grpo_tiny trainer.num_iterations=30

Every trial is an ordinary run in a folder of its own; the same command again goes on with the
search. The folder is that of a sweep: sweep.html shows all trials.
"""

import subprocess
import sys
from pathlib import Path

import optuna

from trainer.reports.sweep_page import write_sweep
from trainer.runs.run_files import load_run

LAMBDA = 0.05  # reward that a nat per reply is worth
SPACE = {"kl.coeff": (1e-3, 1.0), "optimizer.lr": (1e-4, 2e-3)}  # searched on a log scale
TRAIN = Path(__file__).parents[1] / "train.py"


def search(folder: Path, trials: int, words: list[str]) -> optuna.Study:
    """Run `trials` more trials with these overrides; return the study."""

    def value(trial: optuna.Trial) -> float:
        chosen = {k: trial.suggest_float(k, lo, hi, log=True) for k, (lo, hi) in SPACE.items()}
        job = folder / f"{trial.number:03d}"
        settings = [f"{key}={number:.4g}" for key, number in chosen.items()]
        command = [sys.executable, str(TRAIN), *words, *settings, f"output_dir={job}"]
        try:
            subprocess.run(command, check=True)
        finally:
            write_sweep(folder)
        run = load_run(job)
        reward, kl = (run.last_ten_mean(name) for name in ("reward/raw_mean", "kl/ref_sequence"))
        return reward - LAMBDA * kl

    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="leash",
        storage=f"sqlite:///{folder}/optuna.db",
        direction="maximize",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=len(list(folder.glob("[0-9]*")))),
    )
    study.optimize(value, n_trials=trials, catch=(subprocess.CalledProcessError,))
    return study


if __name__ == "__main__":
    folder, trials, *words = sys.argv[1:]
    done = search(Path(folder), int(trials), words)
    print(f"best: {done.best_params}, reward - {LAMBDA} * KL = {done.best_value:.3f}")
    print(f"sweep    {folder}/sweep.html")
