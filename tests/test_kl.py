"""The KL transforms, on a tiny language model that really scores; tests/test_ray.py has Ray."""

import gc
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from kl_cases import (
    ASSISTANT,
    ATTENTION,
    FULL,
    REF,
    RESPONSE,
    Chat,
    Collector,
    Shorter,
    T,
    TinyPolicy,
    Turns,
    dense,
    mask,
    ragged,
    slow_scores,
)
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from conf.compose import compose_checked
from envs.env import TransformedEnv
from envs.transforms import (
    Compose,
    KLComputation,
    KLRewardTransform,
    RayKLRewardTransform,
    RayRetrieveKL,
    RayTransform,
    RetrieveKL,
    RetrieveLogProb,
)
from envs.transforms.ragged import get_values

# RetrieveLogProb.


@pytest.mark.parametrize(
    ("response", "assistant_only", "keep"),
    [
        (True, True, ASSISTANT),
        (True, False, ATTENTION),
        (False, True, ASSISTANT),
        (False, False, ATTENTION),
    ],
)
def test_kept_tokens_are_scored_and_the_rest_is_zero(response, assistant_only, keep):
    model = TinyPolicy(mode="history" if assistant_only else "tokens")
    td = dense(response=response)
    before = td.clone()
    out = RetrieveLogProb(model, assistant_only=assistant_only)(td)
    assert torch.allclose(out["next", *FULL], slow_scores(model, keep))
    assert set(out["next"].keys(True, True)) == {FULL}
    assert (out.exclude("next") == before.exclude("next")).all()


def test_the_root_is_written_when_there_is_no_next():
    model = TinyPolicy(key="ref_log_probs")
    out = RetrieveLogProb(model, assistant_only=False)(dense(nxt=False))
    assert torch.allclose(out[REF], slow_scores(model, ATTENTION))


def test_without_an_assistant_mask_the_sampled_tokens_are_the_assistants():
    model = TinyPolicy(mode="history")
    out = RetrieveLogProb(model)(dense(assistant=False))
    assert torch.allclose(out["next", *FULL], slow_scores(model, RESPONSE))


def test_the_key_may_be_chosen():
    out = RetrieveLogProb(TinyPolicy(), log_probs_full_key=REF, assistant_only=False)(dense())
    assert set(out["next"].keys(True, True)) == {REF}
    with pytest.warns(UserWarning, match="log_probs_full_key"):
        out = RetrieveLogProb(TinyPolicy(), log_probs_full_key="ref", assistant_only=False)(dense())
    assert out["next", "ref"].shape == (2, T)


def test_detach_cuts_the_graph():
    td = RetrieveLogProb(TinyPolicy(), assistant_only=False)(dense())
    assert not td["next", *FULL].requires_grad
    td = RetrieveLogProb(TinyPolicy(), assistant_only=False, detach=False)(dense())
    assert td["next", *FULL].requires_grad


class Elsewhere(TinyPolicy):
    """A model that has the ids by itself."""

    def forward(self, td):
        scored = super().forward(ragged())
        return td.set(self.log_probs_key, scored[self.log_probs_key])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side_pads_the_rows_of_a_padding_model(side):
    model = Elsewhere(padded=True)  # told to pad, but it returns rows; nobody else has ids
    out = RetrieveLogProb(model, assistant_only=False, padding_side=side)(
        TensorDict(batch_size=[2])
    )
    want = slow_scores(model, ATTENTION)
    if side == "right":
        want[1] = want[1].roll(-2)
    assert torch.allclose(out[FULL], want)


