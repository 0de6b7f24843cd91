"""RolloutFromModel: the documented rollout, the score paid once, exact log-probs and masks."""

import json

import pytest
import torch
from checkpoints import make_checkpoint
from datasets import Dataset, DatasetDict
from tensordict.nn import TensorDictModule
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2LMHeadModel,
)

from policies import GPT2RewardModel
from trainer import (
    AdaptiveKLController,
    KLControllerBase,
    PromptData,
    RolloutFromModel,
    get_dataloader,
)

KINDS = ("gpt2", "qwen2")
N = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {kind: make_checkpoint(base / kind, kind) for kind in KINDS}


def write(path, count: int = 6):
    rows = (
        {"prompt": f"What is the capital of {'France ' * (i % 3)}?", "label": f" It is {i}."}
        for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Parts:
    """Two different models, a reward model, and prompts full of the ids that end a reply."""

    def __init__(self, folder, ends: int = 40, **options) -> None:
        torch.manual_seed(17)  # not that of the checkpoints: ref is another model
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.model.generation_config.eos_token_id = list(range(ends))
        self.ref = AutoModelForCausalLM.from_config(self.model.config)
        self.reward = GPT2RewardModel(folder)
        options = {"max_new_tokens": N, **options}
        self.roll = RolloutFromModel(self.model, self.ref, self.reward, **options)
        prompts = [[3, 50, 4], [3], [60, 0, 0, 70, 9], [80, 81], *[[5, 90 + i] for i in range(8)]]
        labels = [[5, 61], [62, 63, 1], [], [64, 0, 0], *[[7, 100 + i] for i in range(8)]]
        ids, mask = torch.zeros(12, 9, dtype=torch.int64), torch.zeros(12, 9, dtype=torch.bool)
        for i, row in enumerate(p + q for p, q in zip(prompts, labels, strict=True)):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), True
        self.prompts, self.labels = prompts, labels
        rindex = torch.tensor([len(p) - 1 for p in prompts])
        self.batch = PromptData(
            input_ids=ids, attention_mask=mask, prompt_rindex=rindex, batch_size=[12]
        )

    def end_score(self, row: list[int]) -> float:
        ids = torch.tensor([row])
        return self.reward(ids, torch.ones_like(ids))[1].item()

    def replies(self, td) -> list[list[int]]:
        """Return each row's reply up to and with its first end."""
        out = []
        for row in td["action"].tolist():
            ends = [t for t, token in enumerate(row) if token in self.roll.eos_token_ids]
            out.append(row[: ends[0] + 1] if ends else row)
        return out


@pytest.fixture(params=KINDS)
def parts(folders, request) -> Parts:
    return Parts(folders[request.param])


def log_probs(model, prompt: list[int], reply: list[int], temperature: float = 1.0):
    """Return the log-probs of a reply by a plain forward of this one sequence."""
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    every = (logits.double() / temperature).log_softmax(-1)
    return torch.stack([row[token] for row, token in zip(every, reply, strict=True)])


@pytest.mark.usefixtures("list_setting")
def test_the_documented_example_gives_the_printed_keys_shapes_and_types(folders, tmp_path):
    dl = get_dataloader(
        batch_size=4,
        block_size=100,
        tensorclass_type=PromptData,
        device="cpu",
        dataset_name=str(write(tmp_path / "tldr.jsonl")),
        tokenizer=folders["gpt2"],
    )
    model = GPT2LMHeadModel.from_pretrained(folders["gpt2"])
    ref_model = GPT2LMHeadModel(model.config)
    reward_model = GPT2RewardModel(model_path=folders["gpt2"])
    rollout_from_model = RolloutFromModel(model, ref_model, reward_model)
    rollout = rollout_from_model.rollout_from_data(next(dl))
    found = {
        key: (tuple(value.shape), value.dtype)
        for key, value in rollout.items(include_nested=True, leaves_only=True)
    }
    one, row = (4, 50, 1), (4, 50, 150)
    tokens = {"input_ids": (row, torch.int64), "attention_mask": (row, torch.bool)}
    rewards = dict.fromkeys(("reward", "reward_raw", "reward_kl"), (one, torch.float32))
    ends = dict.fromkeys(("done", "terminated"), (one, torch.bool))
    assert found == {
        "action": ((4, 50), torch.int64),
        "sample_log_prob": (one, torch.float32),
        **tokens,
        **{("next", key): value for key, value in {**tokens, **rewards, **ends}.items()},
    }
    assert rollout.batch_size == (4, 50)
    assert rollout.names == [None, "time"]


