"""Families of models against transformers alone: sampler, scorer, train mode, gradient, KL."""

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from kinds import KINDS, LAUNCHES, TRAINED, run
from models_table import adapt, families, listed, measure, write_checkpoint
from runs import lines, on_two_ranks
from sharded import far, tensors

from policies.load import load_policy

QUICK = ("gemma3", "glm4_moe", "granite", "phimoe", "qwen3_5_text")  # in `make test` too
ALL = [pytest.param(f, marks=() if f in QUICK else pytest.mark.models) for f in families()]


def computes_as_transformers(family: str) -> None:
    with TemporaryDirectory() as folder:
        measured = measure(write_checkpoint(family, Path(folder)))
    assert measured.sample < families()[family].get("sample_within", 1e-5)
    assert max(measured.right, measured.left, measured.grouped, measured.train) < 1e-5
    assert measured.gradient < 1e-4
    assert measured.kl == 0
    assert measured.trains == measured.reached
    if measured.shares:
        assert measured.packed < 1e-5
    else:
        assert measured.packed is None, "packed rows would attend to each other"


@pytest.mark.parametrize("family", ALL)
def test_a_family_computes_as_transformers_or_is_refused_in_a_line(family, tmp_path):
    refused = families()[family].get("refused")
    if refused is None:
        computes_as_transformers(family)
        return
    with pytest.raises(ValueError, match=refused) as error:
        load_policy(str(write_checkpoint(family, tmp_path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", [p for p in ALL if "refused" not in families()[p.values[0]]])
def test_an_adapter_is_where_a_text_goes_and_transformers_loads_the_merged_model(family, tmp_path):
    adapted = adapt(write_checkpoint(family, tmp_path), tmp_path / "trained")
    assert not adapted.unreached
    assert adapted.merged < 1e-4
    assert adapted.moved > 0.1
    assert not adapted.bare & {"gate_up_proj", "up_proj", "down_proj"}


@pytest.mark.models
def test_a_model_of_each_kind_trains_alike_on_one_rank_and_on_two(tmp_path):
    starts = {kind: write_checkpoint(KINDS[kind], tmp_path / "models" / kind) for kind in KINDS}
    on_two_ranks("kinds.py", tmp_path)
    for (kind, start), trained in product(starts.items(), TRAINED):
        alone = tmp_path / f"{kind}, {trained}"
        run(start, alone, trained)
        kl = next(row["kl/ref"] for row in lines(alone / "metrics.jsonl") if "kl/ref" in row)
        assert abs(kl) < 1e-6, alone.name
        one, before = tensors(alone / "model"), tensors(start)
        assert far({name: one[name] for name in before}, before) > 1e-4, alone.name
        for launch in LAUNCHES:
            two = tmp_path / f"{alone.name}, {launch}"
            assert far(tensors(two / "model"), one) < 1e-6, two.name


def test_the_page_of_models_lists_every_family():
    assert listed() == list(families()), "run PYTHONPATH=. python tests/support/models_table.py"
