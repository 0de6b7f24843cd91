"""Transforms of chats: versions, ids that keep up with the history, second thoughts."""

import uuid

import pytest
import torch
from contracts import Words, make_policy, prompts
from tensordict import TensorDict, lazy_stack

from envs import ChatEnv, TransformedEnv
from envs.tasks.task import Reply, Reward, Task
from envs.transforms import (
    AddThinkingPrompt,
    Compose,
    IncrementalTokenizer,
    PolicyVersion,
    ToolTransformBase,
)
from policies.chats.containers import Tokens
from policies.chats.history import History
from trainer.collect import collect


def test_a_policy_version_counts_or_names_the_policies():
    counted = PolicyVersion()
    env = TransformedEnv(ChatEnv(batch_size=(2,)), counted)
    td = env.reset(TensorDict({"query": "Hi"}, batch_size=[2]))
    assert td["policy_version"].tolist() == [0, 0]
    counted.increment_version()
    assert env.step(env.rand_action(td))["next", "policy_version"].tolist() == [1, 1]
    counted.version = 7
    changes = [(c.old_version, c.new_version) for c in counted.version_history]
    assert changes == [(None, 0), (0, 1), (1, 7)]
    assert counted.version_history[0].timestamp <= counted.version_history[1].timestamp
    named = PolicyVersion("uuid")
    first = named.version
    named.increment_version()
    assert uuid.UUID(first) != uuid.UUID(named.version)
    found = named(TensorDict(batch_size=[2, 1]))["policy_version"]
    assert found == [[named.version]] * 2 or found.tolist() == [[named.version]] * 2
    for wrong, change in ((counted, "a"), (named, 3)):
        with pytest.raises(ValueError, match="expected a version of type"):
            wrong.version = change
    with pytest.raises(ValueError, match="version_type int or 'uuid', got 'float'"):
        PolicyVersion("float")


class Hints(Task):
    """Answer each reply with a user's hint until the third."""

    def reward(self, row, reply: Reply) -> Reward:
        return Reward(total=1.0, parts={"said": 1.0}, success=True)

    def respond(self, row, reply: Reply):
        said = sum(m["role"] == "assistant" for m in reply.messages)
        return [] if said > 2 else [{"role": "user", "content": f"hint {said}"}]


class Noted(ToolTransformBase):
    """A tool whose answer is the length of the reply."""

    def _process_batch_item(self, content, index):
        return [str(len(content))] if index else None


def rendered(tokenizer, chats, **kwargs) -> list[list[int]]:
    """Return the ids of chats as transformers renders them."""
    return [
        tokenizer(tokenizer.apply_chat_template(c, tokenize=False, **kwargs))["input_ids"]
        for c in chats
    ]


@pytest.mark.parametrize("late", [True, False])
def test_ids_after_a_step_are_those_of_a_fresh_rendering(late):
    """End of turn, tool and user messages and the generation prompt included."""
    tokenizer = make_policy().tokenizer
    env = ChatEnv(Hints(), max_turns=3, tokenizer=tokenizer, with_tokenizer=True)
    # Behind the tokenizer the ids are dropped where the chat changed.
    env = env.append_transform(Noted()) if late else TransformedEnv(env, Noted())
    rows = [{"messages": [{"role": "user", "content": t}]} for t in ("Hi", "Sort 3 1 2")]
    td = env.reset(TensorDict({"query": [r["messages"] for r in rows]}, batch_size=[2]))
    for turn in range(2):
        chats = td["history"].prompt.chats()
        ids = [t.get("prompt").tolist() for t in td["tokens"].unbind(0)]
        assert ids == rendered(tokenizer, chats, add_generation_prompt=True)
        said = f"the number of people {turn}"
        full = [[*chat, {"role": "assistant", "content": said}] for chat in chats]
        td.set(("history", "full"), History.from_chats(full))
        new = tokenizer(said + "<|im_end|>", add_special_tokens=False)["input_ids"]
        sampled = [torch.tensor(row + new[: len(new) - k]) for k, row in enumerate(ids)]
        td.set("tokens", lazy_stack([Tokens(full=row) for row in sampled]))  # the second was cut
        td = env.step(td)["next"]
        if not late:
            assert "tokens" not in td
            return
    roles = [[m["role"] for m in chat] for chat in td["history"].prompt.chats()]
    assert roles[1] == ["user", *["assistant", "user", "tool"] * 2]


def test_the_sampled_ids_are_kept_even_where_they_are_not_what_their_text_gives():
    policy = make_policy()
    env = ChatEnv.with_tokenizer(policy.tokenizer, Words(2), group_size=4, max_turns=2)
    td = policy(env.reset(prompts(4)))
    following = env.step(td)["next"]
    changed = 0
    for i, chat in enumerate(following["history"].prompt.chats()):
        kept = td["tokens"][i].get("full")[td["masks"][i].get("all_attention_mask")].tolist()
        ids = following["tokens"][i].get("prompt").tolist()
        assert ids[: len(kept)] == kept
        changed += ids != rendered(policy.tokenizer, [chat], add_generation_prompt=True)[0]
    assert changed, "the test needs a reply on which decode -> encode is not the identity"
    again = policy(following.exclude("stream"))
    assert (
        again["tokens"][0].get("prompt").tolist()[-8:]
        == following["tokens"][0].prompt[-8:].tolist()
    )