def test_an_assistant_mask_is_rendered_where_nobody_gives_one():
    model = TinyPolicy(mode="history", padded=False)
    td = ragged().exclude(("masks", "all_response_mask"))
    for row, text in zip(td.tensordicts, ["ab>def", "a>bc"], strict=True):
        row.set(("history", "full"), Turns(text=text, batch_size=[]))
    td = TensorDict(
        {
            "tokens": lazy_stack([r["tokens"] for r in td.tensordicts]),
            "history": {"full": Turns(text=["ab>def", "a>bc"], batch_size=[2])},
        },
        [2],
    )
    keep = mask("000111", "000011")
    out = RetrieveLogProb(model)(td)
    want = slow_scores(model, keep)
    for row, w, m in zip(get_values(FULL, out), want, ATTENTION, strict=True):
        assert torch.allclose(row, w[m])
    with pytest.raises(ValueError, match=r"expected a mask of \[6, 4\] tokens a row, got \[5, 3\]"):
        RetrieveLogProb(model, tokenizer=Shorter())(td)


def test_wrong_models_and_inputs_are_value_errors():
    with pytest.raises(ValueError, match="`generate=False`"):
        RetrieveLogProb(TinyPolicy(generate=True), assistant_only=False)
    with pytest.raises(ValueError, match="`input_mode='history'` when `assistant_only=True`"):
        RetrieveLogProb(TinyPolicy())
    silent = TinyPolicy()
    silent.return_log_probs = False
    with pytest.raises(ValueError, match="`return_log_probs=True`"):
        RetrieveLogProb(silent, assistant_only=False)
    with pytest.raises(ValueError, match="padding_side"):
        RetrieveLogProb(TinyPolicy(), assistant_only=False, padding_side="up")
    with pytest.raises(ValueError, match="found neither"):
        RetrieveLogProb(TinyPolicy(mode="history"))(dense(response=False, assistant=False))


class Watched(TinyPolicy):
    def forward(self, td):
        self.seen = td.device, td["tokens", "full"].device
        return super().forward(td)


def test_the_model_sees_its_device_and_the_caller_keeps_theirs():
    model = Watched()
    td = dense()
    out = RetrieveLogProb(model, assistant_only=False, device="cpu")(td)
    assert model.seen[0] == torch.device("cpu")
    assert out.device is None
    assert torch.allclose(out["next", *FULL], slow_scores(model, ATTENTION))


@pytest.mark.gpu
def test_results_come_back_from_another_device():
    model = Watched()
    want = slow_scores(model, ATTENTION)
    model = model.to("cuda")
    model.score = lambda ids: TinyPolicy.score(model.cpu(), ids.cpu()).cuda()
    out = RetrieveLogProb(model, assistant_only=False, device="cuda")(dense())
    assert model.seen[1].type == "cuda"
    assert out["next", *FULL].device.type == "cpu"
    assert torch.allclose(out["next", *FULL], want)


# KLComputation.


def pair(keep=RESPONSE):
    return slow_scores(TinyPolicy(0), keep), slow_scores(TinyPolicy(1), keep)


@pytest.mark.parametrize("where", ["next", "root", "no next"])
def test_kl_penalty_is_gen_minus_ref_unscaled(where):
    gen, ref = pair(ATTENTION)[0] * RESPONSE, pair(ATTENTION)[1]
    td = dense(nxt=where != "no next")
    target = td["next"] if where != "no next" else td
    target.set(REF, ref)
    (target if where == "next" else td).set(FULL, gen)
    out = KLComputation(coeff=7.0)(td)
    out = out if where == "no next" else out["next"]
    assert torch.equal(out["kl_penalty"], (gen - ref) * RESPONSE)
    assert "reward" not in out  # a missing reward is skipped


def test_the_reward_of_next_is_what_is_charged():
    gen, ref = pair()
    reward = torch.randn(2, T, 1).double()
    td = dense(reward=torch.full((2, T, 1), 9.0))
    td["next"].update(TensorDict({FULL: gen, REF: ref, "reward": reward}, [2]))
    out = KLComputation(coeff=0.5)(td)
    want = [[reward[b, t, 0] - 0.5 * (gen - ref)[b, t] for t in range(T)] for b in range(2)]
    assert torch.allclose(out["next", "reward"].squeeze(-1), torch.tensor(want).double())
    assert (out["reward"] == 9).all()
    off = KLComputation(add_to_reward=False)(td.set(("next", "reward"), reward))
    assert torch.equal(off["next", "reward"], reward)


