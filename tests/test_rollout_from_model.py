"""RolloutFromModel beyond its page's statements (specification_rows/rollout.py): generation
configs, ends and padding, what the scheduler is given, and the data sets."""

import json

import pytest
import torch
from checkpoints import make_checkpoint
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from policies import GPT2RewardModel
from trainer import (
    AdaptiveKLController,
    KLControllerBase,
    PromptData,
    RolloutFromModel,
    get_dataloader,
)

N = 6
PROMPTS = [[3, 50, 4], [3], [60, 0, 0, 70, 9], [80, 81]]  # full of the ids that end a reply


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {kind: make_checkpoint(base / kind, kind) for kind in ("gpt2", "qwen2")}


def data(*prompts: list[int], left: bool = False) -> PromptData:
    ids, mask = torch.zeros(len(prompts), 9).long(), torch.zeros(len(prompts), 9).bool()
    starts = [9 - len(row) if left else 0 for row in prompts]
    for i, row in enumerate(prompts):
        place = slice(starts[i], starts[i] + len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), True
    rindex = torch.tensor([s + len(row) - 1 for s, row in zip(starts, prompts, strict=True)])
    common = {"prompt_rindex": rindex, "batch_size": [len(prompts)]}
    return PromptData(input_ids=ids, attention_mask=mask, **common)


class Parts:
    """Two different models, a reward model and a batch of prompts."""

    def __init__(self, folder, ends: int = 40, **options) -> None:
        torch.manual_seed(17)  # not that of the checkpoints: ref is another model
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.model.generation_config.eos_token_id = list(range(ends))
        self.ref = AutoModelForCausalLM.from_config(self.model.config)
        options = {"max_new_tokens": N, **options}
        self.roll = RolloutFromModel(self.model, self.ref, GPT2RewardModel(folder), **options)
        self.batch = data(*PROMPTS)

    def replies(self, td) -> list[list[int]]:
        """Return each row's reply up to and with its first end."""
        out = []
        for row in td["action"].tolist():
            ends = [t for t, token in enumerate(row) if token in self.roll.eos_token_ids]
            out.append(row[: ends[0] + 1] if ends else row)
        return out


def log_probs(model, prompt: list[int], reply: list[int], temperature: float = 1.0):
    """Return the log-probs of a reply by a plain forward of this one sequence."""
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    every = (logits.double() / temperature).log_softmax(-1)
    return torch.stack([row[token] for row, token in zip(every, reply, strict=True)])


@pytest.mark.parametrize("config", [None, GenerationConfig(do_sample=True)])
def test_nothing_is_nan_when_all_rows_stop_at_once(folders, config):
    parts = Parts(folders["gpt2"], ends=10_000)  # every token ends a reply
    td = parts.roll.rollout_from_data(parts.batch, config)
    for value in td.values(include_nested=True, leaves_only=True):
        assert value.isfinite().all()
    assert not td["sample_log_prob"][:, 1:].any()
    assert td["sample_log_prob"][:, 0].all()
    assert td["next", "done"].sum(1).flatten().tolist() == [1] * 4


def test_a_prompt_is_read_by_its_mask_wherever_its_padding_is(folders):
    roll = Parts(folders["gpt2"]).roll
    greedy = GenerationConfig(do_sample=False)
    one, two = (roll.rollout_from_data(data([3, 50, 4], left=s), greedy) for s in (True, False))
    for key in ("action", "sample_log_prob", ("next", "reward")):
        torch.testing.assert_close(one[key], two[key], atol=1e-5, rtol=1e-5)
    for wrong in (3, 9, -1):
        batch = data([3, 50, 4])
        batch.prompt_rindex = torch.tensor([wrong])
        with pytest.raises(ValueError, match="prompt_rindex"):
            roll.generate(batch)


def test_greedy_follows_the_most_likely_token(folders):
    parts = Parts(folders["qwen2"])
    greedy = GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=300)
    generated, sampled, _ = parts.roll.generate(parts.batch, greedy)
    assert sampled.shape == (4, 4, 1)
    for i, prompt in enumerate(PROMPTS):
        row = list(prompt)
        for _ in range(4):
            row.append(parts.model(torch.tensor([row])).logits[0, -1].argmax().item())
        assert generated[i, : len(row)].tolist() == row


