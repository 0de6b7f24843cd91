"""S4: RolloutFromModel, on a tiny GPT-2."""

from functools import partial

import torch
from support.rollouts import (
    IDS,
    SIZES,
    STEPS,
    batch,
    by_hand,
    chats,
    end_score,
    loader,
    make,
    models,
    rolled,
)
from support.specification import TORCHRL, close, defaults, page, raises
from support.wrappers import checkpoint
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from transformers import GenerationConfig, GPT2LMHeadModel

from policies import GPT2RewardModel
from trainer import AdaptiveKLController, ConstantKLController, RolloutFromModel
from trainer.torchrl.prompt_data import DEFAULT_DATASET, PromptData

S4 = page("S4")


@S4("RolloutFromModel(model, ref_model, reward_model, kl_coef=0.1, ...): defaults")
def test_RolloutFromModel_model_ref_model_reward_model_kl_coef_0():
    text = """model, ref_model, reward_model, kl_coef=0.1, max_new_tokens=50, score_clip=10.0,
        kl_scheduler=None, num_steps=None"""
    defaults(RolloutFromModel, text)


@S4("arg model: a transformers model; ref_model: a frozen one for the KL penalty")
def test_arg_model_a_transformers_model_ref_model_a_frozen():
    td, _ = rolled()
    alone = RolloutFromModel(models()[0], models()[0], models()[2], max_new_tokens=STEPS)
    assert not alone.rollout_from_data(batch())["next", "reward_kl"].any()
    assert td["next", "reward_kl"].any()
    assert not any(v.requires_grad for v in td.values(include_nested=True, leaves_only=True))


@S4("arg reward_model: input_ids, attention_mask -> rewards, end_scores")
def test_arg_reward_model():
    rewards, end_scores = models()[2](batch().input_ids, batch().attention_mask)
    assert (rewards.shape[:2], end_scores.shape) == ((4, 9), (4, 1))


@S4("arg reward_model: a TensorDictModule")
def test_arg_reward_model_TensorDictModule():
    td, made = rolled()
    keys = {"in_keys": ["input_ids", "attention_mask"], "out_keys": ["rewards", "end_scores"]}
    other = RolloutFromModel(*models()[:2], TensorDictModule(models()[2], **keys))
    close(other.create_rollout_td(batch(), *made)["next", "reward"], td["next", "reward"])


@S4("arg kl_coef: initial KL coefficient")
def test_arg_kl_coef():
    td, made = rolled()
    more = make(kl_coef=0.5).create_rollout_td(batch(), *made)
    close(more["next", "reward_kl"], 5 * td["next", "reward_kl"])


@S4("arg max_new_tokens")
def test_arg_max_new_tokens():
    assert make(max_new_tokens=3).rollout_from_data(batch()).batch_size == (4, 3)


@S4("arg score_clip: scores are clipped to (-score_clip, score_clip)")
def test_arg_score_clip():
    _, made = rolled()
    raw = make(score_clip=0.01).create_rollout_td(batch(), *made)["next", "reward_raw"]
    close(raw.abs().max(), 0.01)


@S4("arg kl_scheduler: KLControllerBase, asked by step_scheduler()")
def test_arg_kl_scheduler_KLControllerBase():
    adaptive = partial(AdaptiveKLController, init_kl_coef=0.3, target=0.1, horizon=10)
    for control in (adaptive(), ConstantKLController(kl_coef=0.3), None):
        roll = make(kl_coef=0.3, kl_scheduler=control)
        roll.rollout_from_data(batch())
        roll.step_scheduler()
        assert (roll.kl_coef != 0.3) == isinstance(control, AdaptiveKLController)


@S4("arg num_steps: steps between two optimizations")
def test_arg_num_steps():
    adaptive = partial(AdaptiveKLController, init_kl_coef=0.3, target=0.1, horizon=10)
    roll, found = make(kl_coef=0.3, kl_scheduler=adaptive(), num_steps=2), []
    for _ in range(4):
        roll.rollout_from_data(batch())
        found.append(roll.kl_coef)
    assert 0.3 == found[0] != found[1] == found[2] != found[3]


@S4("arg score_clip=0")
def test_arg_score_clip_0():
    _, made = rolled()
    none = make(score_clip=0).create_rollout_td(batch(), *made)["next", "reward_raw"]
    assert not none.any()


@S4("example: the printed keys, shapes and dtypes (block 100 in place of 550)")
def test_example_the_printed_keys_shapes_and_dtypes_block_100():
    data = next(loader())
    data.input_ids, data.attention_mask = data.input_ids[:, :100], data.attention_mask[:, :100]
    model = GPT2LMHeadModel.from_pretrained(checkpoint("gpt2"))
    ref_model = GPT2LMHeadModel(GPT2LMHeadModel.config_class(**model.config.to_dict()))
    reward_model = GPT2RewardModel(model_path=str(checkpoint("gpt2")))
    rollout = RolloutFromModel(model, ref_model, reward_model).rollout_from_data(data)
    wide, one, whole = (4, 50, 150), (4, 50, 1), torch.int64
    seen = {"input_ids": (wide, whole), "attention_mask": (wide, torch.bool)}
    rewards = dict.fromkeys(("reward", "reward_raw", "reward_kl"), (one, torch.float32))
    after = {**seen, **rewards, "done": (one, torch.bool)}
    printed = {"action": ((4, 50), whole), "sample_log_prob": (one, torch.float32), **seen}
    printed |= {("next", key): value for key, value in after.items()}
    found = {
        key: (tuple(value.shape), value.dtype)
        for key, value in rollout.items(include_nested=True, leaves_only=True)
    }
    assert found.pop(("next", "terminated")) == (one, torch.bool)
    assert (found, rollout.batch_size) == (printed, (4, 50))