@pytest.mark.parametrize("shape", [(2, 1), (2, 1, 1)])
def test_one_reward_per_row_lands_on_the_last_kept_token(shape):
    gen, ref = pair()
    td = dense()
    reward = torch.tensor([3.0, -1.0]).double()
    td["next"].update(TensorDict({FULL: gen, REF: ref, "reward": reward.reshape(shape)}, [2]))
    out = KLComputation(coeff=0.1)(td)["next", "reward"].squeeze(-1)
    place = torch.zeros(2, T).double()
    place[0, 5], place[1, 4] = 3.0, -1.0
    assert torch.allclose(out, place - 0.1 * (gen - ref))
    assert torch.allclose(out.sum(-1), reward - 0.1 * (gen - ref).sum(-1))


def test_without_any_mask_the_last_scored_token_gets_the_reward():
    gen, ref = pair()
    td = TensorDict({FULL: gen, REF: ref, "reward": torch.ones(2, 1).double()}, [2])
    out = KLComputation(coeff=0.0)(td)["reward"].squeeze(-1)
    assert out.nonzero().tolist() == [[0, 5], [1, 4]]
    empty = TensorDict({FULL: 0 * gen, REF: 0 * ref, "reward": torch.ones(2, 1).double()}, [2])
    assert KLComputation()(empty)["reward"].squeeze(-1).nonzero().tolist() == [[0, 5], [1, 5]]


def rows_of(values: Tensor) -> list[Tensor]:
    return [v[m] for v, m in zip(values, ATTENTION, strict=True)]