def test_log_probs_are_of_what_was_drawn_from_and_the_kl_is_at_its_temperature(folders):
    parts = Parts(folders["qwen2"])
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3)
    before = config.to_dict()
    generated, sampled, ratio = parts.roll.generate(parts.batch, config)
    assert config.to_dict() == before
    td = parts.roll.create_rollout_td(parts.batch, generated, sampled, ratio)
    for i, reply in enumerate(parts.replies(td)):
        for t, token in enumerate(reply):
            seen = torch.tensor([PROMPTS[i] + reply[:t]])
            top, places = (parts.model(seen).logits[0, -1].double() / 0.5).topk(3)
            want = top.log_softmax(-1)[places.tolist().index(token)]
            assert sampled[i, t, 0].item() == pytest.approx(want.item(), abs=1e-4)
        curr, ref = (log_probs(m, PROMPTS[i], reply, 0.5) for m in (parts.model, parts.ref))
        got = ratio[i, : len(reply)].double()
        torch.testing.assert_close(got, curr - ref, atol=1e-4, rtol=1e-4)


def test_the_eos_of_a_generation_config_ends_the_episode(folders):
    parts = Parts(folders["gpt2"], ends=1)
    config = GenerationConfig(do_sample=True, eos_token_id=list(range(200)))
    td = parts.roll.rollout_from_data(parts.batch, config)
    for row, done in zip(td["action"].tolist(), td["next", "done"].squeeze(-1), strict=True):
        first = next((t for t, token in enumerate(row) if token < 200), N - 1)
        assert done.nonzero().tolist() == [[first]]
    assert td["next", "done"][:, : N - 1].any()


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "max_time"])
def test_what_has_no_log_probs_is_refused(folders, name):
    parts = Parts(folders["gpt2"])
    with pytest.raises(ValueError, match=name):
        parts.roll.generate(parts.batch, GenerationConfig(**{name: 2, "do_sample": True}))


@pytest.mark.parametrize("coeff", [-1, float("nan")])
def test_a_coefficient_that_cannot_be_is_refused(folders, coeff):
    with pytest.raises(ValueError, match="kl_coef"):
        Parts(folders["gpt2"], kl_coef=coeff)


def test_the_kl_of_a_model_to_itself_is_zero_and_dropout_is_off(folders):
    model = Parts(folders["gpt2"]).model
    alone = RolloutFromModel(model, model, torch.nn.Identity(), max_new_tokens=N)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    model.lm_head.eval()
    assert not alone.generate(data(*PROMPTS))[2].any()
    assert model.training
    assert not model.lm_head.training  # each part is left in its mode


class Noting(KLControllerBase):
    """Write down what it is told; half the coefficient each time."""

    def update(self, kl_values):
        self.seen = [*getattr(self, "seen", []), list(kl_values)]
        self.coeff /= 2
        return self.coeff


def test_the_scheduler_gets_nats_per_sequence_every_num_steps(folders):
    control = Noting(0.8)
    parts = Parts(folders["gpt2"], kl_coef=0.8, kl_scheduler=control, num_steps=2)
    charged, measured = [], []
    for _ in range(5):
        replies = parts.roll.generate(parts.batch)
        td = parts.roll.create_rollout_td(parts.batch, *replies)
        measured.append(replies[2].double().sum().item() / 4)
        charged.append(-td["next", "reward_kl"].double().sum().item() / (4 * measured[-1]))
    assert charged == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2])
    assert control.seen[0] + control.seen[1] == pytest.approx(measured[:4], rel=1e-4)
    parts.roll.step_scheduler()  # by hand, with the one that is there
    assert control.seen[2] == pytest.approx(measured[4:], rel=1e-4)
    assert parts.roll.kl_coef == 0.1


def test_the_documented_controller_gets_its_own_convention(folders):
    control = AdaptiveKLController(init_kl_coef=0.3, target=0.1, horizon=10)
    parts = Parts(folders["gpt2"], kl_coef=0.3, kl_scheduler=control)
    rewards = [parts.roll.rollout_from_data(parts.batch)["next", "reward_kl"] for _ in range(3)]
    assert parts.roll.kl_coef == 0.3  # nobody stepped it
    kl = -sum(float(r.mean()) for r in rewards) / 3 / 0.3
    error = min(max(kl / 0.1 - 1, -0.2), 0.2)
    for _ in range(2):  # nothing new was measured for the second
        parts.roll.step_scheduler()
        assert parts.roll.kl_coef == pytest.approx(0.3 * (1 + error * 3 / 10), rel=1e-5)