def test_the_score_is_paid_once_where_the_episode_ends(parts):
    td = parts.roll.rollout_from_data(parts.batch)
    replies, done = parts.replies(td), td["next", "done"].squeeze(-1)
    assert torch.equal(done, td["next", "terminated"].squeeze(-1))
    assert any(len(reply) < N for reply in replies)  # where the original pays twice
    assert any(len(reply) == N for reply in replies)
    raw = td["next", "reward_raw"].squeeze(-1)
    for i, reply in enumerate(replies):
        assert done[i].nonzero().tolist() == [[len(reply) - 1]]
        score = parts.end_score(parts.prompts[i] + reply)
        if parts.labels[i]:
            score -= parts.end_score(parts.prompts[i] + parts.labels[i])
        assert raw[i, len(reply) - 1].item() == pytest.approx(score, abs=1e-4)
        assert raw[i].count_nonzero() == 1
    reward, kl = td["next", "reward"], td["next", "reward_kl"]
    torch.testing.assert_close(reward, td["next", "reward_raw"] + kl)


def test_log_probs_are_those_of_a_plain_forward_and_never_nan(parts):
    generated, sampled, ratio = parts.roll.generate(parts.batch)
    td = parts.roll.create_rollout_td(parts.batch, generated, sampled, ratio)
    for i, reply in enumerate(parts.replies(td)):
        mine, ref = (log_probs(m, parts.prompts[i], reply) for m in (parts.model, parts.ref))
        rest = torch.zeros(N - len(reply), dtype=torch.float64)
        want = torch.cat([mine, rest])
        torch.testing.assert_close(sampled[i, :, 0].double(), want, atol=1e-4, rtol=1e-4)
        assert (mine - ref).abs().max() > 0.01
        want = torch.cat([mine - ref, rest])
        torch.testing.assert_close(ratio[i].double(), want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            td["next", "reward_kl"][i, :, 0].double(), -0.1 * want, atol=1e-4, rtol=1e-4
        )


def test_nothing_is_nan_when_all_rows_stop_at_once(folders):
    parts = Parts(folders["gpt2"], ends=10_000)  # every token ends a reply
    for config in (None, GenerationConfig(do_sample=True)):
        td = parts.roll.rollout_from_data(parts.batch, config)
        for value in td.values(include_nested=True, leaves_only=True):
            assert value.isfinite().all()
        assert not td["sample_log_prob"][:, 1:].any()
        assert td["sample_log_prob"][:, 0].all()
        assert td["next", "done"].sum(1).flatten().tolist() == [1] * 12


def test_each_step_shows_the_whole_prompt_and_the_tokens_so_far(parts):
    generated = parts.roll.generate(parts.batch)[0]
    assert generated.shape == (12, 9 + N)
    td = parts.roll.rollout_from_data(parts.batch)
    for i, reply in enumerate(parts.replies(td)):
        for t in range(N):
            for where, count in ((td, t), (td["next"], t + 1)):
                shown = where["attention_mask"][i, t]
                want = parts.prompts[i] + reply[:count]
                assert where["input_ids"][i, t][shown].tolist() == want
                assert shown.sum() == shown.nonzero().max() + 1  # nothing between
                rest = where["input_ids"][i, t][~shown]
                assert (rest == parts.roll.pad_token_id).all()
        assert not (td["action"][i, len(reply) :] != parts.roll.pad_token_id).any()


