"""benchmarks/kl_study.py: each way changes what it says, and a cell is of means."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks.kl_study import BASE, WAYS, cell, distinct, end
from benchmarks.once import limit_once, train_once
from conf.compose import compose_checked
from trainer.limit import Limit, least_kl
from trainer.runs.lock import held


def flat(words: list[str]) -> dict[str, object]:
    """Return a composed configuration by dotted key."""
    found: dict[str, object] = {}

    def walk(tree: object, path: str) -> None:
        if isinstance(tree, dict):
            for name, value in tree.items():
                walk(value, f"{path}.{name}" if path else name)
        else:
            found[path] = tree

    walk(OmegaConf.to_container(OmegaConf.create(compose_checked(words)), resolve=True), "")
    return found


@pytest.mark.parametrize("experiment", BASE)
def test_each_way_changes_its_keys_alone(experiment):
    start = [f"experiment={experiment}", *BASE[experiment].split()]
    before = flat(distinct(start))
    for way, changes in WAYS.items():
        after = flat(distinct([*start, *changes.split()]))
        asked = {word.partition("=")[0] for word in changes.split()}
        moved = {key for key in after if after[key] != before.get(key, None)}
        assert moved <= asked, way
        assert bool(moved) == bool(changes), way


def test_the_last_word_on_a_key_holds():
    assert distinct(["a=1", "b.c=2", "a=3=4"]) == ["a=3=4", "b.c=2"]


def test_a_cell_is_of_the_means_of_its_seeds(tmp_path: Path):
    values = [[0, 1] * 2048]
    limit = Limit.of_samples({"reward": values, "success": values})
    assert limit is not None
    ends = []
    for seed, (accuracy, kl) in enumerate([(0.6, 0.1), (0.9, 0.5)]):
        folder = tmp_path / str(seed)
        folder.mkdir()
        row = {"eval/sampled_accuracy": accuracy, "eval/kl_ref_sequence": kl}
        rows = [
            {"progress/iteration": 0, "eval/sampled_accuracy": 0.5},
            row | {"progress/iteration": 1},
        ]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "status.json").write_text('{"state": "finished"}')
        ends.append(end(folder, limit.metric))
    assert end(tmp_path / "none", limit.metric) is None
    (tmp_path / "0" / "status.json").write_text('{"state": "failed"}')
    assert end(tmp_path / "0", limit.metric) is None, "cut off, it says nothing"
    share = least_kl(limit.success, 0.75) / 0.3
    assert cell(ends, limit, of=2) == f"0.750 0.30 **{share:.2f}**"
    assert cell(ends[:1], limit, of=2).endswith("(1 of 2 seeds)")


def test_a_limit_needs_a_run_or_its_own_file_whole(tmp_path: Path):
    with pytest.raises(SystemExit, match="expected a run in"):
        limit_once(tmp_path, [], 8)
    (tmp_path / "limit.json").write_text("{")
    with pytest.raises(SystemExit, match=r"limit\.json is damaged; remove it"):
        limit_once(tmp_path, [], 8)


def test_a_run_that_is_still_written_to_is_left_alone(tmp_path: Path):
    """As by a study that was killed, whose run went on."""
    with held(tmp_path / "run"), pytest.raises(SystemExit, match="is still written to"):
        train_once(["experiment=grpo_tiny"], tmp_path / "run")
    assert (tmp_path / "run").is_dir()
