"""Sweeps that an experiment file brings along: hydra.sweeper.params of conf/experiment/*.yaml."""

from collections.abc import Sequence

from conf.explain import FOLDER
from trainer.runs.run_files import dig, read_yaml


def swept(words: Sequence[str]) -> dict[str, str]:
    """Return the keys and values that the experiment named in `words` sweeps; {} if it is none.

    >>> swept(["experiment=kl_sweep_tiny", "seed=3"])["seed"], swept(["experiment=grpo_tiny"])
    ('1,2', {})
    """
    name = next((w.partition("=")[2] for w in words if w.startswith("experiment=")), "")
    path = FOLDER / "experiment" / f"{name}.yaml"
    params = dig(read_yaml(path), "hydra", "sweeper", "params")
    return {str(key): str(value) for key, value in (params or {}).items()}


def with_swept(words: Sequence[str]) -> list[str]:
    """Return `words` behind what the experiment sweeps, in the order of Hydra's basic sweeper.

    >>> with_swept(["experiment=kl_sweep_tiny", "kl.coeff=0,1"])
    ['kl.coeff=0,1', 'seed=1,2', 'experiment=kl_sweep_tiny']
    """
    brought = {key: f"{key}={values}" for key, values in swept(words).items()}
    return list((brought | {word.partition("=")[0]: word for word in words}).values())


def check_single(words: Sequence[str]) -> None:
    """Raise ValueError if one run is asked of an experiment that is a sweep."""
    given = {word.partition("=")[0] for word in words}
    left = [key for key in swept(words) if key not in given]
    if left:
        name = next(word for word in words if word.startswith("experiment="))
        raise ValueError(
            f"{name} is a sweep over {', '.join(left)}: python train.py -m {name}; for one run "
            f"give {' '.join(f'{key}=...' for key in left)}"
        )
