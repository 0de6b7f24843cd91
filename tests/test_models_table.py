"""Families of models against transformers alone: sampler, scorer, train mode, gradient, KL."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from models_table import families, listed, measure, write_checkpoint

from policies.load import load_policy

QUICK = ("gemma3", "granite", "phimoe", "qwen3_5_text")  # in `make test` too
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


@pytest.mark.models
@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_an_adapter_is_where_a_text_goes(family, tmp_path):
    policy = load_policy(str(write_checkpoint(family, tmp_path)), lora={"r": 2})
    ids = torch.arange(5, 12)[None]
    policy.scorer(ids, ids > 0).log_probs.sum().backward()
    assert all(p.grad is not None for p in policy.model.parameters() if p.requires_grad)
    assert policy.files.about()["frozen"] > 0


def test_the_page_of_models_lists_every_family():
    assert listed() == list(families()), "run PYTHONPATH=. python tests/models_table.py"
