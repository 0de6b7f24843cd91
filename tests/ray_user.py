"""A second user of a shared actor, in a process of its own (test_ray.py): no ray.init, no model.

RAY_ADDRESS=... python ray_user.py <folder with td.pt>
"""

import sys
from pathlib import Path

import torch

from envs.transforms import RayKLRewardTransform


def never() -> None:
    """Stand where the first user gave a factory: the actor has made its model already."""
    raise AssertionError("the model was made again")


def main(folder: Path) -> None:
    """Attach to the actor "reward" and write what it makes of td.pt."""
    shared = RayKLRewardTransform(
        ref_model_factory=never, coef=0.1, actor_name="reward", num_cpus=0.5
    )
    td = torch.load(folder / "td.pt", weights_only=False)
    torch.save(shared(td)["next"], folder / "out.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
