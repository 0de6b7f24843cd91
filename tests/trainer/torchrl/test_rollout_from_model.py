"""RolloutFromModel beyond its page's statements (test_s4_rollout.py): generation
configs, ends and padding, what the scheduler is given, and the data sets."""

import json
from functools import partial

import pytest
import torch
from support.rollouts import STEPS, batch, by_hand, chats, make, models
from support.wrappers import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from policies.padding import pad_mask, widen
from trainer import (
    AdaptiveKLController,
    KLControllerBase,
    PromptData,
    RolloutFromModel,
    get_dataloader,
)


@pytest.mark.parametrize("config", [None, GenerationConfig(do_sample=True)])
def test_nothing_is_nan_when_all_rows_stop_at_once(config):
    roll = make()
    roll.eos_token_ids = frozenset(range(10_000))
    td = roll.rollout_from_data(batch(), config)
    for value in td.values(include_nested=True, leaves_only=True):
        assert value.isfinite().all()
    for flags in (td["sample_log_prob"] != 0, td["next", "done"]):
        assert flags.squeeze(-1).nonzero().tolist() == [[i, 0] for i in range(4)]


def test_a_prompt_is_read_by_its_mask_wherever_its_padding_is():
    found, greedy = [], GenerationConfig(do_sample=False)
    for side, last in (("right", 2), ("left", 8)):
        ids, mask = widen(torch.tensor([[3, 50, 4]]), 9, side=side), pad_mask([3, 9], side=side)
        last = {"prompt_rindex": torch.tensor([last]), "batch_size": [1]}
        data = PromptData(input_ids=ids, attention_mask=mask[:1], **last)
        found.append(make().rollout_from_data(data, greedy))
    for key in ("action", "sample_log_prob", ("next", "reward")):
        torch.testing.assert_close(found[0][key], found[1][key], atol=1e-5, rtol=1e-5)
    data.prompt_rindex = torch.tensor([5])
    with pytest.raises(ValueError, match="prompt_rindex"):
        make().generate(data)
    with pytest.raises(ValueError, match="num_beams"):
        make().generate(batch(), GenerationConfig(num_beams=2))


def test_log_probs_are_of_what_was_drawn_from_and_the_kl_is_at_its_temperature():
    model, ref, _ = models()
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3)
    before = config.to_dict()
    generated, sampled, ratio = make().generate(batch(), config)
    assert config.to_dict() == before
    td = make().create_rollout_td(batch(), generated, sampled, ratio)
    for i, (prompt, response) in enumerate(chats(td)):
        for t, token in enumerate(response):
            seen = torch.tensor([prompt + response[:t]])
            top, places = (model(seen).logits[0, -1].double() / 0.5).topk(3)
            want = top.log_softmax(-1)[places.tolist().index(token)]
            assert sampled[i, t, 0].item() == pytest.approx(want.item(), abs=1e-4)
        curr, other = (by_hand(m, prompt, response, 0.5) for m in (model, ref))
        got = ratio[i, : len(response)].double()
        torch.testing.assert_close(got, curr - other, atol=1e-4, rtol=1e-4)


def test_the_eos_of_a_generation_config_ends_the_episode():
    config = GenerationConfig(do_sample=True, eos_token_id=list(range(200)))
    td = make().rollout_from_data(batch(), config)
    for row, done in zip(td["action"].tolist(), td["next", "done"].squeeze(-1), strict=True):
        first = next((t for t, token in enumerate(row) if token < 200), STEPS - 1)
        assert done.nonzero().tolist() == [[first]]
    assert td["next", "done"][:, : STEPS - 1].any()


def test_the_kl_of_a_model_to_itself_is_zero_and_dropout_is_off():
    model = AutoModelForCausalLM.from_pretrained(checkpoint("gpt2"))
    alone = RolloutFromModel(model, model, torch.nn.Identity(), max_new_tokens=STEPS)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    model.lm_head.eval()
    assert not alone.generate(batch())[2].any()
    assert model.training
    assert not model.lm_head.training  # each part is left in its mode


class Noting(KLControllerBase):
    """Write down what it is told; half the coefficient each time."""

    seen = ()

    def update(self, kl_values):
        self.seen = *self.seen, list(kl_values)
        self.coeff /= 2
        return self.coeff


def test_the_scheduler_gets_nats_per_sequence_every_num_steps():
    control = Noting(0.8)
    roll = make(kl_coef=0.8, kl_scheduler=control, num_steps=2)
    charged, measured = [], []
    for _ in range(5):
        responses = roll.generate(batch())
        td = roll.create_rollout_td(batch(), *responses)
        measured.append(responses[2].double().sum().item() / 4)
        charged.append(-td["next", "reward_kl"].double().sum().item() / (4 * measured[-1]))
    assert charged == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2])
    assert control.seen[0] + control.seen[1] == pytest.approx(measured[:4], rel=1e-4)
    roll.step_scheduler()  # by hand, with the one that is there
    assert control.seen[2] == pytest.approx(measured[4:], rel=1e-4)
    assert roll.kl_coef == 0.1


def test_the_documented_controller_gets_its_own_convention():
    control = AdaptiveKLController(init_kl_coef=0.3, target=0.1, horizon=10)
    roll = make(kl_coef=0.3, kl_scheduler=control)
    rewards = [roll.rollout_from_data(batch())["next", "reward_kl"] for _ in range(3)]
    kl = -sum(float(r.mean()) for r in rewards) / 3 / 0.3
    error = min(max(kl / 0.1 - 1, -0.2), 0.2)
    roll.step_scheduler()
    assert roll.kl_coef == pytest.approx(0.3 * (1 + error * 3 / 10), rel=1e-5)


# Data sets.

ROWS = [
    {"prompt": f"What is the capital of {'France ' * (i % 3)}?", "label": f" It is {i}."}
    for i in range(10)
]


def test_data_sets_keep_the_whole_prompt_end_the_label_and_are_shown_once_an_epoch(tmp_path):
    path, tokenizer = tmp_path / "tldr.jsonl", AutoTokenizer.from_pretrained(checkpoint("qwen2"))
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    load = partial(PromptData.from_dataset, dataset_name=str(path), tokenizer=tokenizer)
    data_set = load("train", max_length=40)
    for i, row in enumerate(ROWS):
        prompt, label = tokenizer(row["prompt"]).input_ids, tokenizer(row["label"]).input_ids
        real = data_set.input_ids[i][data_set.attention_mask[i]].tolist()
        assert real == [*prompt, *label, tokenizer.eos_token_id]
        assert data_set.prompt_rindex[i] == len(prompt) - 1
        alone = data_set[i : i + 1].mask_label().input_ids[0]
        assert alone[: len(prompt) + 1].tolist() == [*prompt, 0]
        assert data_set.labels[i].tolist() == real + [-100] * (40 - len(real))
    limit = sorted(data_set.attention_mask.sum(-1).tolist())[3]
    with pytest.warns(UserWarning, match="dropped .* of 10 rows"):
        assert 4 <= len(load(max_length=limit)) < 10
    settings = {"block_size": 40, "tensorclass_type": PromptData, "device": "cpu"}
    settings |= {"dataset_name": str(path), "tokenizer": tokenizer}
    shown = [b.input_ids for b in get_dataloader(4, infinite=False, **settings)]
    assert [len(ids) for ids in shown] == [4, 4, 2]
    assert len({tuple(ids) for ids in torch.cat(shown).tolist()}) == 10
    path.write_text('{"prompt": "a", "summary": "b"}\n')
    with pytest.raises(ValueError, match="label"):
        load()
