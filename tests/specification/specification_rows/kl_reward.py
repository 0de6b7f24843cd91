"""S3, second part: KLRewardTransform, and the transforms in a Ray actor."""

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from contracts import Words, make_wrapper
from contracts import prompts as env_prompts
from tensordict import TensorDict, lazy_stack
from wrapped import spoken

from envs import ChatEnv
from envs.transforms import (
    KLRewardTransform,
    RayKLRewardTransform,
    RayRetrieveKL,
    RayTransform,
    RetrieveKL,
    Transform,
)
from policies.optional_packages import EXTRAS
from policies.padding import rows
from specification_rows.containers import ASSISTANT, ATTENTION, RESPONSE, generated
from specification_rows.kl import FULL, S3, charged, gen, plain, plain_kl, ref
from specification_rows.row import ROOT, close, defaults, raises, refused, warned

LOG = ["reward", "kl_penalty", "ref_log_prob"]
tokens_ref = partial(ref, input_mode="tokens")


def older(model: Any = None, **settings: Any) -> KLRewardTransform:
    factory = settings.get("ref_model_factory")
    return KLRewardTransform(model or (None if factory else tokens_ref()), **settings)


def rewarded(*without: Any) -> TensorDict:
    """Return a rollout with a reward [B, T, 1] in next, without some masks."""
    td = generated().copy().exclude(*without)
    reward = torch.randn(*td["tokens"].full.shape, 1)
    return td.set("next", TensorDict({"reward": reward}, [3]))


def known_everywhere(*without: Any) -> TensorDict:
    """Return the same with generation log-probs of the prompts too."""
    td = rewarded(*without)
    return td.set(FULL, plain(make_wrapper(), td, ATTENTION).float())


def ragged(*without: Any) -> TensorDict:
    """Return the same as rows without padding, rewards of 0."""
    td = generated(False).copy().exclude(*without)
    sizes = [len(ids) for ids in rows(td, ("tokens", "full"))]
    return td.set("next", lazy_stack([TensorDict(reward=torch.zeros(n, 1)) for n in sizes]))


def right(transform: KLRewardTransform, td: TensorDict, key: Any) -> None:
    """Check the KL that a transform writes against plain forwards, at the tokens of a mask."""
    whole = generated()
    want = (whole[FULL] - plain(ref(), whole, ATTENTION)) * whole[key]
    real = whole[ATTENTION]
    for i, got in enumerate(rows(transform(td)["next"], "kl_penalty")):
        close(got[:, 0], want[i] if len(got) == len(want[i]) else want[i][real[i]], 1e-4)


