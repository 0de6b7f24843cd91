"""The older KL reward: masks, shapes and options, against slow scores of a tiny model."""

import copy

import pytest
import torch
from kl_cases import (
    ASSISTANT,
    ATTENTION,
    FULL,
    IDS,
    Chat,
    Collector,
    Shorter,
    TinyPolicy,
    Turns,
    dense,
    slow_scores,
)
from kl_cases import mask as marks
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from envs.env import TransformedEnv
from envs.transforms import Compose, KLRewardTransform, RetrieveKL
from envs.transforms.ragged import get_values

AFTER = marks("000111", "000111")  # what follows the prompt, which is three columns wide
GEN = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)).double() * ATTENTION
GEN[0, 0] = GEN[1, 2] = 0  # nothing stands before the first token
REWARD = torch.arange(12.0).reshape(2, 6, 1).double()


def make(ref: TinyPolicy | None = None, **settings) -> KLRewardTransform:
    with pytest.warns(DeprecationWarning, match="use RetrieveKL"):
        return KLRewardTransform(ref or TinyPolicy(1), **settings)


def rollout(*, prompt: bool = False, reward: Tensor | None = REWARD, **parts) -> TensorDict:
    """Return a td with generation log-probs and a reward, without masks that are not named."""
    td = dense(**{"response": False, "assistant": False, **parts}).set(FULL, GEN.clone())
    if prompt:
        td.set(("tokens", "prompt"), IDS[:, :3])
    if reward is not None:
        td["next"].set("reward", reward.clone())
    return td


def unpadded(td: TensorDict) -> TensorDict:
    """Return the same rows in a lazy stack, without padding."""
    rows = []
    for row, keep in zip(td.unbind(0), ATTENTION, strict=True):
        rows.append(row.apply(lambda v, keep=keep: v[keep[: len(v)]], batch_size=[]))
    return lazy_stack(rows)


def real(td: TensorDict, key: str) -> list[Tensor]:
    """Return what next holds at a key, one [t, 1] a row, padding cut off."""
    values = get_values(key, td["next"])
    if isinstance(values, list):
        return values
    return [row[keep] for row, keep in zip(values, ATTENTION, strict=True)]


MASKS = {
    "assistant": ({}, {"assistant": True, "prompt": True}, ASSISTANT),
    "after the prompt": ({}, {"prompt": True}, AFTER),
    "everything": ({"assistant_only": False}, {"assistant": True, "prompt": True}, ATTENTION),
    "assistant beside the response": ({}, {"response": True, "assistant": True}, ASSISTANT),
    "all beside the response": ({"assistant_only": False}, {"response": True}, ATTENTION),
}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("case", MASKS)
def test_every_mask_works_dense_and_ragged(case, padded):
    settings, parts, keep = MASKS[case]
    ref = TinyPolicy(1, padded=padded)
    td = rollout(**parts) if padded else unpadded(rollout(**parts))
    before = td.clone()
    out = make(ref, coef=0.5, **settings)(td)
    score = slow_scores(ref, keep)
    kl = (GEN - slow_scores(ref, ATTENTION)) * keep
    want = {"ref_log_prob": score, "kl_penalty": kl, "reward": REWARD.squeeze(-1) - 0.5 * kl}
    for key, values in want.items():
        for got, row, there in zip(real(out, key), values, ATTENTION, strict=True):
            assert torch.allclose(got, row[there].unsqueeze(-1))
    assert set(out["next"].keys(True, True)) == set(want)
    assert (out.exclude("next") == before.exclude("next")).all()


def test_a_missing_reward_is_skipped():
    out = make()(rollout(prompt=True, reward=None))
    assert set(out["next"].keys()) == {"kl_penalty", "ref_log_prob"}


def test_detach_cuts_the_graph_of_kl_reference_and_reward():
    for detach in (True, False):
        td = rollout(prompt=True)
        td.set(FULL, GEN.clone().requires_grad_())
        out = make(detach=detach)(td)["next"]
        assert [out[k].requires_grad for k in ("kl_penalty", "ref_log_prob", "reward")] == [
            not detach
        ] * 3


def test_two_models_are_a_type_error_that_names_retrieve_kl():
    with pytest.raises(TypeError, match=r"takes one model.*RetrieveKL\(gen_model, ref_model\)"):
        KLRewardTransform(TinyPolicy(0), TinyPolicy(1))


def test_it_works_inside_an_env_and_declares_what_it_writes():
    transform = make(in_keys=["reward"], out_keys=["shaped", "leash", "ref"], coef=0.5)
    env = TransformedEnv(Chat(), Compose(transform))
    start = rollout(prompt=True, reward=None).exclude("next")
    td = env.reset(start)
    assert td["shaped"].tolist() == [[0.0], [0.0]]
    assert "leash" not in td
    out = env.step(td)["next"]
    kl = (GEN - slow_scores(TinyPolicy(1), ATTENTION)) * AFTER
    assert transform.out_keys == ["shaped", "leash", "ref"]
    assert set(out.keys()) == {"reward", "shaped", "leash", "ref"}
    assert out["reward"].tolist() == [[1.0], [1.0]]
    assert torch.allclose(out["leash"].squeeze(-1), kl)
    assert torch.allclose(out["shaped"].sum((1, 2)), 1 - 0.5 * kl.sum(-1))  # paid once
    assert (out["shaped"].squeeze(-1)[~AFTER] == 0).all()


