"""Transforms of chats: versions, ids that keep up with the history."""

import uuid

import pytest
import torch
from contracts import Words, make_policy, prompts
from tensordict import TensorDict, lazy_stack

from envs import ChatEnv, TransformedEnv
from envs.chat_io import change_chats
from envs.tasks.task import Reply, Reward, Task
from envs.transforms import IncrementalTokenizer, PolicyVersion, ToolTransformBase, Transform
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
    named = PolicyVersion("uuid")
    first = named.version
    named.increment_version()
    assert uuid.UUID(first) != uuid.UUID(named.version)
    assert named(TensorDict(batch_size=[2]))["policy_version"] == [named.version] * 2


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


def test_the_tokenizer_writes_where_it_is_asked_to_by_the_template_it_is_given():
    tokenizer = make_policy().tokenizer
    keys = {"history_key": ("history", "prompt"), "tokens_key": ("ids", "prompt")}
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    quiet = IncrementalTokenizer(
        tokenizer, chat_template=plain, add_generation_prompt=False, **keys
    )
    env = TransformedEnv(ChatEnv(batch_size=1), quiet)
    ids = env.reset(TensorDict({"query": "Hi"}, batch_size=[1]))["ids"][0].get("prompt")
    assert tokenizer.decode(ids) == f"user: Hi{tokenizer.eos_token}"


class EditLastTurn(Transform):
    """Write over the last reply."""

    def _step(self, tensordict, next_td):
        edit = lambda chat: [{**m, "content": "No."} for m in chat]  # noqa: E731
        change_chats(next_td, dict.fromkeys(range(len(next_td)), edit))
        return next_td


def test_the_trainer_refuses_edited_turns():
    """What was sampled is what is trained on."""
    env = ChatEnv(Words(2), group_size=2, max_turns=2).append_transform(EditLastTurn())
    with pytest.raises(ValueError, match="a transform edited"):
        collect(prompts(2), env, make_policy())