@pytest.mark.parametrize("holder", ["lazy td", "lazy containers"])
@pytest.mark.parametrize("scalar", [True, False])
def test_ragged_kl_equals_the_dense_one(holder, scalar):
    gen, ref = pair(ATTENTION)
    reward = torch.tensor([[3.0], [-1.0]]).double() if scalar else torch.randn(2, T, 1).double()
    td = dense()
    td["next"].update(TensorDict({FULL: gen, REF: ref, "reward": reward}, [2]))
    want = KLComputation(coeff=0.3)(td)["next"]
    rewards = list(reward) if scalar else rows_of(reward)
    if holder == "lazy td":
        other = ragged()
        for row, g, r, w in zip(
            other.tensordicts, rows_of(gen), rows_of(ref), rewards, strict=True
        ):
            row["next"].update(TensorDict({FULL: g, REF: r, "reward": w}))
    else:
        other = TensorDict(
            {
                "log_probs": lazy_stack([TensorDict(full=g) for g in rows_of(gen)]),
                "ref_log_probs": lazy_stack([TensorDict(full=r) for r in rows_of(ref)]),
                "masks": lazy_stack([TensorDict(all_response_mask=m) for m in rows_of(RESPONSE)]),
            },
            [2],
        )
        if scalar:
            other.set("reward", reward)
        else:
            other.set("reward", torch.nested.as_nested_tensor(rewards, layout=torch.jagged))
    out = KLComputation(coeff=0.3)(other)
    out = out["next"] if holder == "lazy td" else out
    for key in ("kl_penalty", "reward"):
        for i, row in enumerate(get_values(key, out)):
            assert torch.allclose(row, want[key][i][ATTENTION[i]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side_places_ragged_kl_in_a_padded_reward(side):
    gen, ref = pair(ATTENTION)
    td = TensorDict(
        {
            "log_probs": lazy_stack([TensorDict(full=g) for g in rows_of(gen)]),
            "ref_log_probs": lazy_stack([TensorDict(full=r) for r in rows_of(ref)]),
            "reward": torch.zeros(2, T, 1).double(),
        },
        [2],
    )
    out = KLComputation(padding_side=side)(td)["reward"].squeeze(-1)
    want = ref - gen
    if side == "right":
        want[1] = want[1].roll(-2)
    assert torch.allclose(out, want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_ragged_row_without_a_kept_token_is_paid_at_its_last_token(side):
    lps = [torch.randn(2).double(), torch.randn(4).double()]
    rows = [
        TensorDict(
            {FULL: lp, REF: lp, "reward": torch.ones(1).double()}
            | {("masks", "all_response_mask"): torch.zeros(len(lp), dtype=torch.bool)}
        )
        for lp in lps
    ]
    out = KLComputation(padding_side=side)(lazy_stack(rows))
    paid = [row.squeeze(-1).tolist() for row in get_values("reward", out)]
    assert paid == [[0, 1], [0, 0, 0, 1]]


def test_kl_errors_name_what_is_wrong():
    gen, ref = pair()
    kl = KLComputation()
    with pytest.raises(ValueError, match=r"Expected keys: \('log_probs', 'full'\), \('ref_log_pr"):
        kl(dense())
    td = TensorDict({FULL: gen, REF: ref[:, :4]}, [2])
    with pytest.raises(ValueError, match=r"different shapes.*\(6,\).*\(4,\)"):
        kl(td)
    td = TensorDict({FULL: gen, "ref_log_probs": {"full": ref[:1]}}, [])
    with pytest.raises(ValueError, match="Batch size mismatch"):
        kl(td)
    for shape in [(2,), (2, T), (2, T, 1, 1), (2, 4, 1)]:
        td = TensorDict({FULL: gen, REF: ref, "reward": torch.zeros(shape)}, [2])
        with pytest.raises(ValueError, match=r"expected one reward per token, \(2, 6, 1\)"):
            kl(td)
    td = TensorDict({FULL: gen, REF: ref, ("masks", "all_response_mask"): RESPONSE[:, 1:]}, [2])
    with pytest.raises(ValueError, match=r"has different shapes: .*mask"):
        kl(td)


@pytest.mark.usefixtures("list_setting")
def test_the_documented_kl_example_runs_on_dense_data():
    gen, ref, reward = torch.randn(2, 10), torch.randn(2, 10), torch.randn(2, 10, 1)
    key = ("gen_log_probs", "full")
    next_td = TensorDict({key: gen, REF: ref, "reward": reward}, batch_size=(2,))
    out = KLComputation(
        gen_log_probs_full_key=key, ref_log_probs_full_key=REF, kl_key="kl_penalty", coeff=1.0
    )(TensorDict(next=next_td, batch_size=(2,)))
    assert torch.equal(out["next"].get("kl_penalty"), gen - ref)
    torch.testing.assert_close(out["next", "reward"][..., 0], reward[..., 0] - gen + ref)


# RetrieveKL.


def models(**kwargs):
    return TinyPolicy(0, key="gen_log_probs", **kwargs), TinyPolicy(
        1, key="ref_log_probs", **kwargs
    )


@pytest.mark.parametrize("factories", [True, False])
def test_both_models_are_scored(factories):
    gen, ref = models()
    args = {"assistant_only": False, "coeff": 0.2}
    if factories:
        made = {"gen_model_factory": lambda: gen, "ref_model_factory": lambda: ref}
        transform = RetrieveKL(**made, **args)
    else:
        transform = RetrieveKL(gen, ref, **args)
    td = dense()
    td["next"].set("reward", torch.ones(2, 1).double())
    out = transform(td)["next"]
    g, r = slow_scores(gen, ATTENTION), slow_scores(ref, ATTENTION)
    assert torch.allclose(out[FULL], g)
    assert torch.allclose(out[REF], r)
    assert torch.allclose(out["kl_penalty"], g - r)
    assert torch.allclose(out["reward"].sum((1, 2)), 1 - 0.2 * (g - r).sum(-1))


def test_log_probs_of_the_generation_are_used_and_the_generator_is_not_scored():
    ref = TinyPolicy(1, key="ref_log_probs")
    given = torch.randn(2, T).double() * RESPONSE
    out = RetrieveKL(ref_model=ref, assistant_only=False)(dense().set(FULL, given))
    assert torch.equal(out["next", *FULL], given)
    assert torch.allclose(out["next", *REF], slow_scores(ref, ATTENTION))
    assert torch.allclose(out["next", "kl_penalty"], given - slow_scores(ref, RESPONSE))
    assert ref.calls == 1


def test_a_given_generator_is_scored_even_where_log_probs_are():
    gen, ref = models()
    td = dense().set(FULL, torch.full((2, T), -9.0).double())
    out = RetrieveKL(gen, ref, assistant_only=False)(td)
    assert torch.allclose(out["next", *FULL], slow_scores(gen, ATTENTION))
    want = slow_scores(gen, ATTENTION) - slow_scores(ref, ATTENTION)
    assert torch.allclose(out["next", "kl_penalty"], want)


def test_the_collectors_policy_is_asked_only_when_log_probs_are_missing():
    ref = TinyPolicy(1, key="ref_log_probs")
    transform = RetrieveKL(ref_model=ref, assistant_only=False, coeff=0.1)
    env = TransformedEnv(Chat(), Compose(transform))
    assert env.reset(dense(nxt=False)).keys() == dense(nxt=False).keys()
    given = torch.randn(2, T).double() * RESPONSE
    env.step(dense(nxt=False).set(FULL, given))  # needs no collector
    with pytest.raises(ValueError, match="The collector is not set"):
        env.step(dense(nxt=False))
    collector = Collector(TinyPolicy(0))
    env.register_collector(collector)
    for _ in range(2):
        out = env.step(dense(nxt=False))
        want = slow_scores(TinyPolicy(0), ATTENTION) - slow_scores(ref, ATTENTION)
        assert torch.allclose(out["next", "kl_penalty"], want)
        assert torch.allclose(out["next", "reward"].sum((1, 2)), 1 - 0.1 * want.sum(-1))
    assert collector.policy.asked == {
        "generate": False,
        "return_log_probs": True,
        "log_probs_key": "log_probs",
        "input_mode": "tokens",
        "input_key": ("tokens", "full"),
        "pad_output": True,
    }
    out = env.step(dense(nxt=False).set(FULL, given))  # still not scored when given
    assert torch.equal(out["next", *FULL], given)


def test_history_key_is_where_the_collectors_policy_reads():
    ref = TinyPolicy(1, key="ref_log_probs", mode="history")
    env = TransformedEnv(Chat(), RetrieveKL(ref_model=ref, history_key="chat"))
    collector = Collector(TinyPolicy(0))
    env.register_collector(collector)
    env.step(dense(nxt=False))
    assert collector.policy.asked["input_key"] == ("chat", "full")


def test_a_collector_that_is_gone_and_a_missing_container_are_value_errors():
    transform = RetrieveKL(ref_model=TinyPolicy(1, key="ref_log_probs"), assistant_only=False)
    with pytest.raises(ValueError, match="The container is not set"):
        transform(dense())
    env = TransformedEnv(Chat(), transform)
    env.register_collector(Collector(TinyPolicy(0)))
    gc.collect()
    with pytest.raises(ValueError, match="The collector is not set"):
        env.step(dense(nxt=False))


def test_retrieve_kl_refuses_what_cannot_work():
    gen, ref = models()
    args = {"assistant_only": False}
    with pytest.raises(ValueError, match="Cannot provide both"):
        RetrieveKL(gen, ref, gen_model_factory=lambda: gen, **args)
    with pytest.raises(ValueError, match="exactly one of"):
        RetrieveKL(gen, **args)
    with pytest.raises(ValueError, match="different `log_probs_key`"):
        RetrieveKL(TinyPolicy(0), TinyPolicy(1), **args)
    with pytest.raises(ValueError, match="expected gen_model to be a wrapper, got 'from_colector'"):
        RetrieveKL("from_colector", ref)
    with pytest.raises(ValueError, match="pad_output mismatch"):
        RetrieveKL(gen, TinyPolicy(1, key="ref_log_probs", padded=False), **args)
    with pytest.raises(ValueError, match="`generate=False`"):
        RetrieveKL(TinyPolicy(generate=True), ref, **args)
    with pytest.raises(ValueError, match="different keys"):
        RetrieveKL(gen, ref, ref_log_probs_full_key=FULL, **args)
    with pytest.raises(ValueError, match="expected a log-probs key"):
        RetrieveKL(gen, ref, gen_log_probs_full_key="log_probs", **args)


def test_equal_models_have_no_kl_and_the_whole_td_is_otherwise_untouched():
    gen, ref = TinyPolicy(0, key="gen_log_probs"), TinyPolicy(0, key="ref_log_probs")
    td = dense()
    keys = set(td.keys(True, True))
    out = RetrieveKL(gen, ref, assistant_only=False)(td)
    assert (out["next", "kl_penalty"] == 0).all()
    new = {("next", "kl_penalty"), ("next", *FULL), ("next", *REF)}
    assert set(out.keys(True, True)) == keys | new


@pytest.mark.parametrize("name", ["RetrieveKL", "KLRewardTransform"])
@pytest.mark.parametrize("nested", ["", ".tools.inside"])
def test_a_kl_transform_of_a_run_is_refused_in_one_line_that_names_the_keys(name, nested):
    given = f"env.transforms.leash{nested}._target_=envs.transforms.{name}"
    outer = ["env.transforms.leash._target_=envs.transforms.Compose"] if nested else []
    with pytest.raises(ValueError, match=rf"{name}: a run .* by kl.coeff, kl.where") as told:
        compose_checked(["experiment=grpo_tiny", *outer, given])
    assert "\n" not in str(told.value)


# Ray, where there is none.


USE = """
from envs.transforms import RetrieveKL
from kl_cases import TinyPolicy, dense
RetrieveKL(TinyPolicy(0), TinyPolicy(1, key="ref_log_probs"), assistant_only=False)(dense())
print(sorted(name for name in sys.modules if name.startswith(("ray", "envs.transforms.ray"))))
"""


def test_a_use_without_ray_imports_nothing_of_it():
    tests = Path(__file__).parent
    code = f"import sys; sys.path[:0] = {[str(tests), str(tests.parent)]}\n{USE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.filterwarnings("ignore:.*KLRewardTransform is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (partial(RayRetrieveKL, None, 1), ValueError, "exactly one of 'gen_model'"),
        (partial(RayRetrieveKL, 1, 1, gen_model_factory=dense), ValueError, "provide both 'gen_"),
        (partial(RayRetrieveKL, 1, 1, detach=False), ValueError, "no gradient crosses Ray"),
        (partial(RayKLRewardTransform, 1, 2), TypeError, r"RetrieveKL\(gen_model, ref_model\)"),
        (partial(RetrieveKL, 1, 1, actor_name="kl"), ValueError, "actor_name: expected use_ray"),
        (partial(KLRewardTransform, 1, num_gpus=1), ValueError, "num_gpus: expected use_ray"),
        (partial(RetrieveKL, use_ray_service=True), ValueError, "exactly one of 'ref_model'"),
        (partial(RayTransform, dense), ImportError, r"pip install -e '\.\[ray\]'"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_ray_is_asked(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_subclass_is_not_silently_replaced():
    class Mine(RetrieveKL):
        pass

    with pytest.raises(TypeError, match=r"Mine has no Ray version; use RayTransform\(Mine\)"):
        Mine(use_ray_service=True)


@pytest.mark.usefixtures("no_ray")
def test_the_older_reward_is_deprecated_on_ray_too():
    with (
        pytest.warns(DeprecationWarning, match="use RayRetrieveKL"),
        pytest.raises(ImportError, match=r"\.\[ray\]"),
    ):
        KLRewardTransform(1, use_ray_service=True)
