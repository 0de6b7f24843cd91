"""Families of models against transformers alone: sampler, scorer, gradient, KL; saved, resumed."""

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.families import KINDS, LAUNCHES, TRAINED, in_transformers, leave, run, saved
from support.models_table import adapt, differ, families, listed, measure, write_checkpoint
from support.policies import move_adapter
from support.runs import lines, on_two_ranks
from support.sharded import far, tensors

from policies.load import load_policy, weights_of
from trainer.checkpoint import save_model

QUICK = ("gemma3", "glm4_moe", "granite", "phimoe", "qwen3_5_text")  # in `make test` too
ALL = [pytest.param(f, marks=() if f in QUICK else pytest.mark.models) for f in families()]
ACCEPTED = [each for each in ALL if "refused" not in families()[each.values[0]]]


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


@pytest.mark.parametrize("family", ACCEPTED)
def test_an_adapter_is_where_a_text_goes_and_transformers_loads_the_merged_model(family, tmp_path):
    adapted = adapt(write_checkpoint(family, tmp_path), tmp_path / "trained")
    assert not adapted.unreached
    assert not adapted.misplaced
    assert adapted.merged < 1e-4
    assert adapted.moved > 0.1
    assert not adapted.bare & {"gate_up_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("family", ACCEPTED)
def test_what_a_run_saves_comes_back(family, trained, tmp_path):
    start = write_checkpoint(family, tmp_path / "start")
    left = leave(start, tmp_path, trained)
    assert not differ(left.resumed, left.unbroken)
    assert not differ(left.exported, left.ended)
    assert all(names == left.start for names in left.published)
    before, kept = in_transformers(start), left.unbroken
    assert differ(left.ended, before)
    if trained == "all":
        both = before.keys() & kept.keys()
        assert not differ(*({name: each[name] for name in both} for each in (left.ended, kept)))


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=TRAINED)
@pytest.mark.parametrize("family", ACCEPTED)
def test_an_engine_gets_the_weights_of_the_published_file(family, lora, tmp_path):
    start = write_checkpoint(family, tmp_path / "start")
    policy = load_policy(str(start), lora=lora, max_new_tokens=2)
    move_adapter(policy)
    save_model(policy, tmp_path / "trained")
    sent, want = dict(weights_of(policy.scorer).stream()), saved(tmp_path / "trained")
    tied = sent.keys() - want.keys()  # which an engine gets too
    assert tied <= policy.model.state_dict().keys()
    assert not differ({name: sent[name] for name in want}, want)


@pytest.mark.models
def test_a_model_of_each_kind_trains_alike_on_one_rank_and_on_two(tmp_path):
    starts = {kind: write_checkpoint(KINDS[kind], tmp_path / "models" / kind) for kind in KINDS}
    on_two_ranks("support.families", tmp_path)
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
    assert listed() == list(families()), "run python tests/support/models_table.py"
