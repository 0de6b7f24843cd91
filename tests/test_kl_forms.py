"""The KL transforms over real wrappers, in every form in which a td holds its rows."""

import warnings

import pytest
import torch
from contracts import make_policy
from tensordict import TensorDict, lazy_stack
from uneven_chats import Uneven, start

from envs import ChatEnv, TransformedEnv
from envs.transforms import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from envs.transforms.ragged import get_values
from policies import ChatHistory, History
from trainer.torchrl.collector import LLMCollector

FULL, REF = ("log_probs", "full"), ("ref_log_probs", "full")
IDS, KL = ("tokens", "full"), "kl_penalty"


def mask_key(name: str) -> tuple[str, str]:
    return ("masks", f"all_{name}_mask")


def other(**changes):
    """Return a scoring wrapper over other weights than the policy's."""
    model = make_policy.__wrapped__()
    with torch.no_grad():
        for weight in model.model.parameters():
            weight.mul_(0.9)
    return model.get_new_version(**{"generate": False, "log_probs_key": "ref", **changes})


def plain(wrapper, ids: torch.Tensor) -> torch.Tensor:
    """Score one row [t] by a plain forward of its model."""
    with torch.no_grad():
        table = wrapper.model(ids[None]).logits[0].float().log_softmax(-1)  # [t, V]
    return torch.cat([torch.zeros(1), table[:-1].gather(-1, ids[1:, None]).squeeze(-1)])


def chats(*, padded: bool) -> TensorDict:
    """Return two chats of unequal lengths with an assistant's turn before the one sampled."""
    history = History.from_chats(
        [
            [{"role": "user", "content": "Sort 2 1"}, {"role": "assistant", "content": "1 2"},
             {"role": "user", "content": "Sort 4 3 again"}],
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"},
             {"role": "user", "content": "Hey"}],
        ]
    )  # fmt: skip
    td = TensorDict(history=ChatHistory(prompt=history, batch_size=[2]), batch_size=[2])
    policy = make_policy()
    version = policy.get_new_version(pad_output=padded, return_log_probs=True, inplace=True)
    td = version(td)
    return td.set("temperature", torch.ones(2)) if "temperature" in td else td


def nested(td: TensorDict, layout: torch.layout) -> TensorDict:
    """Return ragged rows as nested tensors of a layout."""
    keys = [IDS, FULL, *map(mask_key, ("attention", "assistant", "response"))]
    rows = {key: torch.nested.as_nested_tensor(get_values(key, td), layout=layout) for key in keys}
    return TensorDict(rows, batch_size=[2])


FORMS = {
    "dense": lambda: chats(padded=True),
    "lazy stack of padded rows": lambda: chats(padded=True).to_lazystack(0),
    "lazy stack": lambda: lazy_stack(list(chats(padded=False).unbind(0))),
    "lazy containers": lambda: chats(padded=False),
    "strided": lambda: nested(chats(padded=False), torch.strided),
    "jagged": lambda: nested(chats(padded=False), torch.jagged),
}


def real_rows(td: TensorDict, key) -> list[torch.Tensor]:
    """Return the rows at a key without padding; a mask of other lengths is an error."""
    pairs = zip(get_values(key, td), get_values(mask_key("attention"), td), strict=True)
    return [row[mask.bool()] for row, mask in pairs]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("only", [True, False])
def test_a_rollout_is_scored_as_its_ids_lie(form, padded, only):
    """`assistant_only` decides which tokens are; the KL is at those that were sampled."""
    ref, td = other(pad_output=padded), FORMS[form]()
    out = RetrieveKL(ref_model=ref, assistant_only=only, add_to_reward=False)(td.copy())
    ids, marks, sampled, gen = (
        real_rows(td, key) for key in (IDS, mask_key("assistant"), mask_key("response"), FULL)
    )
    want = [plain(ref, row) for row in ids]
    keeps = marks if only else [torch.ones_like(m) for m in marks]
    assert [int(k.sum()) for k in keeps] > [int(s.sum()) for s in sampled]
    for i, keep in enumerate(keeps):
        kept = torch.where(keep.bool(), want[i], 0.0)
        torch.testing.assert_close(real_rows(out, REF)[i], kept, atol=1e-4, rtol=0)
        kl = torch.where(sampled[i].bool(), gen[i] - want[i], 0.0)
        torch.testing.assert_close(real_rows(out, KL)[i], kl, atol=1e-4, rtol=0)
    if form in ("strided", "jagged"):
        assert {out[KL].layout, out[REF].layout} == {getattr(torch, form)}
    if form == "dense":
        assert out[KL].shape == out[IDS].shape


@pytest.mark.parametrize("form", ["dense", "lazy stack"])
def test_scoring_both_models_compares_all_that_both_have(form):
    td = FORMS[form]()
    gen, ref = make_policy().get_new_version(generate=False, log_probs_key="gen"), other()
    padded = form == "dense"
    gen, ref = (m.get_new_version(pad_output=padded) for m in (gen, ref))
    for only in (True, False):
        out = RetrieveKL(gen, ref, assistant_only=only, add_to_reward=False)(td.copy())
        rows = zip(real_rows(td, IDS), real_rows(td, mask_key("assistant")), strict=True)
        for row, (ids, keep) in zip(real_rows(out, KL), rows, strict=True):
            kl = plain(gen, ids) - plain(ref, ids)
            kl = torch.where(keep.bool(), kl, 0.0) if only else kl
            torch.testing.assert_close(row, kl, atol=1e-4, rtol=0)