def test_a_prompt_is_read_by_its_mask_wherever_its_padding_is(folders):
    parts = Parts(folders["gpt2"])
    ids, mask = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.bool)
    ids[0, 3:], mask[0, 3:] = torch.tensor([3, 50, 4]), True
    ids[1, :3], mask[1, :3] = torch.tensor([3, 50, 4]), True
    rindex = torch.tensor([5, 2])
    batch = PromptData(input_ids=ids, attention_mask=mask, prompt_rindex=rindex, batch_size=[2])
    td = parts.roll.rollout_from_data(batch, GenerationConfig(do_sample=False))
    for key in ("action", "sample_log_prob", ("next", "reward")):
        torch.testing.assert_close(td[key][0], td[key][1], atol=1e-5, rtol=1e-5)
    for wrong in ([5, 6], [5, -1], [5, 3]):
        batch.prompt_rindex = torch.tensor(wrong)
        with pytest.raises(ValueError, match="prompt_rindex at attended tokens"):
            parts.roll.generate(batch)


def test_a_generation_config_is_honoured(folders):
    parts = Parts(folders["qwen2"])
    greedy = GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=300)
    generated, sampled, _ = parts.roll.generate(parts.batch, greedy)
    assert sampled.shape == (12, 4, 1)
    for i, prompt in enumerate(parts.prompts):
        row = list(prompt)
        for _ in range(4):
            row.append(parts.model(torch.tensor([row])).logits[0, -1].argmax().item())
        assert generated[i, : len(row)].tolist() == row
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3)
    before = config.to_dict()
    generated, sampled, ratio = parts.roll.generate(parts.batch, config)
    assert config.to_dict() == before
    td = parts.roll.create_rollout_td(parts.batch, generated, sampled, ratio)
    for i, reply in enumerate(parts.replies(td)):
        for t, token in enumerate(reply):
            seen = torch.tensor([parts.prompts[i] + reply[:t]])
            top, places = (parts.model(seen).logits[0, -1].double() / 0.5).topk(3)
            want = top.log_softmax(-1)[places.tolist().index(token)]
            assert sampled[i, t, 0].item() == pytest.approx(want.item(), abs=1e-4)
        both = (log_probs(m, parts.prompts[i], reply, 0.5) for m in (parts.model, parts.ref))
        mine, ref = both
        torch.testing.assert_close(
            ratio[i, : len(reply)].double(), mine - ref, atol=1e-4, rtol=1e-4
        )


def test_the_eos_of_a_generation_config_ends_the_episode(folders):
    parts = Parts(folders["gpt2"], ends=1)
    config = GenerationConfig(do_sample=True, eos_token_id=list(range(200)))
    td = parts.roll.rollout_from_data(parts.batch, config)
    for row, done in zip(td["action"].tolist(), td["next", "done"].squeeze(-1), strict=True):
        first = next((t for t, token in enumerate(row) if token < 200), N - 1)
        assert done.nonzero().tolist() == [[first]]
    assert td["next", "done"][:, : N - 1].any()
    for name, value in (("num_beams", 2), ("num_return_sequences", 2), ("max_time", 1.0)):
        with pytest.raises(ValueError, match=f"without {name}"):
            parts.roll.generate(parts.batch, GenerationConfig(**{name: value, "do_sample": True}))


def test_the_kl_of_a_model_to_itself_is_zero_and_dropout_is_off(folders):
    parts = Parts(folders["gpt2"])
    same = RolloutFromModel(parts.model, parts.model, parts.reward, max_new_tokens=N)
    assert not same.generate(parts.batch)[2].any()
    for module in parts.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    parts.model.train()
    parts.model.lm_head.eval()
    assert not same.generate(parts.batch)[2].any()
    assert parts.model.training
    assert not parts.model.lm_head.training


def test_a_tensordict_module_scores_alike_and_nothing_gets_a_gradient(folders):
    parts = Parts(folders["gpt2"])
    module = TensorDictModule(
        parts.reward, in_keys=["input_ids", "attention_mask"], out_keys=["rewards", "end_scores"]
    )
    other = RolloutFromModel(parts.model, parts.ref, module, max_new_tokens=N)
    made = parts.roll.generate(parts.batch)
    one, two = (roll.create_rollout_td(parts.batch, *made) for roll in (parts.roll, other))
    assert torch.equal(one["next", "reward"], two["next", "reward"])
    assert one["next", "reward_raw"].any()
    assert not any(v.requires_grad for v in two.values(include_nested=True, leaves_only=True))