@S4("example: get_dataloader(batch_size, block_size, tensorclass_type, device, ...)")
def test_example_get_dataloader_batch_size_block_size():
    data = next(loader())
    assert isinstance(data, PromptData)
    assert next(loader(3)).input_ids.shape == (3, 550)


@S4("example: torchrl.data.rlhf, CarperAI/openai_summarize_tldr", part=TORCHRL)
def test_example_CarperAI():
    assert DEFAULT_DATASET == "CarperAI/openai_summarize_tldr"


@S4("prompt_rindex: the right index of the prompt", part=TORCHRL)
def test_prompt_rindex():
    data = next(loader())
    made = make(max_new_tokens=2).generate(data)[0]
    size = int(data.prompt_rindex[0]) + 1
    assert made[0, :size].tolist() == data.input_ids[0, :size].tolist()


@S4("create_rollout_td(batch, generated, log_probs, log_ratio), also of a TensorDict")
def test_create_rollout_td_batch_generated_log_probs_log_ratio_TensorDict():
    td, made = rolled()
    defaults(RolloutFromModel.create_rollout_td, "batch, generated, log_probs, log_ratio")
    assert (make().create_rollout_td(batch().to_tensordict(), *made) == td).all()


@S4("create_rollout_td: action, the generated tokens")
def test_create_rollout_td():
    _, made = rolled()
    for i, (prompt, response) in enumerate(chats()):
        assert made[0][i, : len(prompt + response)].tolist() == prompt + response


@S4("create_rollout_td: input_ids and attention_mask before each step, and in next after it")
def test_create_rollout_td_input_ids_and_attention_mask_before():
    td, _ = rolled()
    after = td["next"]
    for i, (prompt, response) in enumerate(chats()):
        for t in range(STEPS):
            for place, count in ((td, t), (after, t + 1)):
                seen = place["input_ids"][i, t][place["attention_mask"][i, t]]
                assert seen.tolist() == prompt + response[:count]


@S4("create_rollout_td: sample_log_prob of each token")
def test_create_rollout_td_sample_log_prob_of_each_token():
    td, _ = rolled()
    for i, chat in enumerate(chats()):
        want = by_hand(models()[0], *chat)
        close(td["sample_log_prob"][i, : len(want), 0], want, 1e-4)


@S4("create_rollout_td: terminated at the first EOS or the token limit, done is its copy")
def test_create_rollout_td_terminated_at_the_first_EOS():
    td, _ = rolled()
    after = td["next"]
    ends = [[len(response) - 1] for _, response in chats()]
    assert [flags.nonzero().flatten().tolist() for flags in after["terminated"][..., 0]] == ends
    assert {STEPS - 1} < {end[0] for end in ends}
    assert torch.equal(after["done"], after["terminated"])


@S4("create_rollout_td: reward = reward_raw + reward_kl")
def test_create_rollout_td_reward_reward_raw_reward_kl():
    td, _ = rolled()
    after = td["next"]
    close(after["reward"], after["reward_raw"] + after["reward_kl"])


@S4("create_rollout_td: reward_raw, of the reward model, without the KL term")
def test_create_rollout_td_reward_raw_of_the_reward_model():
    td, _ = rolled()
    after = td["next"]
    for i, (prompt, response) in enumerate(chats()):
        label = end_score(IDS[: sum(SIZES[i])]) if SIZES[i][1] else 0.0
        want = torch.zeros(STEPS)
        want[len(response) - 1] = end_score(prompt + response) - label  # paid once, at the end
        close(after["reward_raw"][i, :, 0], want, 1e-4)


@S4("create_rollout_td: reward_kl, the KL term")
def test_create_rollout_td_reward_kl_the_KL_term():
    td, _ = rolled()
    after = td["next"]
    for i, chat in enumerate(chats()):
        want = -0.1 * (by_hand(models()[0], *chat) - by_hand(models()[1], *chat))
        close(after["reward_kl"][i, : len(want), 0], want, 1e-4)


@S4("generate(batch, generation_config=None)")
def test_generate_batch_generation_config_None():
    defaults(RolloutFromModel.generate, "batch, generation_config=None")
    greedy = GenerationConfig(do_sample=False, max_new_tokens=4)
    one, two = (make().generate(batch(), greedy)[0] for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == (4, 9 + 4)


@S4("generate: the batch has input_ids and prompt_rindex")
def test_generate():
    with raises((KeyError, ValueError, AttributeError)):
        make().generate(TensorDict({"input_ids": batch().input_ids}, [4]))


@S4("generate returns generated [B, Ti + To], log_probs_gen and log_ratio")
def test_generate_returns_generated_B_Ti_To_log_probs_gen():
    generated, log_probs, ratio = rolled()[1]
    shapes = [tuple(value.shape) for value in (generated, log_probs, ratio)]
    assert shapes == [(4, 9 + STEPS), (4, STEPS, 1), (4, STEPS)]
    close(-0.1 * ratio[..., None], rolled()[0]["next", "reward_kl"])


@S4("static logprobs_of_labels(logits, labels)")
def test_static_logprobs_of_labels_logits_labels():
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    want = torch.distributions.Categorical(logits=logits).log_prob(labels)
    close(RolloutFromModel.logprobs_of_labels(logits, labels), want)