def test_pad_and_eos_come_from_model_or_tokenizer(folders):
    model = AutoModelForCausalLM.from_pretrained(folders["qwen2"])
    alone = RolloutFromModel(model, model, torch.nn.Identity())
    assert (alone.pad_token_id, alone.eos_token_ids) == (0, {0, 2})
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folders["qwen2"])
    named = RolloutFromModel(model, model, torch.nn.Identity(), tokenizer=tokenizer)
    assert (named.pad_token_id, named.eos_token_ids) == (0, {2})
    assert RolloutFromModel(model, model, torch.nn.Identity()).eos_token_ids == frozenset()


# Data sets.


@pytest.fixture
def rows() -> list[dict]:
    return [
        {"prompt": f"What is the capital of {'France ' * (i % 3)}?", "label": f" It is {i}."}
        for i in range(10)
    ]


@pytest.fixture
def path(tmp_path, rows) -> str:
    file = tmp_path / "tldr.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_data_set_keeps_the_whole_prompt_and_ends_the_label(folders, tmp_path, rows, path):
    tokenizer = AutoTokenizer.from_pretrained(folders["qwen2"])
    data_set = PromptData.from_dataset("train", path, 40, tokenizer=tokenizer)
    for i, row in enumerate(rows):
        prompt, label = tokenizer(row["prompt"]).input_ids, tokenizer(row["label"]).input_ids
        real = data_set.input_ids[i][data_set.attention_mask[i]].tolist()
        assert real == [*prompt, *label, tokenizer.eos_token_id]
        assert data_set.prompt_rindex[i] == len(prompt) - 1
        alone = data_set[i : i + 1].mask_label().input_ids[0]
        assert alone[: len(prompt) + 1].tolist() == [*prompt, 0]
        assert data_set.labels[i].tolist() == real + [-100] * (40 - len(real))
    frame = tmp_path / "tldr.parquet"
    Dataset.from_list(rows).to_parquet(frame)
    DatasetDict({"valid": Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    settings = {"max_length": 40, "tokenizer": tokenizer}
    for again in (
        PromptData.from_dataset("train", str(frame), **settings),
        PromptData.from_dataset("valid", str(tmp_path / "saved"), from_disk=True, **settings),
    ):
        assert torch.equal(again.input_ids, data_set.input_ids)


def test_a_loader_shows_each_row_once_an_epoch(folders, path):
    settings = {"block_size": 40, "tensorclass_type": PromptData, "device": "cpu"}
    settings |= {"dataset_name": path, "tokenizer": folders["gpt2"]}
    torch.manual_seed(1)
    once = [b.input_ids for b in get_dataloader(4, infinite=False, **settings)]
    assert [len(ids) for ids in once] == [4, 4, 2]
    assert len({tuple(row.tolist()) for row in torch.cat(once)}) == 10
    endless = get_dataloader(4, **settings)
    for epoch in torch.cat([next(endless).input_ids for _ in range(5)]).split(10):
        assert len({tuple(row.tolist()) for row in epoch}) == 10
    torch.manual_seed(1)
    again = next(get_dataloader(4, infinite=False, **settings)).input_ids
    assert torch.equal(again, once[0])


def test_rows_that_do_not_fit_are_dropped_aloud_and_bad_data_is_an_error(folders, tmp_path, path):
    def load(split: str = "train", name: str = path, length: int = 90) -> PromptData:
        return PromptData.from_dataset(split, name, length, tokenizer=folders["gpt2"])

    sizes = load().attention_mask.sum(-1).tolist()
    limit = sorted(sizes)[3]
    kept = sum(size <= limit for size in sizes)
    with pytest.warns(UserWarning, match=f"dropped {10 - kept} of 10 rows"):
        assert len(load(length=limit)) == kept < 10
    with pytest.raises(ValueError, match="block_size"):
        load(length=2)
    with pytest.raises(ValueError, match="split"):
        load("valid")
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "summary": "b"}\n')
    with pytest.raises(ValueError, match="label"):
        load(name=str(tmp_path / "other.jsonl"))
