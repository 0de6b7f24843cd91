"""A search by Optuna for the best settings: -m hydra/sweeper=optuna, kl.coeff=interval(0.01,1).

Each trial is a job of a sweep, in turn or side by side. The study is a journal in the sweep's
folder: the same command goes on with it, trials that were running first. Hydra's own sweeper,
hydra-optuna-sweeper, is not used: its last release (1.3) needs an Optuna below 3, whose storage
fails with today's SQLAlchemy, it keeps no study of its own accord, and forgets trials that a kill
has cut short. Keys are called as there.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import Override

from conf.command_line import check_overrides, read_override
from conf.compose import compose_checked
from conf.start import run_folder
from conf.sweep import MOST, Sweep
from trainer.runs.failures import say
from trainer.runs.job_names import job_name
from trainer.runs.run_files import load_run

STUDY = "study.journal"
KEYS = {"n_trials": 20, "n_jobs": None, "direction": "maximize", "seed": 0, "kl_price": 0.0}


@dataclass(frozen=True)
class Search(Sweep):
    """A sweep whose jobs are chosen as it goes on. `space`: what is searched, `fixed` the rest."""

    space: dict[str, Override] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def count(self) -> int:
        return self.settings["n_trials"]

    def batches(self) -> Iterator[list[int]]:
        """Yield the numbers of trials that may run; tell Optuna what came out of them."""
        from optuna.trial import TrialState

        study, at_once = self._study(), self.settings["n_jobs"]
        for trial in study.trials:
            self._add(trial.params)
        cut = [trial.number for trial in study.trials if trial.state == TrialState.RUNNING]
        while cut or len(self.jobs) < self.settings["n_trials"]:
            first, numbers = len(self.jobs), cut[:at_once]
            cut = cut[at_once:]
            study.sampler = _sampler(self.settings["seed"] + first)  # it goes on as if never ended
            while len(numbers) < at_once and len(self.jobs) < self.settings["n_trials"]:
                space = {key: _distribution(item) for key, item in self.space.items()}
                trial = study.ask(space)
                numbers.append(trial.number)
                self._add(trial.params)
            yield numbers
            for number in numbers:
                value = self._value(number)
                state = TrialState.FAIL if value is None else TrialState.COMPLETE
                study.tell(number, value, state=state)
        if any(trial.value is not None for trial in study.trials):
            best = study.best_trial
            say(f"search   {self.folders[best.number]} is the best of it: {best.value:.4g}")

    def _study(self) -> Any:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path = str(self.folder / STUDY)
        backend = JournalFileBackend(path, lock_obj=JournalFileOpenLock(path))
        return optuna.create_study(
            study_name="leash",
            storage=JournalStorage(backend),
            direction=self.settings["direction"],
            load_if_exists=True,
        )

    def _add(self, params: dict[str, Any]) -> None:
        own = [f"{key}={_text(value)}" for key, value in params.items()]
        self.jobs.append([*self.fixed, *own])
        self.folders.append(job_name(",".join(sorted(own))))

    def _value(self, number: int) -> float | None:
        """Return the objective of a finished job less the price of its KL, None of others."""
        run, price = load_run(self.folder / self.folders[number]), self.settings["kl_price"]
        value = run.status.get("objective") if run.state == "finished" else None
        if value is None or not price:
            return value
        return value - price * (run.last_ten_mean("kl/ref_sequence") or 0.0)


def read_search(words: Sequence[str], own: Sequence[str], launcher: list[str]) -> Search:
    """Check the words of a search; `own` are those on the sweeper. ValueError for any fault."""
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError:
        told = "hydra/sweeper=optuna needs Optuna: pip install -e '.[sweeps]'"
        raise ValueError(told) from None
    settings = _settings(own, at_once=2 if launcher else 1)
    plain = [word for word in words if word not in own and word not in launcher]
    check_overrides(plain)
    items = {word: read_override(word) for word in plain}
    space = {str(i.get_key_element()): i for i in items.values() if i.is_sweep_override()}
    fixed = [word for word, item in items.items() if not item.is_sweep_override()]
    if not space:
        like = "kl.coeff=interval(0.01,1) or kl.coeff=0,0.1,1"
        raise ValueError(f"hydra/sweeper=optuna has nothing to search; give a key several: {like}")
    ends = [[_ends(_distribution(item))[k] for item in space.values()] for k in (0, 1)]
    for values in ends:  # what lies between is checked as it is asked for
        job = [f"{key}={_text(value)}" for key, value in zip(space, values, strict=True)]
        if compose_checked([*fixed, *job])["output_dir"]:
            raise ValueError("output_dir is one folder; a sweep takes hydra.sweep.dir=")
    folder = run_folder(fixed, sweep=True)
    parts = {"space": space, "fixed": fixed, "settings": settings}
    return Search(folder, [*words], [], [], launcher, **parts)


def _settings(own: Sequence[str], *, at_once: int) -> dict[str, Any]:
    settings = KEYS | {"n_jobs": at_once}
    for word in own:
        item, known = read_override(word), ", ".join(f"hydra.sweeper.{key}" for key in KEYS)
        key = item.key_or_group.removeprefix("hydra.sweeper.").removeprefix("sampler.")
        if item.key_or_group == "hydra/sweeper":
            continue
        if key not in KEYS:
            raise ValueError(f"{word}: a search has the keys {known}")
        value, usual = item.value(), KEYS[key] if key != "n_jobs" else 1
        wanted = "maximize or minimize" if key == "direction" else f"a number, as {usual}"
        good = isinstance(value, (int, float) if key == "kl_price" else type(usual))
        if not good or (key == "direction" and value not in ("maximize", "minimize")):
            raise ValueError(f"expected hydra.sweeper.{key} to be {wanted}, got {value!r}")
        settings[key] = value
    if not (0 < settings["n_trials"] <= MOST and settings["n_jobs"] > 0):
        raise ValueError(f"expected 1 to {MOST:,} hydra.sweeper.n_trials and n_jobs of 1 or more")
    return settings


def _sampler(seed: int) -> Any:
    import optuna

    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _distribution(item: Override) -> Any:
    """Return what Optuna draws from for an override that is a sweep."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = item.value()
    if item.is_interval_sweep():
        whole = isinstance(value.start, int) and isinstance(value.end, int)
        kind = IntDistribution if whole else FloatDistribution
        return kind(value.start, value.end, log="log" in value.tags)
    choices = [*itertools.islice(item.sweep_string_iterator(), MOST + 1)]
    if "glob(" in str(item.input_line) or not 0 < len(choices) <= MOST:
        raise ValueError(f"{item.input_line}: give values, a,b,c, or interval(0.01,1)")
    return CategoricalDistribution(choices)


def _ends(distribution: Any) -> tuple[Any, Any]:
    if hasattr(distribution, "choices"):
        return distribution.choices[0], distribution.choices[-1]
    return distribution.low, distribution.high


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