@S3.rows()
def kl_reward_arguments():
    yield "KLRewardTransform(ref_model=None, *, ...): arguments and defaults"
    text = """ref_model=None, ref_model_factory=None, coef=1.0, in_keys=None, out_keys=None,
        log_prob_key=('log_probs', 'full'), device=None, add_to_reward=True, tokenizer=None,
        assistant_only=True, padding_side='left', use_ray_service=False"""
    defaults(KLRewardTransform, text)
    yield "KLRewardTransform is deprecated for RetrieveKL"
    made = warned(lambda: older(coef=0.3), "deprecated; use RetrieveKL")
    yield "KLRewardTransform: reward - coef * (log_prob - ref_log_prob), dense and ragged"
    td = rewarded()
    given = td["next", "reward"].clone()
    right(made, td, RESPONSE)
    close(td["next", "reward"], given - 0.3 * td["next", "kl_penalty"])
    assert set(td["next"].keys()) == set(LOG)
    right(older(tokens_ref(pad_output=False)), ragged(), RESPONSE)
    yield "KLRewardTransform example: KLRewardTransform(gen_model, ref_model)"
    with raises(TypeError, "RetrieveKL(gen_model, ref_model)"):
        KLRewardTransform(tokens_ref(), tokens_ref())
    yield "KLRewardTransform: exactly one of ref_model and ref_model_factory"
    right(older(ref_model_factory=tokens_ref), rewarded(), RESPONSE)
    with raises(ValueError, "Cannot provide both 'ref_model' and 'ref_model_factory'"):
        KLRewardTransform(tokens_ref(), ref_model_factory=tokens_ref)
    refused(ValueError, "exactly one of 'ref_model' or 'ref_model_factory'", KLRewardTransform)
    yield "KLRewardTransform in_keys: the reward, then those of the model"
    assert made.in_keys == ["reward", ("tokens", "full")]
    td = rewarded()
    td["next"].rename_key_("reward", "mine")
    given = td["next", "mine"].clone()
    out = older(in_keys=["mine"])(td)["next"]
    close(out["mine"], given - out["kl_penalty"])
    yield "KLRewardTransform out_keys: reward, kl_penalty, ref_log_prob"
    assert made.out_keys == LOG
    assert older(out_keys=["shaped"]).out_keys == ["shaped", *LOG[1:]]
    out = older(out_keys=["a", "b", "c"])(rewarded())["next"]
    assert set(out.keys()) == {"reward", "a", "b", "c"}
    for wrong in ({"in_keys": ["a", "b"]}, {"out_keys": ["a", "b"]}):
        refused(ValueError, ("in_keys=", "out_keys="), older, **wrong)
    yield "KLRewardTransform log_prob_key, default ('log_probs', 'full')"
    right(older(log_prob_key=("gen", "full")), rewarded().rename_key_("log_probs", "gen"), RESPONSE)
    yield "KLRewardTransform device"
    right(older(device="cpu"), rewarded(), RESPONSE)
    yield "KLRewardTransform add_to_reward=False"
    td = rewarded()
    given = td["next", "reward"].clone()
    right(older(add_to_reward=False), td, RESPONSE)
    assert torch.equal(td["next", "reward"], given)
    yield "KLRewardTransform.tokenizer: that given, or the reference's"
    mine = copy.deepcopy(make_wrapper().tokenizer)
    assert made.tokenizer is make_wrapper().tokenizer
    assert older(tokenizer=mine).tokenizer is mine
    yield "KLRewardTransform assistant_only=True: the assistant mask"
    right(made, rewarded(RESPONSE), ASSISTANT)
    yield "KLRewardTransform assistant_only falls back on prompt / response separation"
    right(made, rewarded(RESPONSE, ASSISTANT, "history"), RESPONSE)
    right(older(tokens_ref(pad_output=False)), ragged(RESPONSE, ASSISTANT, "history"), RESPONSE)
    yield "KLRewardTransform assistant_only=False: all tokens"
    kl = older(assistant_only=False)(known_everywhere(RESPONSE))["next", "kl_penalty"][..., 0]
    close(kl, plain_kl(generated(), ATTENTION), 1e-4)
    yield "KLRewardTransform detach, default True"
    for detach in (True, False):
        out = older(detach=detach)(rewarded())["next"]
        assert [out[key].requires_grad for key in LOG] == [not detach] * 3
    yield "KLRewardTransform padding_side"
    for side in ("left", "right"):
        td = ragged()
        size = len(rows(td, ("tokens", "full"))[1])
        td["next"] = TensorDict({"reward": torch.zeros(3, 23, 1)}, [3])
        out = older(tokens_ref(pad_output=False), padding_side=side)(td)["next", "reward"]
        assert out[1, :, 0].nonzero().tolist() == [[22 if side == "left" else size - 1]]
    yield "KLRewardTransform coef: a buffer, in the state_dict"
    assert {k: round(float(v), 3) for k, v in made.state_dict().items()} == {"coef": 0.3}
    assert not list(made.parameters())  # no optimiser finds the reference