@pytest.mark.parametrize("collected", [False, True])
def test_arguments_act_in_both_parts_and_the_callers_dict_stays(collected):
    """Also when the generator comes from a collector, where the original lost some."""
    kwargs = {"padding": True}
    given = {"tokenizer": Shorter(), "tokenizer_kwargs": kwargs, "padding_side": "right"}
    gen, ref = (TinyPolicy(i, key=f"{i}", mode="history", padded=False) for i in (0, 1))
    both = RetrieveKL(*(() if collected else (gen,)), ref_model=ref, detach=False, **given)
    if collected:
        env = TransformedEnv(Chat(), both)
        env.register_collector(collector := Collector(gen))
        assert env.collector is collector
        td = unpadded(rollout(reward=None)).exclude("log_probs", "next")
        td = TensorDict({"tokens": lazy_stack([r["tokens"] for r in td.tensordicts])}, [2])
        history = Turns(text=["ab>def", "a>bc"], batch_size=[2])
        with pytest.raises(ValueError, match="expected a mask of"):  # it was asked
            env.step(td.set("history", TensorDict({"full": history}, [2])))
    for part in (both.generator, both[0]):
        assert isinstance(part.tokenizer, Shorter)
        assert (part.detach, part.padding_side) == (False, "right")
    assert both[1].padding_side == "right"
    assert kwargs == {"padding": True}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side_says_how_a_dense_reward_of_ragged_rows_is_padded(side):
    td = unpadded(rollout(assistant=True, reward=None))
    names = ("tokens", "masks", "log_probs")
    td = TensorDict({k: lazy_stack([r[k] for r in td.tensordicts]) for k in names}, [2])
    td.set("next", TensorDict({"reward": REWARD.clone()}, [2]))
    out = make(TinyPolicy(1, padded=False), padding_side=side)(td)
    kl = (GEN - slow_scores(TinyPolicy(1), ATTENTION)) * ASSISTANT  # padded left
    if side == "right":
        kl[1] = kl[1].roll(-2)
    assert torch.allclose(out["next", "reward"].squeeze(-1), REWARD.squeeze(-1) - kl)
    rows = real(out, "kl_penalty")
    assert [tuple(r.shape) for r in rows] == [(6, 1), (4, 1)]


def test_coef_is_the_state_and_a_loaded_one_is_charged():
    transform = make(coef=0.5)
    assert {k: float(v) for k, v in transform.state_dict().items()} == {"coef": 0.5}
    transform.load_state_dict({"coef": torch.tensor(2.0)})
    out = copy.deepcopy(transform)(rollout(prompt=True))["next"]
    assert torch.allclose(out["reward"], REWARD - 2.0 * out["kl_penalty"])
    assert list(transform.parameters()) == []  # no optimiser finds the reference


def test_the_reward_may_have_any_key_or_stay_as_it_is():
    td = rollout(prompt=True, reward=None)
    td["next"].set(("agent", "reward"), REWARD.clone()).set("reward", torch.ones(2, 1))
    out = make(in_keys=[("agent", "reward")])(td)["next"]
    assert torch.allclose(out["agent", "reward"], REWARD - out["kl_penalty"])
    assert out["reward"].tolist() == [[1.0], [1.0]]
    out = make(add_to_reward=False)(rollout(prompt=True))["next"]
    assert torch.equal(out["reward"], REWARD)
    assert out["kl_penalty"].shape == (2, 6, 1)


def test_the_documented_attributes_are_there():
    ref = TinyPolicy(1, padded=False)
    made = make(ref, padding_side="right", device="cpu", tokenizer=(shorter := Shorter()))
    assert KLRewardTransform.DEFAULT_IN_KEYS == ["reward"] == made.in_keys[:1]
    assert (made.pad_output, made.padding_side) == (False, "right")
    assert made.device == torch.device("cpu")
    assert made.tokenizer is shorter
    plain = make()
    assert (plain.pad_output, plain.padding_side, plain.device) == (True, "left", None)


def test_a_factory_makes_the_reference_and_log_probs_may_have_another_key():
    with pytest.warns(DeprecationWarning, match="use RetrieveKL"):
        made = KLRewardTransform(
            ref_model_factory=lambda: TinyPolicy(1, key="ref"), log_prob_key=("gen", "full")
        )
    td = rollout(prompt=True).rename_key_("log_probs", "gen")
    want = make()(rollout(prompt=True))["next"]
    assert (made(td)["next"] == want).all()
    assert made.ref_model.log_probs_key == "ref"


@pytest.mark.gpu
def test_device_moves_inputs_in_and_results_back():
    transform = make(TinyPolicy(1), device="cuda").to("cuda")
    out = transform(rollout(prompt=True))["next"]
    want = make()(rollout(prompt=True))["next"]
    for key in ("kl_penalty", "ref_log_prob", "reward"):
        assert out[key].device.type == "cpu"
        assert torch.allclose(out[key], want[key])


def test_what_cannot_work_is_refused():
    ref = TinyPolicy(1)
    for bad in ({}, {"ref_model": ref, "ref_model_factory": lambda: ref}):
        with (
            pytest.warns(DeprecationWarning, match="use RetrieveKL"),
            pytest.raises(ValueError, match=r"exactly one of|Cannot provide both"),
        ):
            KLRewardTransform(**bad)
    for bad, words in (
        ({"ref": TinyPolicy(1, mode="history")}, "input_mode='tokens'"),
        ({"ref": TinyPolicy(1, generate=True)}, "generate=False"),
        ({"in_keys": ["reward", "other"]}, "expected one in_key"),
        ({"out_keys": ["reward", "kl"]}, "expected one in_key"),
        ({"padding_side": "middle"}, "padding_side"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**bad)
    with pytest.raises(RuntimeError, match=r"expected token ids at \('tokens', 'full'\)"):
        make()(TensorDict(batch_size=[2]))
    with pytest.raises(ValueError, match="Log-probs not found"):
        make()(rollout(prompt=True).exclude("log_probs"))
    with pytest.raises(ValueError, match=r"found neither .* set assistant_only=False"):
        make()(rollout())
