"""A search for the best keys by Optuna: python docs/optuna_search.py [trials] (pip install optuna).

Each trial is a run of train.py with its page, in multirun/optuna/<number>; the study goes on where
it was cut short. Looked for is the objective of a run less a price for its KL.
"""

import subprocess
import sys
from pathlib import Path

import optuna

from trainer.runs.run_files import load_run

FOLDER = Path("multirun/optuna")
EXPERIMENT = "grpo_tiny"
KL_PRICE = 0.05  # of a nat per response, in units of the objective


def objective(trial: optuna.Trial) -> float:
    """Train with the keys of a trial; return its objective less the price of its KL."""
    keys = {
        "kl.coeff": trial.suggest_float("kl.coeff", 1e-3, 1.0, log=True),
        "optimizer.lr": trial.suggest_float("optimizer.lr", 1e-4, 2e-3, log=True),
    }
    words = [f"experiment={EXPERIMENT}", *(f"{key}={value}" for key, value in keys.items())]
    folder = FOLDER / f"{trial.number:03}"
    command = [sys.executable, "train.py", *words, f"output_dir={folder}"]
    if subprocess.run(command, check=False).returncode:
        raise optuna.TrialPruned(f"see {folder}/status.json")
    run = load_run(folder)
    return run.status["objective"] - KL_PRICE * run.last_ten_mean("kl/ref_sequence")


def main(trials: int = 20) -> None:
    """Search, then print the best keys."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(FOLDER / "study.journal"))
    )
    study = optuna.create_study(
        study_name=EXPERIMENT, storage=storage, direction="maximize", load_if_exists=True
    )
    study.optimize(objective, n_trials=trials)
    print(study.best_value, study.best_params)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
