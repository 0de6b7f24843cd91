"""The reward model: a score for each token, the end's where the mask ends, the pairwise loss."""

import pytest
import torch
from checkpoints import make_checkpoint
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from transformers import AutoModel

from policies import GPT2RewardModel


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of a tiny GPT-2 and of a tiny Qwen2."""
    base = tmp_path_factory.mktemp("models")
    return {kind: make_checkpoint(base / kind, kind) for kind in ("gpt2", "qwen2")}


@pytest.mark.parametrize(("kind", "side"), [("gpt2", "right"), ("gpt2", "left"), ("qwen2", "left")])
def test_each_token_gets_the_head_of_its_own_state_however_it_is_padded(folders, kind, side):
    model = GPT2RewardModel(folders[kind])
    end, pad = model.config.eos_token_id, 7
    rows = [[5, end, 9, 11, end], [end, 6, 8], [13]]  # EOS inside, EOS first, EOS last
    ids, mask = torch.full((3, 6), pad), torch.zeros(3, 6, dtype=torch.int64)
    for i, row in enumerate(rows):
        at = slice(len(row)) if side == "right" else slice(6 - len(row), 6)
        ids[i, at], mask[i, at] = torch.tensor(row), 1
    rewards, ends = model(ids, mask)
    assert (rewards.shape, ends.shape) == ((3, 6), (3, 1))
    plain = AutoModel.from_pretrained(folders[kind]).eval()
    for i, row in enumerate(rows):
        hidden = plain(torch.tensor([row])).last_hidden_state[0]
        alone = (hidden * model.lm_head.weight).sum(-1)
        torch.testing.assert_close(rewards[i][mask[i].bool()], alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ends[i, 0], alone[-1], atol=1e-5, rtol=1e-5)


def test_without_a_mask_the_run_of_pad_ids_at_the_end_is_padding(folders):
    ids = torch.tensor([[3, 5, 3, 6, 3, 3], [5, 6, 7, 8, 9, 4]])
    model = GPT2RewardModel(folders["gpt2"], pad_token_id=3)
    real = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(model(ids)[1], model(ids, real)[1])
    body = AutoModel.from_pretrained(folders["qwen2"])
    body.config.pad_token_id, body.config.eos_token_id = None, [4, 5]
    assert GPT2RewardModel(body).pad_token_id == 4  # its first EOS where it has no pad


def batch(ids: list[list[int]], lengths: list[int], rewards: torch.Tensor) -> TensorDict:
    mask = torch.arange(len(ids[0])) < torch.tensor(lengths)[:, None]
    data = {"input_ids": torch.tensor(ids), "attention_mask": mask, "rewards": rewards}
    return TensorDict(data, batch_size=[len(ids)])


CHOSEN = [[1, 2, 3, 4, 0, 0], [1, 2, 0, 0, 0, 0], [5, 6, 7, 0, 0, 0], [1, 2, 3, 0, 0, 0]]
REJECTED = [[1, 2, 9, 0, 0, 0], [1, 2, 3, 4, 5, 6], [5, 6, 7, 0, 0, 0], [1, 2, 3, 0, 0, 0]]
LENGTHS = ([4, 2, 3, 4], [3, 6, 3, 3])  # pair 3 differs by an EOS (id 0) that one of them lacks
COMPARED = [range(2, 4), range(2, 6), range(0), range(3, 4)]  # by hand


def pairs() -> tuple[TensorDict, TensorDict, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    c, r = (torch.randn(4, 6, generator=generator, requires_grad=True) for _ in range(2))
    return batch(CHOSEN, LENGTHS[0], c), batch(REJECTED, LENGTHS[1], r), c, r


def test_the_loss_is_that_of_a_slow_loop_and_so_are_its_gradients():
    chosen, rejected, c, r = pairs()
    loss = GPT2RewardModel.compute_reward_loss(chosen, rejected)
    loss.backward()
    slow = [p.detach().double().requires_grad_() for p in (c, r)]
    each = []
    for i, places in enumerate(COMPARED):
        if len(places):
            gaps = [slow[0][i, t] - slow[1][i, t] for t in places]
            each.append(sum(torch.log1p(torch.exp(-gap)) for gap in gaps) / len(gaps))
    expected = sum(each) / 3
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip((c, r), slow, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=1e-6, rtol=1e-5)


def test_it_is_a_tensordict_module_and_survives_saving(folders, tmp_path):
    model = GPT2RewardModel(folders["gpt2"])
    keys = ["input_ids", "attention_mask"]
    reward = TensorDictModule(model, in_keys=keys, out_keys=["rewards", "end_scores"])
    chosen, rejected, *_ = pairs()
    want = model.compute_reward_loss(chosen, rejected)
    assert torch.equal(reward.compute_reward_loss(chosen, rejected), want)
    model.save_pretrained(tmp_path / "reward")
    again = GPT2RewardModel(tmp_path / "reward")
    ids, mask = chosen["input_ids"], chosen["attention_mask"]
    torch.testing.assert_close(again(ids, mask)[1], reward(chosen)["end_scores"])