def test_scores_are_clipped(folders):
    parts = Parts(folders["gpt2"], score_clip=0.05)
    raw = parts.roll.rollout_from_data(parts.batch)["next", "reward_raw"].sum(1).flatten()
    assert raw.abs().max() == pytest.approx(0.05)
    assert (raw == raw.max()).sum() > 1
    assert (raw == raw.min()).sum() > 1
    nothing = Parts(folders["gpt2"], score_clip=0).roll.rollout_from_data(parts.batch)
    assert not nothing["next", "reward_raw"].any()


class Noting(KLControllerBase):
    """Write down what it is told; half the coefficient each time."""

    def update(self, kl_values):
        self.seen = [*getattr(self, "seen", []), list(kl_values)]
        self.coeff /= 2
        return self.coeff


def test_the_coefficient_follows_the_scheduler_every_num_steps(folders):
    control = Noting(0.8)
    parts = Parts(folders["gpt2"], kl_coef=0.8, kl_scheduler=control, num_steps=2)
    charged, measured = [], []
    for _ in range(5):
        made = parts.roll.generate(parts.batch)
        td = parts.roll.create_rollout_td(parts.batch, *made)
        measured.append(made[2].double().sum().item() / 12)  # nats per sequence
        total = td["next", "reward_kl"].double().sum().item()
        charged.append(-total / made[2].double().sum().item())
    assert charged == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2])
    seen = [value for values in control.seen for value in values]
    assert [len(values) for values in control.seen] == [2, 2]
    assert seen == pytest.approx(measured[:4], rel=1e-4)
    parts.roll.step_scheduler()  # by hand, with the one that is there
    assert control.seen[2] == pytest.approx(measured[4:], rel=1e-4)
    assert parts.roll.kl_coef == 0.1


def test_the_documented_controller_gets_its_own_convention(folders):
    control = AdaptiveKLController(init_kl_coef=0.3, target=0.1, horizon=10)
    parts = Parts(folders["gpt2"], kl_coef=0.3, kl_scheduler=control)
    rewards = [parts.roll.rollout_from_data(parts.batch)["next", "reward_kl"] for _ in range(3)]
    assert parts.roll.kl_coef == 0.3  # nobody stepped it
    parts.roll.step_scheduler()
    kl = -sum(float(r.mean()) for r in rewards) / 3 / 0.3
    error = min(max(kl / 0.1 - 1, -0.2), 0.2)
    assert parts.roll.kl_coef == pytest.approx(0.3 * (1 + error * 3 / 10), rel=1e-5)
    assert type(parts.roll.kl_coef) is float
    parts.roll.step_scheduler()  # nothing new was measured
    assert parts.roll.kl_coef == pytest.approx(0.3 * (1 + error * 3 / 10), rel=1e-5)


def test_impossible_settings_and_prompts_are_refused_where_they_are_given(folders):
    nan, ids = float("nan"), torch.tensor([[5, 6, 7, 8]])
    parts = Parts(folders["gpt2"])
    for wrong in ({"kl_coef": -1}, {"kl_coef": nan}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RolloutFromModel(parts.model, parts.ref, parts.reward, **wrong)
    for place in (4, -1):
        data = PromptData(
            input_ids=ids,
            attention_mask=ids > 0,
            prompt_rindex=torch.tensor([place]),
            batch_size=[1],
        )
        with pytest.raises(ValueError, match=rf"prompt_rindex at attended tokens, got \[{place}\]"):
            parts.roll.rollout_from_data(data)


def test_without_a_scheduler_stepping_does_nothing(folders):
    parts = Parts(folders["gpt2"], kl_coef=0.3)
    parts.roll.rollout_from_data(parts.batch)
    parts.roll.step_scheduler()
    assert parts.roll.kl_coef == 0.3


def test_pad_and_eos_come_from_model_or_tokenizer(folders):
    model = AutoModelForCausalLM.from_pretrained(folders["qwen2"])
    own = RolloutFromModel(model, model, torch.nn.Identity())
    assert (own.pad_token_id, own.eos_token_ids) == (0, {0, 2})
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folders["qwen2"])
    told = RolloutFromModel(model, model, torch.nn.Identity(), tokenizer=tokenizer)
    assert (told.pad_token_id, told.eos_token_ids) == (0, {2})
    assert RolloutFromModel(model, model, torch.nn.Identity()).eos_token_ids == frozenset()


