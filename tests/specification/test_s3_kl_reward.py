"""S3, second part: KLRewardTransform, and the transforms in a Ray actor."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.chats import spoken
from support.policies import make_wrapper
from support.policies import prompts as env_prompts
from support.specification import RAY, TORCHRL, close, defaults, page, raises, refused, warned
from support.tasks import Words
from support.wrappers import (
    ASSISTANT,
    ATTENTION,
    FULL,
    RESPONSE,
    charged,
    gen,
    generated,
    own_ray,
    plain,
    plain_kl,
    ragged,
    ref,
    rewarded,
    tokens_ref,
)
from tensordict import TensorDict

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

S3 = page("S3")


LOG = ["reward", "kl_penalty", "ref_log_prob"]


def older(model: Any = None, **settings: Any) -> KLRewardTransform:
    factory = settings.get("ref_model_factory")
    return KLRewardTransform(model or (None if factory else tokens_ref()), **settings)


def known_everywhere(*without: Any) -> TensorDict:
    """Return the same with generation log-probs of the prompts too."""
    td = rewarded(*without)
    return td.set(FULL, plain(make_wrapper(), td, ATTENTION).float())


def right(transform: KLRewardTransform, td: TensorDict, key: Any) -> None:
    """Check the KL that a transform writes against plain forwards, at the tokens of a mask."""
    whole = generated()
    want = (whole[FULL] - plain(ref(), whole, ATTENTION)) * whole[key]
    real = whole[ATTENTION]
    for i, got in enumerate(rows(transform(td)["next"], "kl_penalty")):
        close(got[:, 0], want[i] if len(got) == len(want[i]) else want[i][real[i]], 1e-4)


@S3("KLRewardTransform(ref_model=None, *, ...): arguments and defaults")
def test_KLRewardTransform_ref_model_None():
    text = """ref_model=None, ref_model_factory=None, coef=1.0, in_keys=None, out_keys=None,
        log_prob_key=('log_probs', 'full'), device=None, add_to_reward=True, tokenizer=None,
        assistant_only=True, padding_side='left', use_ray_service=False"""
    defaults(KLRewardTransform, text)


@S3("KLRewardTransform is deprecated for RetrieveKL")
def test_KLRewardTransform_is_deprecated_for_RetrieveKL():
    warned(lambda: older(coef=0.3), "deprecated; use RetrieveKL")


@S3("KLRewardTransform: reward - coef * (log_prob - ref_log_prob), dense and ragged")
def test_KLRewardTransform():
    made = older(coef=0.3)
    td = rewarded()
    given = td["next", "reward"].clone()
    right(made, td, RESPONSE)
    close(td["next", "reward"], given - 0.3 * td["next", "kl_penalty"])
    assert set(td["next"].keys()) == set(LOG)
    right(older(tokens_ref(pad_output=False)), ragged(), RESPONSE)


@S3("KLRewardTransform example: KLRewardTransform(gen_model, ref_model)", part=TORCHRL)
def test_KLRewardTransform_example():
    with raises(TypeError, "RetrieveKL(gen_model, ref_model)"):
        KLRewardTransform(tokens_ref(), tokens_ref())


@S3("KLRewardTransform: exactly one of ref_model and ref_model_factory")
def test_KLRewardTransform_exactly_one_of_ref_model():
    right(older(ref_model_factory=tokens_ref), rewarded(), RESPONSE)
    with raises(ValueError, "Cannot provide both 'ref_model' and 'ref_model_factory'"):
        KLRewardTransform(tokens_ref(), ref_model_factory=tokens_ref)
    refused(ValueError, "exactly one of 'ref_model' or 'ref_model_factory'", KLRewardTransform)


@S3("KLRewardTransform in_keys: the reward, then those of the model")
def test_KLRewardTransform_in_keys():
    made = older(coef=0.3)
    assert made.in_keys == ["reward", ("tokens", "full")]
    td = rewarded()
    td["next"].rename_key_("reward", "mine")
    given = td["next", "mine"].clone()
    out = older(in_keys=["mine"])(td)["next"]
    close(out["mine"], given - out["kl_penalty"])


@S3("KLRewardTransform out_keys: reward, kl_penalty, ref_log_prob")
def test_KLRewardTransform_out_keys():
    made = older(coef=0.3)
    assert made.out_keys == LOG
    assert older(out_keys=["shaped"]).out_keys == ["shaped", *LOG[1:]]
    out = older(out_keys=["a", "b", "c"])(rewarded())["next"]
    assert set(out.keys()) == {"reward", "a", "b", "c"}
    for wrong in ({"in_keys": ["a", "b"]}, {"out_keys": ["a", "b"]}):
        refused(ValueError, ("in_keys=", "out_keys="), older, **wrong)


@S3("KLRewardTransform log_prob_key, default ('log_probs', 'full')")
def test_KLRewardTransform_log_prob_key_default_log_probs_full():
    right(older(log_prob_key=("gen", "full")), rewarded().rename_key_("log_probs", "gen"), RESPONSE)


@S3("KLRewardTransform device")
def test_KLRewardTransform_device():
    right(older(device="cpu"), rewarded(), RESPONSE)


@S3("KLRewardTransform add_to_reward=False")
def test_KLRewardTransform_add_to_reward_False():
    td = rewarded()
    given = td["next", "reward"].clone()
    right(older(add_to_reward=False), td, RESPONSE)
    assert torch.equal(td["next", "reward"], given)


@S3("KLRewardTransform.tokenizer: that given, or the reference's")
def test_KLRewardTransform_tokenizer():
    made = older(coef=0.3)
    mine = copy.deepcopy(make_wrapper().tokenizer)
    assert made.tokenizer is make_wrapper().tokenizer
    assert older(tokenizer=mine).tokenizer is mine


@S3("KLRewardTransform assistant_only=True: the assistant mask")
def test_KLRewardTransform_assistant_only_True():
    made = older(coef=0.3)
    right(made, rewarded(RESPONSE), ASSISTANT)


@S3("KLRewardTransform assistant_only falls back on prompt / response separation")
def test_KLRewardTransform_assistant_only_falls_back_on_prompt():
    made = older(coef=0.3)
    right(made, rewarded(RESPONSE, ASSISTANT, "history"), RESPONSE)
    right(older(tokens_ref(pad_output=False)), ragged(RESPONSE, ASSISTANT, "history"), RESPONSE)


@S3("KLRewardTransform assistant_only=False: all tokens")
def test_KLRewardTransform_assistant_only_False():
    kl = older(assistant_only=False)(known_everywhere(RESPONSE))["next", "kl_penalty"][..., 0]
    close(kl, plain_kl(generated(), ATTENTION), 1e-4)


@S3("KLRewardTransform detach, default True")
def test_KLRewardTransform_detach_default_True():
    for detach in (True, False):
        out = older(detach=detach)(rewarded())["next"]
        assert [out[key].requires_grad for key in LOG] == [not detach] * 3


@S3("KLRewardTransform padding_side")
def test_KLRewardTransform_padding_side():
    for side in ("left", "right"):
        td = ragged()
        size = len(rows(td, ("tokens", "full"))[1])
        td["next"] = TensorDict({"reward": torch.zeros(3, 23, 1)}, [3])
        out = older(tokens_ref(pad_output=False), padding_side=side)(td)["next", "reward"]
        assert out[1, :, 0].nonzero().tolist() == [[22 if side == "left" else size - 1]]


@S3("KLRewardTransform coef: a buffer, in the state_dict")
def test_KLRewardTransform_coef():
    made = older(coef=0.3)
    assert {k: round(float(v), 3) for k, v in made.state_dict().items()} == {"coef": 0.3}
    assert not list(made.parameters())  # no optimiser finds the reference


@S3("KLRewardTransform: the reference needs generate=False and input_mode='tokens'")
def test_KLRewardTransform_the_reference_needs_generate_False():
    refused(
        ValueError, "generate=False", older, make_wrapper().get_new_version(input_mode="tokens")
    )
    for mode in ("history", "text"):
        refused(ValueError, "input_mode='tokens'", older, ref(input_mode=mode))


@S3("KLRewardTransform: no reward counts as 0", part=TORCHRL)
def test_KLRewardTransform_no_reward_counts_as_0():
    made = older()
    td = rewarded()
    del td["next", "reward"]
    assert set(made(td)["next"].keys()) == {"kl_penalty", "ref_log_prob"}


@S3("KLRewardTransform: a reward per row is repeated over the tokens", part=TORCHRL)
def test_KLRewardTransform_a_reward_per_row_is_repeated_over():
    td = rewarded()
    td["next", "reward"] = torch.ones(3, 1)
    close(older(coef=0.0)(td)["next", "reward"].sum((1, 2)), torch.ones(3))


@S3("KLRewardTransform: other dimensions of reward or log-probs are ValueErrors")
def test_KLRewardTransform_ValueErrors():
    made = older()
    td = rewarded()
    td["next", "reward"] = torch.zeros(3, 2, 2, 1)
    refused(ValueError, "reward", made, td)
    td = rewarded()
    td[FULL] = td[FULL][:, 1:]
    refused(ValueError, "shape", made, td)


@S3("KLRewardTransform: a missing action is a RuntimeError, skipped with tolerance")
def test_KLRewardTransform_RuntimeError():
    made = older()
    refused(RuntimeError, "tokens", made, TensorDict(batch_size=[2]))
    made.missing_tolerance = True
    assert not set(made(TensorDict(batch_size=[2])).keys())


@S3("KLRewardTransform.action_key follows the env's input_mode", part=TORCHRL)
def test_KLRewardTransform_action_key_follows_the_env_input_mode():
    for mode in ("history", "text", "tokens"):
        env = ChatEnv(Words(), input_mode=mode, tokenizer=make_wrapper().tokenizer)
        env.append_transform(mounted := older())
        assert mounted.action_key == ("tokens", "full")


@S3("KLRewardTransform at reset: a reward key of its own reads zero")
def test_KLRewardTransform_at_reset():
    env = ChatEnv(Words(), group_size=2).append_transform(older(out_keys=["shaped"]))
    td = env.reset(env_prompts(2))
    assert (td["shaped"].tolist(), "kl_penalty" in td) == ([[0.0]] * 4, False)


@S3("KLRewardTransform.transform_output_spec: (..., -1, 1)")
def test_KLRewardTransform_transform_output_spec():
    env = ChatEnv(Words(), input_mode="tokens", tokenizer=make_wrapper().tokenizer)
    env = env.append_transform(older())
    assert env.full_reward_spec["reward"].shape == (-1, -1, 1)
    assert [env.full_observation_spec[key].shape for key in LOG[1:]] == [(-1, -1, 1)] * 2


@S3("KLRewardTransform and RetrieveKL: actor_name needs use_ray_service")
def test_KLRewardTransform_and_RetrieveKL():
    for make in (older, partial(RetrieveKL, gen(), ref())):
        refused(ValueError, "use_ray_service=True", make, actor_name="kl")


@S3("KLRewardTransform.DEFAULT_IN_KEYS is ['reward']")
def test_KLRewardTransform_DEFAULT_IN_KEYS_is_reward():
    assert KLRewardTransform.DEFAULT_IN_KEYS == ["reward"]


@S3("KLRewardTransform.pad_output, padding_side, device, assistant_only, add_to_reward")
def test_KLRewardTransform_pad_output_padding_side_device():
    made = older(padding_side="right", device="cpu", assistant_only=False, add_to_reward=False)
    assert [older(tokens_ref(pad_output=p)).pad_output for p in (True, False)] == [True, False]
    assert (made.padding_side, torch.device(made.device)) == ("right", torch.device("cpu"))
    assert (made.assistant_only, made.add_to_reward, older().device) == (False, False, None)


@S3("KLRewardTransform assistant_only=False where the td has a response mask")
def test_KLRewardTransform_assistant_only_False_where_the_td_has():
    kl = older(assistant_only=False)(known_everywhere())["next", "kl_penalty"][..., 0]
    close(kl, plain_kl(generated(), ATTENTION), 1e-4)


@S3("KLRewardTransform in LLMCollector, pad_output=True")
def test_KLRewardTransform_in_LLMCollector_pad_output_True():
    for padded in (True, False):
        charged(older(tokens_ref(pad_output=padded), coef=0.1))


@pytest.mark.gpu
@S3("KLRewardTransform device: cuda, in and back")
def test_KLRewardTransform_device_cuda_in_and_back():
    out = older(device="cuda").to("cuda")(rewarded())["next"]
    assert out["kl_penalty"].device.type == "cpu"


@pytest.mark.gpu
@S3("Ray: num_gpus=1, device='cuda'")
def test_Ray_num_gpus_1_device_cuda():
    pytest.importorskip("ray")
    RayTransform(Tripled, num_gpus=1, device="cuda").close()


class Tripled(Transform):
    """Multiply a value, in the actor."""

    def __init__(self, factor: float = 3.0) -> None:
        super().__init__(["value"], ["tripled"])
        self.factor = factor

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.factor


@S3("RayKLRewardTransform(ref_model, *, ref_model_factory, num_cpus, num_gpus, ...)")
def test_RayKLRewardTransform_ref_model_ref_model_factory():
    last = "ref_model_factory=None, num_cpus=None, num_gpus=0, device=None, actor_name=None"
    defaults(RayKLRewardTransform, f"ref_model=None, {last}")


@S3("RayRetrieveKL(gen_model, ref_model, *, factories, num_cpus, num_gpus, ...)")
def test_RayRetrieveKL_gen_model_ref_model_factories_num_cpus():
    last = "ref_model_factory=None, num_cpus=None, num_gpus=0, device=None, actor_name=None"
    first = "gen_model='from_collector', ref_model=None, gen_model_factory=None"
    defaults(RayRetrieveKL, f"{first}, {last}")


@S3("Ray: model and factory, or neither, is a ValueError")
def test_Ray_ValueError():
    with raises(ValueError, "Cannot provide both 'ref_model'"):
        RayKLRewardTransform(tokens_ref(), ref_model_factory=tokens_ref)
    with raises(ValueError, "Cannot provide both 'gen_model'"):
        RayRetrieveKL(gen(), ref(), gen_model_factory=gen)
    for make, name in ((RayKLRewardTransform, "ref"), (partial(RayRetrieveKL, None, 1), "gen")):
        refused(ValueError, f"exactly one of '{name}_model'", make)


@S3("Ray: __repr__ never raises, without an actor neither")
def test_Ray_repr_never_raises_without_an_actor_neither():
    for cls in (RayRetrieveKL, RayKLRewardTransform):
        assert cls.__name__ in repr(cls.__new__(cls))


@S3("Ray: no gradient crosses, and a missing Ray names the extra")
def test_Ray_no_gradient_crosses_and_a_missing_Ray_names():
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


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with own_ray():
        yield


@pytest.fixture(scope="module")
def tripled(ray: None) -> Iterator[RayTransform]:
    made = RayTransform(Tripled)
    yield made
    made.close()


@RAY
@S3("Ray example, RayKLRewardTransform: a factory, or a model")
def test_Ray_example_RayKLRewardTransform(ray):
    kl = older()(rewarded())["next", "kl_penalty"]
    device, factory = {"device": torch.device("cpu")}, {"ref_model_factory": tokens_ref}
    for given in ({"ref_model": None, **factory}, {"ref_model": tokens_ref()}):
        shared(RayKLRewardTransform, rewarded(), kl, **given, **device)


@RAY
@S3("Ray example, RayRetrieveKL: factories, or models")
def test_Ray_example_RayRetrieveKL(ray):
    both = RetrieveKL(gen(), ref())(spoken())
    device = {"device": torch.device("cpu")}
    none = {"gen_model": None, "ref_model": None}
    factories = {"gen_model_factory": gen, "ref_model_factory": ref}
    for given in ({**none, **factories}, {"gen_model": gen(), "ref_model": ref()}):
        shared(RayRetrieveKL, spoken(), both["kl_penalty"], **given, **device)


@RAY
@S3("use_ray_service=True, actor_name: the Ray versions")
def test_use_ray_service_True_actor_name(ray):
    kl, both = older()(rewarded())["next", "kl_penalty"], RetrieveKL(gen(), ref())(spoken())
    service = {"use_ray_service": True, "actor_name": "kl"}
    shared(partial(RetrieveKL, gen(), ref()), spoken(), both["kl_penalty"], **service)
    shared(partial(older, tokens_ref()), rewarded(), kl, **service)


@RAY
@S3("Ray num_cpus, default 1; num_gpus, default 0")
def test_Ray_num_cpus_default_1_num_gpus_default_0(tripled):
    assert "num_cpus=1, num_gpus=0" in repr(tripled)


@RAY
@S3("Ray: method calls are delegated to the actor")
def test_Ray_method_calls_are_delegated_to_the_actor(tripled):
    assert tripled(TensorDict({"value": torch.ones(2)}, [2]))["tripled"].tolist() == [3.0, 3.0]
    assert (tripled.in_keys, tripled.out_keys) == (["value"], ["tripled"])


@RAY
@S3("Ray: attributes of the shared transform", part=TORCHRL)
def test_Ray_attributes_of_the_shared_transform(tripled):
    assert not hasattr(tripled, "factor")


@RAY
@S3("Ray actor_name: the actor is reused if it exists; **kwargs are the transform's")
def test_Ray_actor_name(ray):
    named = {"factor": 2.0, "num_cpus": 0.1, "actor_name": "twice"}
    first, second = (RayTransform(Tripled, **named) for _ in range(2))
    assert second.sent_bytes == 0
    assert second(TensorDict({"value": torch.ones(1)}, [1]))["tripled"].tolist() == [2.0]
    first.close()