@S3.rows()
def kl_reward_errors_and_hooks():
    made = older()
    yield "KLRewardTransform: the reference needs generate=False and input_mode='tokens'"
    refused(
        ValueError, "generate=False", older, make_wrapper().get_new_version(input_mode="tokens")
    )
    for mode in ("history", "text"):
        refused(ValueError, "input_mode='tokens'", older, ref(input_mode=mode))
    yield "KLRewardTransform: no reward counts as 0"
    td = rewarded()
    del td["next", "reward"]
    assert set(made(td)["next"].keys()) == {"kl_penalty", "ref_log_prob"}
    yield "KLRewardTransform: a reward per row is repeated over the tokens"
    td["next", "reward"] = torch.ones(3, 1)
    close(older(coef=0.0)(td)["next", "reward"].sum((1, 2)), torch.ones(3))
    yield "KLRewardTransform: other dimensions of reward or log-probs are ValueErrors"
    td["next", "reward"] = torch.zeros(3, 2, 2, 1)
    refused(ValueError, "reward", made, td)
    td = rewarded()
    td[FULL] = td[FULL][:, 1:]
    refused(ValueError, "shape", made, td)
    yield "KLRewardTransform: a missing action is a RuntimeError, skipped with tolerance"
    refused(RuntimeError, "tokens", made, TensorDict(batch_size=[2]))
    made.missing_tolerance = True
    assert not set(made(TensorDict(batch_size=[2])).keys())
    yield "KLRewardTransform.action_key follows the env's input_mode"
    for mode in ("history", "text", "tokens"):
        env = ChatEnv(Words(), input_mode=mode, tokenizer=make_wrapper().tokenizer)
        env.append_transform(mounted := older())
        assert mounted.action_key == ("tokens", "full")
    yield "KLRewardTransform at reset: a reward key of its own reads zero"
    env = ChatEnv(Words(), group_size=2).append_transform(older(out_keys=["shaped"]))
    td = env.reset(env_prompts(2))
    assert (td["shaped"].tolist(), "kl_penalty" in td) == ([[0.0]] * 4, False)
    yield "KLRewardTransform.transform_output_spec: (..., -1, 1)"
    env = ChatEnv(Words(), input_mode="tokens", tokenizer=make_wrapper().tokenizer)
    env = env.append_transform(older())
    assert env.full_reward_spec["reward"].shape == (-1, -1, 1)
    assert [env.full_observation_spec[key].shape for key in LOG[1:]] == [(-1, -1, 1)] * 2
    yield "KLRewardTransform and RetrieveKL: actor_name needs use_ray_service"
    for make in (older, partial(RetrieveKL, gen(), ref())):
        refused(ValueError, "use_ray_service=True", make, actor_name="kl")
    yield "KLRewardTransform.DEFAULT_IN_KEYS is ['reward']"
    assert KLRewardTransform.DEFAULT_IN_KEYS == ["reward"]
    yield "KLRewardTransform.pad_output, padding_side, device, assistant_only, add_to_reward"
    made = older(padding_side="right", device="cpu", assistant_only=False, add_to_reward=False)
    assert [older(tokens_ref(pad_output=p)).pad_output for p in (True, False)] == [True, False]
    assert (made.padding_side, torch.device(made.device)) == ("right", torch.device("cpu"))
    assert (made.assistant_only, made.add_to_reward, older().device) == (False, False, None)
    yield "KLRewardTransform assistant_only=False where the td has a response mask"
    kl = older(assistant_only=False)(known_everywhere())["next", "kl_penalty"][..., 0]
    close(kl, plain_kl(generated(), ATTENTION), 1e-4)
    yield "KLRewardTransform in LLMCollector, pad_output=True"
    for padded in (True, False):
        charged(older(tokens_ref(pad_output=padded), coef=0.1))


@S3.rows(needs="gpu")
def kl_reward_on_a_gpu():
    yield "KLRewardTransform device: cuda, in and back"
    out = older(device="cuda").to("cuda")(rewarded())["next"]
    assert out["kl_penalty"].device.type == "cpu"


@S3.rows(needs="gpu")
def ray_on_a_gpu():
    yield "Ray: num_gpus=1, device='cuda'"
    pytest.importorskip("ray")
    RayTransform(Tripled, num_gpus=1, device="cuda").close()


class Tripled(Transform):
    """Multiply a value, in the actor."""

    def __init__(self, factor: float = 3.0) -> None:
        super().__init__(["value"], ["tripled"])
        self.factor = factor

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor


