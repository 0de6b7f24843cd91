"""The KL transforms beyond their page's statements (tests/specification): sums by hand, plain
forwards, every form in which a td holds its rows, and what is refused where there is no Ray."""

import sys
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.policies import make_wrapper, plain_log_probs
from support.tasks import FEW_SHOT
from support.wrappers import ASSISTANT, ATTENTION, FULL, REF, RESPONSE, gen, ref
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from conf.compose import compose_checked
from envs.torchrl.ragged import get_values
from envs.transforms import (
    KLComputation,
    RayTransform,
    RetrieveKL,
    RetrieveLogProb,
)
from policies import ChatHistory, History

IDS, KL = ("tokens", "full"), "kl_penalty"

# KLComputation, on log-probs of two rows: five tokens, and three behind padding.

KEPT = torch.tensor([[0, 0, 1, 0, 1], [0, 0, 0, 1, 0]]).bool()
DRAW = torch.Generator().manual_seed(0)
BOTH = torch.randn(2, 2, 5, generator=DRAW, dtype=torch.float64)  # generator and reference
BOTH[:, 0, 0] = BOTH[:, 1, :3] = 0  # padding and first tokens have no log-prob


def log_probs(one: Tensor = BOTH[0], two: Tensor = BOTH[1], reward=None, mask=KEPT) -> TensorDict:
    """Return a td with both log-probs and a reward in next, and a response mask at the root."""
    following = {FULL: one, REF: two} | ({} if reward is None else {"reward": reward})
    td = TensorDict({} if mask is None else {RESPONSE: mask}, [2])
    return td.set("next", TensorDict(following, [2]))


@pytest.mark.parametrize("whole", [True, False])
def test_a_token_has_a_kl_where_both_models_have_log_probs(whole):
    one = BOTH[0] if whole else BOTH[0] * KEPT  # a generation scores no prompt
    reward = torch.randn(2, 5, 1).double()
    td = log_probs(one, reward=reward.clone()).set("reward", torch.full((2, 5, 1), 9.0))
    out = KLComputation(coeff=0.5)(td)
    kl = (BOTH[0] - BOTH[1]) * (True if whole else KEPT)
    torch.testing.assert_close(out["next", KL], kl)
    torch.testing.assert_close(out["next", "reward"], reward - 0.5 * kl.unsqueeze(-1))
    assert (out["reward"] == 9).all()  # the root's is the turn's before


@pytest.mark.parametrize("shape", [(2, 1), (2, 1, 1)])
@pytest.mark.parametrize(
    ("one", "mask", "last"),
    [(BOTH[0], KEPT, [4, 3]), (BOTH[0], None, [4, 4]), (0 * BOTH[0], None, [4, 4])],
)
def test_one_reward_per_row_is_paid_at_the_last_kept_token(shape, one, mask, last):
    reward = torch.tensor([3.0, -1.0]).double()
    two = BOTH[1] if one.any() else one
    out = KLComputation(coeff=0.1)(log_probs(one, two, reward.reshape(shape), mask))["next"]
    task = out["reward"].squeeze(-1) + 0.1 * out[KL]
    want = torch.zeros(2, 5).double()
    want[[0, 1], last] = reward
    torch.testing.assert_close(task, want)


@given(st.lists(st.integers(2, 5), min_size=2, max_size=3), st.booleans())
def test_rows_of_other_lengths_are_charged_as_each_alone(lengths, per_token):
    rows = []
    for n in lengths:
        one, two = torch.randn(2, n, generator=DRAW).double()
        reward = torch.randn(*((n, 1) if per_token else (1,)), generator=DRAW).double()
        mask = torch.rand(n, generator=DRAW) < 0.5
        rows.append({FULL: one, REF: two, RESPONSE: mask, "reward": reward})
    out = KLComputation(coeff=0.3)(lazy_stack([TensorDict(row) for row in rows]))
    for i, row in enumerate(rows):
        alone = KLComputation(coeff=0.3)(TensorDict({k: v[None] for k, v in row.items()}, [1]))
        for key in (KL, "reward"):
            torch.testing.assert_close(get_values(key, out)[i], alone[key][0])


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("mask", lambda: KLComputation()(log_probs(mask=KEPT[:, 1:]))),
        ("different keys", lambda: RetrieveKL(gen(), ref(), ref_log_probs_full_key=FULL)),
        ("found", lambda: RetrieveLogProb(ref())(TensorDict({IDS: torch.ones(2, 3).long()}, [2]))),
    ],
)
def test_what_cannot_be_compared_is_refused(words, make):
    with pytest.raises(ValueError, match=words):
        make()


# Over real wrappers, in every form in which a td holds its rows.


def chats(*, padded: bool) -> TensorDict:
    """Return two chats of unequal lengths with an assistant's turn before the one sampled."""
    short = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
    history = ChatHistory(prompt=History.from_chats([FEW_SHOT, short]), batch_size=[2])
    version = make_wrapper().get_new_version(pad_output=padded, return_log_probs=True, inplace=True)
    return version(TensorDict(history=history, batch_size=[2]))


FORMS = {
    "dense": lambda: chats(padded=True),
    "lazy stack of padded rows": lambda: chats(padded=True).to_lazystack(0),
    "lazy stack": lambda: lazy_stack(list(chats(padded=False).unbind(0))),
    "lazy containers": lambda: chats(padded=False),
}


def real_rows(td: TensorDict, key) -> list[Tensor]:
    """Return the rows at a key without padding; a mask of other lengths is an error."""
    pairs = zip(get_values(key, td), get_values(ATTENTION, td), strict=True)
    return [row[mask.bool()] for row, mask in pairs]


near = partial(torch.testing.assert_close, atol=1e-4, rtol=0, check_dtype=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("only", [True, False])
def test_a_rollout_is_scored_as_its_ids_lie(form, padded, only):
    """`assistant_only` decides which tokens are; the KL is at those that were sampled."""
    model, td = ref(pad_output=padded), FORMS[form]()
    out = RetrieveKL(ref_model=model, assistant_only=only, add_to_reward=False)(td.copy())
    keys = (IDS, ASSISTANT, RESPONSE, FULL, REF, KL)
    columns = [real_rows(td if key in td.keys(True) else out, key) for key in keys]
    for ids, marks, sampled, before, scored, kl in zip(*columns, strict=True):
        plain = plain_log_probs(model, ids, 1.0)
        keep = marks if only else torch.ones_like(marks)
        near(scored, plain * keep)
        near(kl, (before - plain) * sampled)
    if form == "dense":
        assert out[KL].shape == out[IDS].shape


def test_without_an_assistant_mask_the_sampled_tokens_are_the_assistants():
    td = chats(padded=True).exclude("history", ASSISTANT)
    out = RetrieveLogProb(ref())(td.copy())
    for i, keep in enumerate(td[RESPONSE]):
        real = td[ATTENTION][i]
        near(out[REF][i][real], plain_log_probs(ref(), td[IDS][i][real], 1.0) * keep[real])


@pytest.mark.parametrize("name", ["RetrieveKL", "KLRewardTransform"])
@pytest.mark.parametrize("inside", ["", ".tools.inside"])
def test_a_run_refuses_a_kl_transform_and_names_its_keys(name, inside):
    target = f"env.transforms.leash{inside}._target_=envs.transforms.{name}"
    outer = ["env.transforms.leash._target_=envs.transforms.Compose"] if inside else []
    with pytest.raises(ValueError, match=rf"{name}.*kl\.coeff"):
        compose_checked(["experiment=grpo_tiny", *outer, target])


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"\.\[ray\]"):
        RayTransform(RetrieveKL)
