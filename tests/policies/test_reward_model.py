"""The reward model: scores of tokens and chats, the pairwise loss, runs that train or ask one."""

import json

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.policies import one_process
from support.runs import train_here
from tensordict import TensorDict
from transformers import AutoModel, AutoModelForSequenceClassification

from envs import ChatEnv
from envs.rewards import Rewarded, RewardModel
from envs.tasks import LearntReward, Preferences, Response, SortDigits
from envs.tasks.task import assistant
from policies import GPT2RewardModel, load_policy
from policies.models.find import find_model, load_tokenizer
from policies.models.reward_model import ChatRewards, Rewards
from trainer import PreferenceObjective, PreferencePairs
from trainer.losses import token_weights


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


CHOSEN = [[1, 2, 3, 4, 0, 0], [1, 2, 0, 0, 0, 0], [5, 6, 7, 0, 0, 0], [1, 2, 3, 0, 0, 0]]
REJECTED = [[1, 2, 9, 0, 0, 0], [1, 2, 3, 4, 5, 6], [5, 6, 7, 0, 0, 0], [1, 2, 3, 0, 0, 0]]
LENGTHS = ([4, 2, 3, 4], [3, 6, 3, 3])  # pair 3 differs by an EOS (id 0) that one of them lacks
COMPARED = [range(2, 4), range(2, 6), range(0), range(3, 4)]  # by hand


def compared() -> list[TensorDict]:
    generator, both = torch.Generator().manual_seed(0), []
    for ids, lengths in zip((CHOSEN, REJECTED), LENGTHS, strict=True):
        rewards = torch.randn(4, 6, generator=generator, requires_grad=True)
        mask = torch.arange(6) < torch.tensor(lengths)[:, None]
        data = {"input_ids": torch.tensor(ids), "attention_mask": mask, "rewards": rewards}
        both.append(TensorDict(data, batch_size=[4]))
    return both


def test_the_loss_is_that_of_a_slow_loop_and_so_are_its_gradients():
    both = compared()
    loss = GPT2RewardModel.compute_reward_loss(*both)
    loss.backward()
    fast = [td["rewards"] for td in both]
    slow = [rewards.detach().double().requires_grad_() for rewards in fast]
    each = []
    for i, places in enumerate(COMPARED):
        if len(places):
            gaps = [slow[0][i, t] - slow[1][i, t] for t in places]
            each.append(sum(torch.log1p(torch.exp(-gap)) for gap in gaps) / len(gaps))
    expected = sum(each) / 3
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=1e-6, rtol=1e-5)


ROW = {"messages": [{"role": "user", "content": "Sort 312"}], "chosen": "123", "rejected": "12"}


def pairs() -> PreferencePairs:
    task = Preferences()
    parts = {"policy": load_policy("tiny"), "runtime": one_process(), "prompts_per_iteration": 8}
    return PreferencePairs(task=task, env=ChatEnv(task), **parts)


def test_a_pair_is_compared_from_where_it_parts_to_the_end_of_the_turn():
    source = pairs()
    decode = source.policy.tokenizer.decode
    batch = source.batch([ROW, {**ROW, "rejected": "321"}])
    ids, attended = batch["tokens", "full"], batch["masks", "all_attention_mask"]
    for i, response in enumerate(("123", "12", "123", "321")):
        text = f"user\nSort 312<|im_end|>\n<|im_start|>assistant\n{response}<|im_end|>"
        assert decode(ids[i][attended[i]]).endswith(text)
    compared = [decode(row[kept]) for row, kept in zip(ids, batch["loss_mask"], strict=True)]
    # The last of "12" is padding: the documented loss runs to the end of the longer response.
    assert compared == ["3<|im_end|>", "<|im_end|><|endoftext|>", "123<|im_end|>", "321<|im_end|>"]
    assert batch["group_id"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("cut", [1, 4])
def test_the_weighted_terms_are_the_documented_loss_in_any_micro_batch(cut):
    batch = pairs()(3)
    mask = batch["loss_mask"]
    rewards = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    mine, theirs = (rewards.clone().requires_grad_() for _ in range(2))
    total = {"total_tokens": float(mask.sum()), "total_rows": float(mask.any(-1).sum())}
    batch["weight"] = token_weights(mask, "sequence_mean", **total)
    objective, loss = PreferenceObjective(), 0.0
    for rows in torch.arange(16).split(16 // cut):
        part = batch.select("weight", "group_id")[rows]
        terms = objective(Rewards(mine[rows]), part)
        loss = loss + (part["weight"] * terms.loss["preference"]).sum()
    loss.backward()
    data = {"input_ids": batch["tokens", "full"], "rewards": theirs}
    data["attention_mask"] = batch["masks", "all_attention_mask"]
    both = TensorDict(data, batch_size=[16])
    expected = GPT2RewardModel.compute_reward_loss(both[0::2], both[1::2])
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine.grad, theirs.grad)
    with pytest.raises(ValueError, match="cuts a pair"):
        objective(Rewards(rewards[1:3]), batch[1:3])


def test_rows_without_a_worse_response_are_an_error(tmp_path):
    rows = [{"question": f"{i}?", "chosen": "a", "rejected": "b"} for i in range(4)]
    rows[3]["rejected"] = None
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="row 3, rejected"):
        Preferences(str(tmp_path / "pairs.jsonl"))


