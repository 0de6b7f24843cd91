"""Families of models against transformers alone: sampler, scorer, train mode, gradient, KL."""

import pytest
import torch
from models_table import families, listed, measure, write_checkpoint

from policies.load import load_policy

pytestmark = [
    pytest.mark.models,
    # torch's import of its compiler, at the first forward of a convolution or state space
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
RUNS, REFUSED = (
    [name for name, settings in families().items() if ("refused" in settings) == refused]
    for refused in (False, True)
)


@pytest.mark.parametrize("family", RUNS)
def test_a_family_samples_scores_and_learns_as_transformers_computes_it(family, tmp_path):
    measured = measure(write_checkpoint(family, tmp_path))
    assert measured.sample < families()[family].get("sample_within", 1e-5)
    assert max(measured.right, measured.left, measured.grouped, measured.train) < 1e-5
    assert measured.gradient < 1e-4
    assert measured.kl == 0
    assert measured.trains == measured.reached
    if measured.shares:
        assert measured.packed < 1e-5
    else:
        assert measured.packed is None, "packed rows would attend to each other"


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_an_adapter_is_where_a_text_goes(family, tmp_path):
    policy = load_policy(str(write_checkpoint(family, tmp_path)), lora={"r": 2})
    ids = torch.arange(5, 12)[None]
    policy.scorer(ids, ids > 0).log_probs.sum().backward()
    assert all(p.grad is not None for p in policy.model.parameters() if p.requires_grad)
    assert policy.files.about()["frozen"] > 0


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_sampled_is_refused_in_a_line(family, tmp_path):
    with pytest.raises(ValueError, match=families()[family]["refused"]) as error:
        load_policy(str(write_checkpoint(family, tmp_path)))
    assert "\n" not in str(error.value)


def test_the_page_of_models_is_that_of_the_table():
    assert listed() == list(families()), "run python tests/models_table.py"
