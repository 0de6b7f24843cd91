"""S3, first part: RetrieveLogProb, KLComputation and RetrieveKL."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support.chats import spoken
from support.policies import make_wrapper
from support.policies import prompts as env_prompts
from support.specification import TORCHRL, close, defaults, page, raises, refused, warned
from support.tasks import Words
from support.wrappers import (
    ASSISTANT,
    ATTENTION,
    FULL,
    GEN,
    REF,
    RESPONSE,
    Collector,
    charged,
    gen,
    generated,
    no_template,
    other_model,
    plain,
    plain_kl,
    ref,
    same_rows,
    scored,
)
from tensordict import TensorDict, set_list_to_stack
from torch import Tensor

from envs import ChatEnv, Composite, EnvBase, TransformedEnv, check_env_specs
from envs.transforms import Compose, KLComputation, RetrieveKL, RetrieveLogProb
from policies import ChatHistory, History, TransformersWrapper

S3 = page("S3")


class Chat(EnvBase):
    """Reward each of two rows with 1, and leave the rest to transforms."""

    def _reset(self, td):
        return td

    def _step(self, td):
        return TensorDict({"reward": torch.ones(2, 1)}, [2])


def two(a: Any, b: Any, reward: Any = None) -> TensorDict:
    """Return a td with both log-probs, and a reward, in next."""
    found = {FULL: a, REF: b} | ({} if reward is None else {"reward": reward})
    return TensorDict({"next": TensorDict(found, [2])}, [2])


def nested(*parts: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=layout)


@S3("RetrieveLogProb(model, *, ...): arguments and defaults")
def test_RetrieveLogProb_model():
    text = """model, log_probs_full_key=None, assistant_only=True, tokenizer_kwargs=None,
        detach=True, device=None, tokenizer=None, padding_side='left'"""
    defaults(RetrieveLogProb, text)


@S3("RetrieveLogProb model: the log-probs of the reference at assistant tokens, else zero")
def test_RetrieveLogProb_model_the_log_probs_of_the_reference():
    for padded in (True, False):
        out = RetrieveLogProb(ref(pad_output=padded))(spoken())
        same_rows(out, REF, plain(ref(), scored(), ASSISTANT))
        assert set(out.keys()) == {"history", "ref_log_probs"}


@S3("RetrieveLogProb log_probs_full_key, default (model.log_probs_key, 'full')")
def test_RetrieveLogProb_log_probs_full_key_default_model():
    made = RetrieveLogProb(ref())
    assert (made.in_keys, made.out_keys) == ([("history", "full")], [REF])
    old = RetrieveLogProb(ref(), log_probs_full_key=("old", "full"))(spoken())
    assert set(old.keys()) == {"history", "old"}


@S3("RetrieveLogProb log_probs_full_key: a warning unless a tuple that ends in 'full'")
def test_RetrieveLogProb_log_probs_full_key():
    for key in ("ref", ("ref", "all")):
        warned(partial(RetrieveLogProb, ref(), log_probs_full_key=key), "log_probs_full_key")


@S3("RetrieveLogProb assistant_only=True needs input_mode='history'")
def test_RetrieveLogProb_assistant_only_True_needs_input_mode():
    for mode in ("text", "tokens"):
        with raises(ValueError, "input_mode='history'", "assistant_only=False"):
            RetrieveLogProb(ref(input_mode=mode))


@S3("RetrieveLogProb assistant_only=False: all tokens, in any input mode")
def test_RetrieveLogProb_assistant_only_False():
    for mode in ("history", "text", "tokens"):
        whole = RetrieveLogProb(ref(input_mode=mode, pad_output=False), assistant_only=False)
        same_rows(whole(spoken(mode)), REF, plain(ref(), scored(), ATTENTION))


@S3("RetrieveLogProb tokenizer_kwargs: documented defaults; the caller's dict stays")
def test_RetrieveLogProb_tokenizer_kwargs():
    made = RetrieveLogProb(ref())
    wanted = {"return_assistant_tokens_mask": True, "tokenize": True, "return_dict": True}
    wanted |= {"padding": False, "add_generation_prompt": False}
    mine = dict(wanted)
    close(RetrieveLogProb(ref(), tokenizer_kwargs=mine)(spoken())[REF], made(spoken())[REF])
    assert mine == wanted


@S3("RetrieveLogProb detach, default True")
def test_RetrieveLogProb_detach_default_True():
    for detach in (True, False):
        assert RetrieveLogProb(ref(), detach=detach)(spoken())[REF].requires_grad is not detach


@S3("RetrieveLogProb device, default None")
def test_RetrieveLogProb_device_default_None():
    made = RetrieveLogProb(ref())
    close(RetrieveLogProb(ref(), device="cpu")(spoken())[REF], made(spoken())[REF])


@S3("RetrieveLogProb padding_side: pads the masked rows", part=TORCHRL)
def test_RetrieveLogProb_padding_side():
    made = RetrieveLogProb(ref())
    right = RetrieveLogProb(ref(), padding_side="right")(spoken())[REF]
    close(right, made(spoken())[REF])
    refused(ValueError, "padding_side", RetrieveLogProb, ref(), padding_side="up")


@S3("RetrieveLogProb needs return_log_probs=True and generate=False")
def test_RetrieveLogProb_needs_return_log_probs_True_and_generate():
    silent = copy.copy(ref())
    silent.return_log_probs = False
    for model, word in ((make_wrapper(), "generate=False"), (silent, "return_log_probs=True")):
        refused(ValueError, word, RetrieveLogProb, model)


@S3("RetrieveLogProb forward: writes to next, or to the td without one")
def test_RetrieveLogProb_forward():
    made = RetrieveLogProb(ref())
    out = made(spoken().set("next", spoken()))
    assert (REF in out["next"].keys(True), REF in out.keys(True)) == (True, False)


@S3("RetrieveLogProb note: ragged by default, as_padded_tensor=True pads")
def test_RetrieveLogProb_note():
    right = RetrieveLogProb(ref(), padding_side="right")(spoken())[REF]
    out = RetrieveLogProb(ref(pad_output=False))(spoken())
    assert len({len(row) for row in out.get(REF, as_list=True)}) > 1
    close(out.get(REF, as_padded_tensor=True, padding_side="left"), right)


@S3("RetrieveLogProb.transform_observation_spec adds kl_penalty", part=TORCHRL)
def test_RetrieveLogProb_transform_observation_spec_adds():
    made = RetrieveLogProb(ref())
    spec = made.transform_observation_spec(Composite(shape=(2,)))
    assert (spec[REF].shape, "kl_penalty" in spec) == ((2, -1), False)


@S3("RetrieveLogProb assistant_only=False where the td has a response mask")
def test_RetrieveLogProb_assistant_only_False_where_the_td_has():
    out = RetrieveLogProb(ref(), assistant_only=False)(generated().copy())
    close(out[REF], plain(ref(), generated(), ATTENTION))


@S3("RetrieveLogProb tokenizer, tokenizer_kwargs: what cannot act is refused")
def test_RetrieveLogProb_tokenizer_tokenizer_kwargs():
    for wrong in ({"tokenizer": object()}, {"tokenizer_kwargs": {"nonsense": 1}}):
        with raises((TypeError, ValueError)):
            RetrieveLogProb(ref(), **wrong)(spoken())


@S3("RetrieveLogProb, RetrieveKL tokenizer: the assistant mask where the model gives none")
def test_RetrieveLogProb_RetrieveKL_tokenizer():
    another = copy.deepcopy(make_wrapper().tokenizer)
    more = {"tokenizer": another, "tokenizer_kwargs": {"padding": True}}
    for padded in (True, False):
        models = [make(masks_key=None, pad_output=padded) for make in (gen, ref)]
        out = RetrieveKL(*models, **more)(spoken())
        same_rows(out, REF, plain(ref(), scored(), ASSISTANT))
        same_rows(out, "kl_penalty", plain_kl(scored(), ASSISTANT))


@pytest.mark.gpu
@S3("RetrieveLogProb, RetrieveKL device: cuda, in and back")
def test_RetrieveLogProb_RetrieveKL_device():
    models = [copy.deepcopy(m).cuda() for m in (make_wrapper().model, other_model())]
    out = RetrieveLogProb(ref(model=models[1]), device="cuda")(spoken())
    assert out[REF].device.type == "cpu"
    both = RetrieveKL(gen(model=models[0]), ref(model=models[1]), device="cuda")
    assert both(spoken())["kl_penalty"].device.type == "cpu"


@S3("RetrieveLogProb and RetrieveKL examples (OPT), as printed")
def test_RetrieveLogProb_and_RetrieveKL_examples_OPT_as_printed():
    for stacked in (False, True):  # as the page does, and without it
        with set_list_to_stack(stacked):
            run_page_examples()


def run_page_examples() -> None:
    model, tokenizer = no_template()
    settings = {"input_mode": "history", "generate": False, "return_log_probs": True}
    wrap = partial(TransformersWrapper, model, tokenizer=tokenizer, pad_output=True, **settings)
    ref_model, gen_model = wrap(log_probs_key="ref_log_probs"), wrap(log_probs_key="gen_log_probs")
    said = [("Hello, how are you?", "I'm doing well, thank you!")]
    said.append(("What's the weather like?", "I can't check the weather for you."))
    texts = [{"system": "You are a helpful assistant.", "user": a, "assistant": b} for a, b in said]
    chats = [[{"role": role, "content": t} for role, t in chat.items()] for chat in texts]
    history = History.from_chats(chats)
    assert history.shape == (2, 3)
    transform = RetrieveLogProb(ref_model, assistant_only=True, tokenizer=tokenizer)
    chats = ChatHistory(full=history)
    result = transform(TensorDict(history=chats, batch_size=(2,)))
    assert (result.get((ref_model.log_probs_key, "full")) != 0).any(-1).tolist() == [True] * 2
    transform = RetrieveKL(gen_model, ref_model, assistant_only=True, tokenizer=tokenizer)
    next_td = TensorDict(history=chats, batch_size=(2,))
    data = TensorDict(history=chats, next=next_td, batch_size=(2,))
    kl = transform(data)["next"].get("kl_penalty")
    assert len(kl) == 2
    assert not kl.any()


@S3("KLComputation(gen_log_probs_full_key, ref_log_probs_full_key, *, ...): defaults")
def test_KLComputation_gen_log_probs_full_key():
    keys = """gen_log_probs_full_key=('log_probs', 'full'),
        ref_log_probs_full_key=('ref_log_probs', 'full'), kl_key='kl_penalty',
        add_to_reward=True, coeff=1.0"""
    defaults(KLComputation, f"{keys}, padding_side='left'")


@S3("KLComputation prose: gen_log_probs_full_key is ('gen_log_probs', 'full')", part=TORCHRL)
def test_KLComputation_prose():
    assert KLComputation().gen_log_probs_full_key == FULL


@S3("KLComputation example, as printed", part=TORCHRL)
def test_KLComputation_example_as_printed():
    refused(TypeError, "", KLComputation, gen_log_probs_key=GEN, ref_log_probs_key=REF, coef=1.0)
    td = TensorDict({GEN: torch.randn(2, 10), REF: torch.randn(2, 10)}, batch_size=(2,))
    made = KLComputation(gen_log_probs_full_key=GEN, ref_log_probs_full_key=REF, coeff=1.0)
    assert made(TensorDict(next=td, batch_size=(2,)))["next"].get("kl_penalty").shape == (2, 10)


@S3("KLComputation: kl = gen - ref, in next or in the td without one")
def test_KLComputation():
    a = torch.randn(2, 5)
    b = torch.randn(2, 5)
    close(KLComputation(coeff=7.0)(two(a, b))["next", "kl_penalty"], a - b)
    close(KLComputation()(two(a, b)["next"])["kl_penalty"], a - b)


@S3("KLComputation kl_key")
def test_KLComputation_kl_key():
    a = torch.randn(2, 5)
    b = torch.randn(2, 5)
    assert ("next", "my", "kl") in KLComputation(kl_key=("my", "kl"))(two(a, b)).keys(True)


@S3("KLComputation add_to_reward, coeff: reward - coeff * kl")
def test_KLComputation_add_to_reward_coeff():
    a, b, reward = torch.randn(2, 5), torch.randn(2, 5), torch.randn(2, 5, 1)
    out = KLComputation(coeff=0.3)(two(a, b, reward))["next", "reward"]
    close(out, reward - 0.3 * (a - b).unsqueeze(-1))
    kept = KLComputation(add_to_reward=False)(two(a, b, reward))["next", "reward"]
    assert torch.equal(kept, reward)
    assert "reward" not in KLComputation()(two(a, b))["next"]


@S3("KLComputation padding_side: where a dense reward of ragged rows is padded")
def test_KLComputation_padding_side():
    parts = (torch.zeros(3), torch.zeros(5))
    for side, want in (("left", [0, 0, 1, 1, 1]), ("right", [1, 1, 1, 0, 0])):
        td = two(*(nested(*[p + n for p in parts], layout=torch.jagged) for n in (0, 1)))
        td["next", "reward"] = torch.zeros(2, 5, 1)
        close(KLComputation(padding_side=side)(td)["next", "reward"][0, :, 0], want)


@S3("KLComputation: missing log-probs are a ValueError that names the keys")
def test_KLComputation_ValueError():
    with raises(ValueError, "Log-probs not found", str(FULL), str(REF)):
        KLComputation()(TensorDict(batch_size=[2]))


@S3("KLComputation: other batch sizes or shapes are ValueErrors")
def test_KLComputation_ValueErrors():
    a = torch.randn(2, 5)
    b = torch.randn(2, 5)
    with raises(ValueError, "Batch size mismatch"):
        KLComputation()(TensorDict({FULL: a, "ref_log_probs": {"full": b[:1]}}))
    refused(ValueError, "Sample 0 has different shapes", KLComputation(), two(a, b[:, 1:]))


@S3("KLComputation: the rewards should have one more dimension than the KL")
def test_KLComputation_the_rewards_should_have_one_more_dimension():
    a = torch.randn(2, 5)
    b = torch.randn(2, 5)
    refused(ValueError, "rewards have shape", KLComputation(), two(a, b, a))


@S3("KLComputation: a reward [B, 1] is repeated over the tokens", part=TORCHRL)
def test_KLComputation_a_reward_B_1_is_repeated_over_the_tokens():
    a = torch.randn(2, 5)
    b = torch.randn(2, 5)
    out = KLComputation(coeff=0.0)(two(a, b, torch.tensor([[3.0], [1.0]])))["next", "reward"]
    assert out.shape == (2, 5, 1)
    close(out.sum((1, 2)), [3.0, 1.0])


@S3("KLComputation in_keys, out_keys")
def test_KLComputation_in_keys_out_keys():
    made = KLComputation()
    assert (made.in_keys, made.out_keys) == ([FULL, REF, "reward"], ["kl_penalty", "reward"])
    assert KLComputation(add_to_reward=False).out_keys == ["kl_penalty"]


@S3("KLComputation.transform_observation_spec and transform_reward_spec (..., -1, 1)")
def test_KLComputation_transform_observation_spec():
    env = ChatEnv(Words()).append_transform(KLComputation())
    assert env.full_observation_spec["kl_penalty"].shape == (-1, -1)
    assert env.full_reward_spec["reward"].shape == (-1, -1, 1)


@S3("KLComputation nested: as_nested_tensor(layout=torch.strided)")
def test_KLComputation_nested():
    a, b = torch.randn(3), torch.randn(5)
    out = KLComputation()(two(nested(a, b), nested(a, b), nested(a[:, None], b[:, None])))["next"]
    for key in ("kl_penalty", "reward"):
        assert out[key].layout is torch.strided, out[key].layout


@S3("RetrieveKL(gen_model='from_collector', ref_model=None, *, ...): defaults")
def test_RetrieveKL_gen_model_from_collector_ref_model_None():
    text = """gen_model='from_collector', ref_model=None, gen_model_factory=None,
        ref_model_factory=None, assistant_only=True, history_key='history', tokenizer_kwargs=None,
        detach=True, device=None, tokenizer=None, padding_side='left',
        gen_log_probs_full_key=('log_probs', 'full'),
        ref_log_probs_full_key=('ref_log_probs', 'full'), kl_key='kl_penalty', add_to_reward=True,
        coeff=1.0, use_ray_service=False"""
    defaults(RetrieveKL, text)


@S3("RetrieveKL gen_model, ref_model: their KL, 0 for one model")
def test_RetrieveKL_gen_model_ref_model():
    spoken_kl = plain_kl(scored(), ASSISTANT)
    for padded in (True, False):
        made = RetrieveKL(gen(pad_output=padded), ref(pad_output=padded))
        same_rows(made(spoken()), "kl_penalty", spoken_kl)
    assert not RetrieveKL(gen(), gen(log_probs_key="ref_log_probs"))(spoken())["kl_penalty"].any()


@S3("RetrieveKL is Compose(RetrieveLogProb, RetrieveLogProb, KLComputation)", part=TORCHRL)
def test_RetrieveKL_is_Compose_RetrieveLogProb_RetrieveLogProb():
    made = RetrieveKL(gen(), ref())
    assert isinstance(made, Compose)
    assert [type(part) for part in made] == [RetrieveLogProb, KLComputation]
    assert isinstance(made.generator, RetrieveLogProb)


@S3("RetrieveKL gen_model_factory, ref_model_factory")
def test_RetrieveKL_gen_model_factory_ref_model_factory():
    spoken_kl = plain_kl(scored(), ASSISTANT)
    by_factory = RetrieveKL(gen_model_factory=gen, ref_model_factory=ref)
    close(by_factory(spoken())["kl_penalty"], spoken_kl, 1e-4)


@S3("RetrieveKL: model and factory, or neither, is a ValueError")
def test_RetrieveKL_ValueError():
    for model, name in ((gen, "gen"), (ref, "ref")):
        with raises(ValueError, f"Cannot provide both '{name}_model' and '{name}_model_factory'"):
            RetrieveKL(gen(), ref(), **{f"{name}_model_factory": model})
    for given in ((None, ref()), (gen(), None)):
        refused(ValueError, "", RetrieveKL, *given)


@S3("RetrieveKL assistant_only: True needs histories, False works in any input mode")
def test_RetrieveKL_assistant_only():
    for mode in ("text", "tokens"):
        with raises(ValueError, "input_mode='history'"):
            RetrieveKL(gen(input_mode=mode), ref(input_mode=mode))
    for mode in ("history", "text", "tokens"):
        models = [make(input_mode=mode, pad_output=False) for make in (gen, ref)]
        out = RetrieveKL(*models, assistant_only=False)(spoken(mode))
        same_rows(out, "kl_penalty", plain_kl(scored(), ATTENTION))


@S3("RetrieveKL gen_log_probs_full_key, ref_log_probs_full_key: tuples that end in 'full'")
def test_RetrieveKL_gen_log_probs_full_key_ref_log_probs_full_key():
    keys = {"gen_log_probs_full_key": ("a", "full"), "ref_log_probs_full_key": ("b", "full")}
    out = RetrieveKL(gen(), ref(), **keys)(spoken())
    close(out["a", "full"] - out["b", "full"], out["kl_penalty"])
    for key in ("log_probs", ("log_probs", "response")):
        refused(ValueError, "full", RetrieveKL, ref_model=ref(), gen_log_probs_full_key=key)


@S3("RetrieveKL tokenizer_kwargs: documented defaults")
def test_RetrieveKL_tokenizer_kwargs():
    spoken_kl = plain_kl(scored(), ASSISTANT)
    wanted = {"return_assistant_tokens_mask": True, "tokenize": True, "return_tensors": "pt"}
    wanted |= {"padding": True, "add_generation_prompt": False}
    same_rows(RetrieveKL(gen(), ref(), tokenizer_kwargs=wanted)(spoken()), "kl_penalty", spoken_kl)


@S3("RetrieveKL detach, default True; device")
def test_RetrieveKL_detach_default_True_device():
    for detach in (True, False):
        out = RetrieveKL(gen(), ref(), detach=detach, device="cpu")(spoken())
        assert out["kl_penalty"].requires_grad is not detach


@S3("RetrieveKL padding_side, kl_key, add_to_reward, coeff: KLComputation's")
def test_RetrieveKL_padding_side_kl_key_add_to_reward_coeff():
    given = {"padding_side": "right", "kl_key": "leash", "add_to_reward": False, "coeff": 0.2}
    part = RetrieveKL(gen(), ref(), **given)[1]
    assert {name: getattr(part, name) for name in given} == given


@S3("RetrieveKL writes log-probs of both, the KL and the reward to next")
def test_RetrieveKL_writes_log_probs_of_both_the_KL():
    td = generated().copy().set("next", TensorDict({"reward": torch.ones(3, 1)}, [3]))
    out = RetrieveKL(gen(), ref(), coeff=0.2)(td)["next"]
    assert set(out.keys()) == {"log_probs", "ref_log_probs", "kl_penalty", "reward"}
    close(out["reward"].sum((1, 2)), 1 - 0.2 * out["kl_penalty"].sum(-1))


@S3("RetrieveKL actor_name without Ray, and unknown **kwargs")
def test_RetrieveKL_actor_name_without_Ray_and_unknown_kwargs():
    for wrong, kind in (({"actor_name": "kl"}, ValueError), ({"nonsense": 1}, TypeError)):
        refused(kind, "", RetrieveKL, gen(), ref(), **wrong)


@S3("RetrieveKL: the same pad_output, or ValueError")
def test_RetrieveKL_the_same_pad_output_or_ValueError():
    with raises(ValueError, "pad_output mismatch"):
        RetrieveKL(gen(pad_output=True), ref(pad_output=False))


@S3("RetrieveKL: generate=False, or ValueError")
def test_RetrieveKL_generate_False_or_ValueError():
    for given in ((make_wrapper(), ref()), (gen(), make_wrapper())):
        refused(ValueError, "generate=False", RetrieveKL, *given)


@S3("RetrieveKL: different log_probs_key values, or ValueError")
def test_RetrieveKL_different_log_probs_key_values_or_ValueError():
    with raises(ValueError, "different `log_probs_key`"):
        RetrieveKL(gen(), ref(log_probs_key="gen_log_probs"))


@S3("RetrieveKL in an environment: specs of KL and reward")
def test_RetrieveKL_in_an_environment():
    made = RetrieveKL(gen(), ref())
    env = ChatEnv(Words(), group_size=2).append_transform(made)
    assert env.full_reward_spec["reward"].shape == (-1, -1, 1)
    assert env.full_observation_spec["kl_penalty"].shape == (-1, -1)
    check_env_specs(env, make_wrapper(), data=env_prompts(2))


@S3("RetrieveKL: _reset, _inv_call, transform_{action,state,input,output}_spec")
def test_RetrieveKL():
    made = RetrieveKL(gen(), ref())
    td, spec = spoken(), Composite(shape=(2,))
    assert made._inv_call(td) is td
    assert set(made._reset(td, td).keys()) == {"history"}
    assert made.transform_action_spec(spec) is made.transform_state_spec(spec) is spec
    assert callable(made.transform_input_spec)
    assert callable(made.transform_output_spec)


@S3("container.empty_cache() and self.empty_cache()", no=TORCHRL)
def test_container_empty_cache_and_self_empty_cache():
    made = RetrieveKL(gen(), ref())
    env = ChatEnv(Words(), group_size=2).append_transform(made)
    assert not hasattr(env, "empty_cache")
    assert not hasattr(made, "empty_cache")


@S3("RetrieveKL gen_model='from_collector': the collector's policy, ragged")
def test_RetrieveKL_gen_model_from_collector():
    silent = {"return_log_probs": False}
    charged(RetrieveKL(ref_model=ref(pad_output=False), coeff=0.1), both=True, **silent)


@S3("RetrieveKL gen_model='from_collector' scores the generator", part=TORCHRL)
def test_RetrieveKL_gen_model_from_collector_scores_the_generator():
    td = generated()
    out = RetrieveKL(ref_model=ref(), add_to_reward=False)(td.copy())
    close(out["kl_penalty"], td[FULL] - plain(ref(), td, RESPONSE), 1e-4)


@S3("RetrieveKL 'from_collector': without container or collector a ValueError")
def test_RetrieveKL_from_collector_ValueError():
    silent = {"return_log_probs": False}
    refused(ValueError, "The container is not set", RetrieveKL(ref_model=ref()), spoken())
    env = ChatEnv(Words()).append_transform(RetrieveKL(ref_model=ref()))
    with raises(ValueError, "The collector is not set"):
        env.step(make_wrapper().get_new_version(**silent)(env.reset(env_prompts(1))))
    refused(ValueError, "The collector is not set", lambda: env.full_observation_spec)


@S3("RetrieveKL history_key: where the collector's policy reads")
def test_RetrieveKL_history_key():
    made = RetrieveKL(ref_model=ref(history_key="chat"), history_key="chat", add_to_reward=False)
    env, collector = TransformedEnv(Chat(), made), Collector(make_wrapper())
    env.register_collector(collector)
    kl = env.step(TensorDict(chat=spoken()["history"], batch_size=[3])[:2])["next", "kl_penalty"]
    close(kl, RetrieveKL(gen(), ref())(spoken()[:2])["kl_penalty"])


@S3("in LLMCollector, pad_output=True: RetrieveKL, both forms, and RetrieveLogProb")
def test_in_LLMCollector_pad_output_True_RetrieveKL_RetrieveLogProb():
    for padded in (True, False):
        models = [make(pad_output=padded) for make in (gen, ref)]
        charged(RetrieveKL(ref_model=models[1], coeff=0.1))
        charged(RetrieveKL(*models, coeff=0.1), both=True)
        charged(RetrieveLogProb(models[1]), KLComputation(coeff=0.1))


@S3("RetrieveKL: a policy without log-probs and a reference with the default key")
def test_RetrieveKL_a_policy_without_log_probs_and_a_reference():
    reference = ref(pad_output=False, log_probs_key="log_probs")
    charged(RetrieveKL(ref_model=reference, coeff=0.1), both=True, return_log_probs=False)


@S3("RetrieveKL assistant_only=False where the td has a response mask")
def test_RetrieveKL_assistant_only_False_where_the_td_has():
    td = generated()
    out = RetrieveKL(gen(), ref(), assistant_only=False, add_to_reward=False)(td.copy())
    close(out[FULL], plain(make_wrapper(), td, ATTENTION))
    close(out["kl_penalty"], plain_kl(td, ATTENTION), 1e-4)