@pytest.mark.runs
def test_rm_tiny_learns_to_prefer(tmp_path):
    train_here(tmp_path, "experiment=rm_tiny", "trainer.num_iterations=60", "tracker=none")
    batch = pairs().batch(list(Preferences().rows("eval")))
    reward = GPT2RewardModel(tmp_path / "model")
    with torch.no_grad():
        ends = reward(batch["tokens", "full"], batch["masks", "all_attention_mask"])[1].squeeze(-1)
    assert (ends[0::2] > ends[1::2]).float().mean() > 0.75  # 0.5 by chance


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a reward model with a random head."""
    place = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(0)
    model = GPT2RewardModel(load_policy("tiny").model)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(place)
    load_tokenizer(find_model("tiny")).save_pretrained(place)
    return place


def end_score(folder, row: dict, response: str, *, complete: bool = True) -> float:
    """Return the reward at the last token of a chat written out, by the model itself."""
    question = row["messages"][0]["content"]
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{response}"
    text += "<|im_end|>" * complete  # a cut one ends with its last token
    ids = load_tokenizer(find_model("tiny"))(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return GPT2RewardModel(folder)(ids)[0][0, -1].item()


def test_a_response_is_scored_at_its_end_against_the_label_within_the_clip(folder):
    task = LearntReward(reward_model=str(folder), score_clip=10.0)
    rows = [*task.rows("eval")[:3], task.rows("eval")[0]]
    said = [("123", True), (rows[1]["answer"], True), ("12 1", False), ("", True)]
    responses = [
        Response(text, ended, [*row["messages"], assistant(text)])
        for row, (text, ended) in zip(rows, said, strict=True)
    ]
    together = task.rewards(rows, responses)
    plain = [end_score(folder, r, t, complete=end) for r, (t, end) in zip(rows, said, strict=True)]
    labels = [end_score(folder, row, row["answer"]) for row in rows]
    assert [r.parts["score"] for r in together] == pytest.approx(plain, abs=1e-4)
    gaps = [score - label for score, label in zip(plain, labels, strict=True)]
    assert [r.total for r in together] == pytest.approx(gaps, abs=1e-4)
    assert [r.success for r in together] == [False, True, False, False]
    small = ChatRewards(folder, limit=50)  # several forwards
    chats = [response.messages for response in responses]
    assert small(chats, [response.complete for response in responses]) == pytest.approx(
        plain, abs=1e-4
    )
    clip = max(map(abs, plain)) / 2
    clipped = [min(max(score, -clip), clip) for score in plain]
    alone = LearntReward(reward_model=str(folder), relative=False, score_clip=clip)
    assert [r.total for r in alone.rewards(rows, responses)] == pytest.approx(clipped, abs=1e-4)
    model = RewardModel(str(folder), weight=2, score_clip=clip)
    own = SortDigits()
    earned = own.rewards(rows, responses)
    got = Rewarded(own, {"model": model}, task_weight=0.5).rewards(rows, responses)
    want = [0.5 * mine.total + 2 * score for mine, score in zip(earned, clipped, strict=True)]
    assert [r.total for r in got] == pytest.approx(want, abs=1e-4), "one of several rewards"


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_classifier_scores_a_chat_as_its_authors_do(folders, tmp_path, kind):
    """They render the chat, encode the text and read the logit of the last token."""
    base = folders["qwen2"] if kind == "qwen2" else make_checkpoint(tmp_path / "base", kind)
    tokenizer = load_tokenizer(find_model(str(base)))
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).eval()
    torch.nn.init.normal_(plain.score.weight)
    for save in (plain.save_pretrained, tokenizer.save_pretrained):
        save(tmp_path / "classifier")
    question = {"role": "user", "content": "What is the capital of France?"}
    chats = [[question, assistant(text)] for text in ("It is Paris.", "It is Paris. " * 9, "")]
    encoded = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
    with torch.no_grad():
        expected = [plain(torch.tensor([ids])).logits.item() for ids in encoded]
    model = RewardModel(str(tmp_path / "classifier"), score_clip=1e3)
    responses = [Response(chat[-1]["content"], True, chat) for chat in chats]
    assert model.scores([{}] * 3, responses) == pytest.approx(expected, abs=1e-4)


def test_a_classifier_without_a_single_score_is_refused(folders, tmp_path):
    plain = AutoModelForSequenceClassification.from_pretrained(folders["qwen2"], num_labels=2)
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="one score"):
        ChatRewards(tmp_path)


def test_a_folder_without_a_reward_model_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"reward_model\.safetensors"):
        LearntReward(reward_model=str(tmp_path))