@pytest.mark.parametrize("padded", [True, False])
def test_histories_are_marked_without_masks_of_the_model(padded):
    """Replies are marked by their structure, also where nobody is told the padding."""
    full = chats(padded=False)["history", "full"]
    td = TensorDict(history=ChatHistory(full=full, batch_size=[2]), batch_size=[2])
    ref = other(pad_output=padded)
    want = get_values(("ref", "full"), RetrieveLogProb(ref)(td.copy()))
    silent = ref.get_new_version(masks_key=None)
    for tokenizer in (None, ref.tokenizer):
        made = RetrieveLogProb(silent, tokenizer=tokenizer, tokenizer_kwargs={"padding": True})
        got = get_values(("ref", "full"), made(td.copy()))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
            assert (a != 0).any()


def test_a_tokenizer_marks_the_replies_and_what_cannot_act_is_refused():
    full = chats(padded=False)["history", "full"]
    td = TensorDict(history=ChatHistory(full=full, batch_size=[2]), batch_size=[2])
    ref = other(pad_output=True)
    want = RetrieveLogProb(ref)(td.copy())["ref", "full"]
    template = {"chat_template": ref.tokenizer.chat_template, "return_tensors": "pt"}
    got = RetrieveLogProb(ref, tokenizer_kwargs=template)(td.copy())["ref", "full"]
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="expected a mask of"):
        RetrieveLogProb(ref, tokenizer_kwargs={"chat_template_name": "qwen"})(td.copy())
    for bad, words in (
        ({"tokenizer_kwargs": {"nonsense": 1}}, "nonsense"),
        ({"tokenizer_kwargs": {"add_generation_prompt": True}}, "add_generation_prompt"),
        ({"tokenizer_kwargs": template, "assistant_only": False}, "assistant_only=True"),
    ):
        with pytest.raises(ValueError, match=words):
            RetrieveLogProb(ref, **bad)
        with pytest.raises(ValueError, match=words):
            RetrieveKL(ref_model=ref, **bad)


def older(ref):
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return [KLRewardTransform(ref.get_new_version(input_mode="tokens"), coef=0.1)]


CHAINS = {
    "from_collector": lambda ref: [RetrieveKL("from_collector", ref, coeff=0.1)],
    "two models": lambda ref: [
        RetrieveKL(
            make_policy().get_new_version(
                generate=False, pad_output=ref.pad_output, log_probs_key="gen"
            ),
            ref,
            coeff=0.1,
        )
    ],
    "parts": lambda ref: [
        RetrieveLogProb(ref, log_probs_full_key=REF),
        KLComputation(coeff=0.1),
    ],
    "older": older,
}
MODES = {
    "turns": {"dialog_turns_per_batch": 6},
    "whole": {"yield_completed_trajectories": True, "dialog_turns_per_batch": 6},
    "last": {"yield_only_last_steps": True, "dialog_turns_per_batch": 3},
}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chain", CHAINS)
def test_every_chain_works_under_a_collector(chain, mode, padded):
    ref = other(pad_output=padded)
    env = ChatEnv(Uneven(), max_turns=3)
    for transform in CHAINS[chain](ref):
        env = env.append_transform(transform)
    data = [start(Uneven())]
    policy = make_policy()
    collector = LLMCollector(env, policy=policy, dataloader=data, **MODES[mode])
    turns = list(next(iter(collector)).reshape(-1).unbind(0))
    assert len({len(turn[IDS]) for turn in turns}) > 1
    for turn in turns:
        ids, keep = turn[IDS], turn[mask_key("response")]
        gen = plain(policy, ids) if chain == "two models" else turn[FULL]
        if chain == "two models":
            keep = turn[mask_key("assistant")]
        kl = torch.where(keep, gen - plain(ref, ids), 0.0)
        torch.testing.assert_close(turn["next", KL].flatten(), kl, atol=1e-4, rtol=0)
        task = torch.zeros_like(kl)
        task[-1] = float(turn["next", "reward_part", "turn"])
        if turn["turn"]:  # what was said before was charged there
            kl = torch.where(turn[mask_key("response")], kl, 0.0)
        charged = turn["next", "reward"].squeeze(-1)
        torch.testing.assert_close(charged, task - 0.1 * kl, atol=1e-4, rtol=0)


def test_a_policy_without_log_probs_and_a_reference_with_the_default_key():
    ref = other(pad_output=True, log_probs_key="log_probs")
    env = TransformedEnv(ChatEnv(Uneven(), max_turns=3), RetrieveKL(ref_model=ref))
    policy = make_policy().get_new_version(return_log_probs=False)
    data = [start(Uneven())]
    batch = next(iter(LLMCollector(env, policy=policy, dataloader=data, dialog_turns_per_batch=3)))
    for turn in batch.reshape(-1).unbind(0):
        kl = plain(policy, turn[IDS]) - plain(ref, turn[IDS])
        kl = torch.where(turn[mask_key("assistant")], kl, 0.0)
        torch.testing.assert_close(turn["next", KL], kl, atol=1e-4, rtol=0)