def test_the_documented_options_of_the_tokenizer():
    tokenizer = make_policy().tokenizer
    keys = {"history_key": ("history", "prompt"), "tokens_key": ("ids", "prompt")}
    quiet = IncrementalTokenizer(tokenizer, add_generation_prompt=False, **keys)
    env = TransformedEnv(ChatEnv(batch_size=1), quiet)
    td = env.reset(TensorDict({"query": "Hi"}, batch_size=[1]))
    chat = [{"role": "user", "content": "Hi"}]
    assert td["ids"][0].get("prompt").tolist() == rendered(tokenizer, [chat])[0]
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    other = IncrementalTokenizer(tokenizer, chat_template=plain)
    td = TransformedEnv(ChatEnv(batch_size=1), other).reset(td.select("query"))
    assert tokenizer.decode(td["tokens"][0].get("prompt")).startswith("user: Hi")
    with pytest.raises(ValueError, match="expected tokens_key"):
        IncrementalTokenizer(tokenizer, tokens_key="tokens")


ANSWERED = "Half of 48 is 24. <answer>322</answer>"


def thinking(transform: AddThinkingPrompt, *replies: str, max_turns: int | None = 5) -> TensorDict:
    env = ChatEnv(Right(), max_turns=max_turns).append_transform(transform)
    query = [[{"role": "user", "content": "48 / 2 + 48?"}]] * len(replies)
    td = env.reset(TensorDict({"query": query}, batch_size=[len(replies)]))
    chats = zip(td["history"].prompt.chats(), replies, strict=True)
    full = [[*chat, {"role": "assistant", "content": text}] for chat, text in chats]
    td.set(("history", "full"), History.from_chats(full))
    return env.step(td)["next"]


class Right(Task):
    def reward(self, row, reply: Reply) -> Reward:
        good = "<answer>72</answer>" in reply.text
        return Reward(total=0.1 + 0.9 * good, parts={"good": float(good)}, success=good)


class Endless(Right):
    def respond(self, row, reply: Reply):
        return [{"role": "user", "content": "?"}]


def wrong(td) -> bool:
    return bool(td["reward"] < 1)


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_the_last_turn_is_really_edited(end):
    add = AddThinkingPrompt(wrong, "Wait, once more.")
    out = thinking(add, ANSWERED + end, "no tags" + end, "<answer>72</answer>" + end)
    said = [chat[-1]["content"] for chat in out["history"].prompt.chats()]
    assert said == [
        f"Half of 48 is 24. Wait, once more.{end}",
        f"no tags\n\nWait, once more.{end}",
        f"<answer>72</answer>{end}",
    ]
    assert [len(c) for c in out["history"].prompt.chats()] == [2, 2, 2]
    assert out["reward"].flatten().tolist() == [0.0, 0.0, 1.0]
    assert out["success"].flatten().tolist() == [False, False, True]
    for key in ("done", "terminated"):
        assert out[key].flatten().tolist() == [False, False, True]


def test_a_thought_may_be_a_message_that_costs_nothing():
    add = AddThinkingPrompt(wrong, role="user", edit_last_turn=False, undo_done=False)
    out = thinking(add, ANSWERED, "<answer>72</answer>")
    first, second = out["history"].prompt.chats()
    assert [m["role"] for m in first] == ["user", "assistant", "user"]
    assert "you" in first[-1]["content"], "not egocentric"
    assert len(second) == 2
    assert out["reward"].flatten().tolist() == pytest.approx([0.1, 1.0])
    assert out["done"].all()


def test_the_trainer_refuses_edited_turns_and_takes_messages():
    """What was sampled is what is trained on."""
    for edit in (True, False):
        add = AddThinkingPrompt(lambda td: td["turn"] < 2, edit_last_turn=edit)
        env = ChatEnv(Endless(), group_size=2, max_turns=2).append_transform(add)
        if edit:
            with pytest.raises(
                ValueError, match=r"that a transform edited; .*edit_last_turn=False"
            ):
                collect(prompts(2), env, make_policy())
        else:
            batch = collect(prompts(2), env, make_policy())
            text = make_policy().tokenizer.decode(batch["tokens", "full"][0])
            assert add.prompt in text


def test_prompts_may_be_random_and_limits_stay():
    add = AddThinkingPrompt(wrong, random_prompt=True, seed=1)
    drawn = {add.prompt for _ in range(20)}
    assert len(drawn) == 3
    twins = [AddThinkingPrompt(wrong, random_prompt=True, seed=1) for _ in range(2)]
    assert [twins[0].prompt for _ in range(9)] == [twins[1].prompt for _ in range(9)]

    env = ChatEnv(Endless(), max_turns=1).append_transform(AddThinkingPrompt(wrong))
    td = env.reset(TensorDict({"query": ["Hi"]}, batch_size=[1]))
    out = env.step(env.rand_action(td))["next"]
    assert out["truncated"].all(), "a turn limit is a limit"
    assert out["done"].all()
    assert out["reward"].item() == pytest.approx(0.1)
    with pytest.raises(ValueError, match="edit_last_turn expected role='assistant', got 'user'"):
        AddThinkingPrompt(wrong, role="user")
    text = ChatEnv(batch_size=1, input_mode="text", tokenizer=make_policy().tokenizer)
    env = TransformedEnv(text, Compose(AddThinkingPrompt(wrong)))
    td = env.rand_action(env.reset(TensorDict({"query": ["Hi"]}, batch_size=[1])))
    with pytest.raises(RuntimeError, match="must be used with a ChatEnv in history mode"):
        env.step(td)