def test_a_data_set_keeps_the_whole_prompt_and_ends_the_label(folders, tmp_path):
    path, tokenizer = (
        write(tmp_path / "tldr.jsonl"),
        AutoTokenizer.from_pretrained(folders["qwen2"]),
    )
    data = PromptData.from_dataset("train", str(path), 40, tokenizer=tokenizer)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for i, row in enumerate(rows):
        prompt, label = tokenizer(row["prompt"]).input_ids, tokenizer(row["label"]).input_ids
        real = data.input_ids[i][data.attention_mask[i]].tolist()
        assert real == [*prompt, *label, tokenizer.eos_token_id]
        assert data.prompt_rindex[i] == len(prompt) - 1
        assert data[i : i + 1].mask_label().input_ids[0, : len(prompt) + 1].tolist() == [*prompt, 0]
        assert data.labels[i].tolist() == real + [-100] * (40 - len(real))
    frame = tmp_path / "tldr.parquet"
    Dataset.from_list(rows).to_parquet(frame)
    again = PromptData.from_dataset("train", str(frame), 40, tokenizer=tokenizer)
    assert torch.equal(again.input_ids, data.input_ids)
    DatasetDict({"valid": Dataset.from_list(rows[:2])}).save_to_disk(tmp_path / "saved")
    saved = PromptData.from_dataset(
        "valid", str(tmp_path / "saved"), 40, from_disk=True, tokenizer=tokenizer
    )
    assert torch.equal(saved.input_ids, data.input_ids[:2])


def test_a_loader_shows_each_row_once_an_epoch(folders, tmp_path):
    path = str(write(tmp_path / "tldr.jsonl", 10))
    settings = {"block_size": 40, "tensorclass_type": PromptData, "device": "cpu"}
    settings |= {"dataset_name": path, "tokenizer": folders["gpt2"]}
    torch.manual_seed(1)
    once = [b.input_ids for b in get_dataloader(4, infinite=False, **settings)]
    assert [len(ids) for ids in once] == [4, 4, 2]
    assert len({tuple(row.tolist()) for row in torch.cat(once)}) == 10
    endless = get_dataloader(4, **settings)
    rows = torch.cat([next(endless).input_ids for _ in range(5)])
    for epoch in rows.split(10):
        assert len({tuple(row.tolist()) for row in epoch}) == 10
    torch.manual_seed(1)
    again = next(get_dataloader(4, infinite=False, **settings)).input_ids
    assert torch.equal(again, once[0])


def test_rows_that_do_not_fit_are_dropped_aloud_and_bad_data_is_an_error(folders, tmp_path):
    path, tokenizer = write(tmp_path / "tldr.jsonl"), folders["gpt2"]
    sizes = [int(m.sum()) for m in PromptData.from_dataset(
        "train", str(path), 90, tokenizer=tokenizer).attention_mask]  # fmt: skip
    limit = sorted(sizes)[3]
    kept = sum(size <= limit for size in sizes)
    with pytest.warns(UserWarning, match=f"dropped {6 - kept} of 6 rows"):
        data = PromptData.from_dataset("train", str(path), limit, tokenizer=tokenizer)
    assert len(data) == kept < 6
    with pytest.raises(ValueError, match="raise block_size"):
        PromptData.from_dataset("train", str(path), 2, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="a file has the split train"):
        PromptData.from_dataset("valid", str(path), 90, tokenizer=tokenizer)
    path.write_text('{"prompt": "a", "summary": "b"}\n')
    with pytest.raises(ValueError, match="columns prompt and label, got prompt, summary"):
        PromptData.from_dataset("train", str(path), 90, tokenizer=tokenizer)