@S3.rows()
def before_ray():
    last = "ref_model_factory=None, num_cpus=None, num_gpus=0, device=None, actor_name=None"
    yield "RayKLRewardTransform(ref_model, *, ref_model_factory, num_cpus, num_gpus, ...)"
    defaults(RayKLRewardTransform, f"ref_model=None, {last}")
    yield "RayRetrieveKL(gen_model, ref_model, *, factories, num_cpus, num_gpus, ...)"
    first = "gen_model='from_collector', ref_model=None, gen_model_factory=None"
    defaults(RayRetrieveKL, f"{first}, {last}")
    yield "Ray: model and factory, or neither, is a ValueError"
    with raises(ValueError, "Cannot provide both 'ref_model'"):
        RayKLRewardTransform(tokens_ref(), ref_model_factory=tokens_ref)
    with raises(ValueError, "Cannot provide both 'gen_model'"):
        RayRetrieveKL(gen(), ref(), gen_model_factory=gen)
    for make, name in ((RayKLRewardTransform, "ref"), (partial(RayRetrieveKL, None, 1), "gen")):
        refused(ValueError, f"exactly one of '{name}_model'", make)
    yield "Ray: __repr__ never raises, without an actor neither"
    for cls in (RayRetrieveKL, RayKLRewardTransform):
        assert cls.__name__ in repr(cls.__new__(cls))
    yield "Ray: no gradient crosses, and a missing Ray names the extra"
    for make in (partial(RayRetrieveKL, gen(), ref()), partial(RayKLRewardTransform, tokens_ref())):
        refused(ValueError, "detach=True", make, detach=False)
    assert ".[ray]" in EXTRAS["ray"]


def shared(make: Any, td: TensorDict, want: torch.Tensor, **given: Any) -> None:
    """Check that a transform in an actor writes the KL of the one here."""
    made = make(num_cpus=0.1, **given)
    try:
        found = made(td)
        close(found.get("next", found)["kl_penalty"], want, 1e-4)
    finally:
        made.close()


@contextmanager
def own_ray() -> Iterator[None]:
    """Start Ray so that its actors find these files, and end it."""
    before = dict(os.environ)
    folders = [ROOT, *(ROOT / "tests" / name for name in ("specification", "support", "envs"))]
    paths = [*map(str, folders), before.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths)}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        sys.modules["ray"].shutdown()
        os.environ.clear()
        os.environ.update(before)


@S3.rows(needs="ray")
def on_ray():
    with own_ray():
        kl, both = older()(rewarded())["next", "kl_penalty"], RetrieveKL(gen(), ref())(spoken())
        yield "Ray example, RayKLRewardTransform: a factory, or a model"
        device, factory = {"device": torch.device("cpu")}, {"ref_model_factory": tokens_ref}
        for given in ({"ref_model": None, **factory}, {"ref_model": tokens_ref()}):
            shared(RayKLRewardTransform, rewarded(), kl, **given, **device)
        yield "Ray example, RayRetrieveKL: factories, or models"
        none = {"gen_model": None, "ref_model": None}
        factories = {"gen_model_factory": gen, "ref_model_factory": ref}
        for given in ({**none, **factories}, {"gen_model": gen(), "ref_model": ref()}):
            shared(RayRetrieveKL, spoken(), both["kl_penalty"], **given, **device)
        yield "use_ray_service=True, actor_name: the Ray versions"
        service = {"use_ray_service": True, "actor_name": "kl"}
        shared(partial(RetrieveKL, gen(), ref()), spoken(), both["kl_penalty"], **service)
        shared(partial(older, tokens_ref()), rewarded(), kl, **service)
        yield "Ray num_cpus, default 1; num_gpus, default 0"
        made = RayTransform(Tripled)
        assert "num_cpus=1, num_gpus=0" in repr(made)
        yield "Ray: method calls are delegated to the actor"
        assert made(TensorDict({"value": torch.ones(2)}, [2]))["tripled"].tolist() == [3.0, 3.0]
        assert (made.in_keys, made.out_keys) == (["value"], ["tripled"])
        yield "Ray: attributes of the shared transform"
        assert not hasattr(made, "factor")
        made.close()
        yield "Ray actor_name: the actor is reused if it exists; **kwargs are the transform's"
        named = {"factor": 2.0, "num_cpus": 0.1, "actor_name": "twice"}
        first, second = (RayTransform(Tripled, **named) for _ in range(2))
        assert second.sent_bytes == 0
        assert second(TensorDict({"value": torch.ones(1)}, [1]))["tripled"].tolist() == [2.0]
        first.close()
