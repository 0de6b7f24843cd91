"""Every case once more, on two ranks and four, with shards and without; each goes on with others'.

With LEASH_TABLE=<file> the distances are written there, as the tables of docs/scaling.md.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sharded import CASES, ROUNDED, far, make_models, prepare, resume, run, start, tensors

pytestmark = pytest.mark.scale

CROSSED = ("ppo, one step", "grpo, LoRA, refresh", "grpo, bfloat16")
FOUR = (*CROSSED, "grpo", "grpo, LoRA", "grpo, refresh", "sft", "sft, packed")  # a prompt a rank
WAYS = {"2 ddp": CASES, "2 fsdp2": CASES, "4 ddp": FOUR, "4 fsdp2": FOUR}
EVERY = ("1", *WAYS)
NEWEST = "checkpoints/iteration_000003"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return a folder with the cases on one rank, and folders of all ways."""
    at = tmp_path_factory.mktemp("shards")
    make_models(at / "model")
    for name in CASES:
        run(name, at / "1" / "many" / name, at / "model", ranks=1)
    return at


@pytest.fixture(scope="module")
def made(place) -> dict[str, Path]:
    """Return the folders by the way they were made, filled when they are asked for."""
    return Made(place)


class Made(dict):
    """Folders of runs by way; those of several ranks are trained when they are first asked for."""

    def __init__(self, place: Path) -> None:
        super().__init__({"1": place / "1"})
        self.place = place

    def __missing__(self, way: str) -> Path:
        at = self.place / way
        at.mkdir()
        (at / "model").symlink_to(self.place / "model")
        ranks, launch = way.split()
        start(at, int(ranks), launch, list(WAYS[way]))
        self[way] = at
        return at


@pytest.fixture(scope="module")
def went_on(place, made) -> dict[str, Path]:
    """Return folders in which each way went on with what every way has saved."""
    sources = {way: made[way] for way in EVERY}
    found = {}
    for way in EVERY:
        found[way] = at = place / f"{way} on"
        at.mkdir()
        (at / "model").symlink_to(place / "model")
        for source, folder in sources.items():
            prepare(folder / "many", at, CROSSED, of=source)
        ranks, _, launch = way.partition(" ")
        if way == "1":
            resume(at, place / "model", ranks=1)
        else:
            start(at, int(ranks), launch, [])
    return found


Distances = dict[tuple[str, str], float]  # by row and column of a table


@pytest.fixture(scope="module")
def noted() -> Iterator[Distances]:
    yield from written()


@pytest.fixture(scope="module")
def crossed() -> Iterator[Distances]:
    yield from written()


def written() -> Iterator[Distances]:
    """Yield a table to fill, and write it down in the end."""
    found: Distances = {}
    yield found
    if path := os.environ.get("LEASH_TABLE"):
        with Path(path).open("a") as file:
            file.write("\n".join(table(found)) + "\n\n")


def table(found: Distances) -> Iterator[str]:
    """Yield the lines of a table."""
    rows, columns = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    yield "| | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for row in rows:
        cells = (f"{found[row, c]:.0e}" if (row, c) in found else "" for c in columns)
        yield f"| {row} | " + " | ".join(cells) + " |"


def limit(name: str) -> float:
    return 0.05 if name in ROUNDED else 1e-6


@pytest.mark.parametrize(("name", "way"), [(n, way) for way in WAYS for n in WAYS[way]])
def test_several_ranks_train_the_weights_of_one(name, way, made, noted):
    """The model's, and all that the checkpoints hold: critic, adapter, reference, moments."""
    one, many = (tensors(made[w] / "many" / name) for w in ("1", way))
    distance = max(far(many, one, "model/"), far(many, one, "checkpoints/"))
    noted[name, way] = distance
    assert distance < limit(name)


@pytest.mark.parametrize("name", CROSSED)
@pytest.mark.parametrize("source", EVERY)
@pytest.mark.parametrize("way", EVERY)
def test_every_number_of_ranks_goes_on_with_the_checkpoints_of_every_other(
    name, source, way, made, went_on, crossed
):
    want = tensors(made["1"] / "many" / name / NEWEST)
    got = tensors(went_on[way] / "on" / f"{name} of {source}" / NEWEST)
    crossed[f"{name}: saved by {source}", way] = distance = far(got, want)
    assert distance < limit(name)
