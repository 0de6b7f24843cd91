"""Tools in a chat: calls are read, executed in order, and answered in the next prompt."""

import threading
from itertools import groupby

import pytest
import torch
from omegaconf import OmegaConf
from support.chats import data, responded
from support.policies import make_policy, plain_log_probs
from support.workers import NASTY, say_nasty
from tensordict import TensorDict

from conf.build import make_task
from conf.compose import compose_checked
from conf.plan import plan
from envs import ChatEnv
from envs.tasks.task import Response, Reward, Task, assistant, user
from envs.tools import Call, CallTools, TypedTool
from envs.transforms import (
    ExecuteToolsInOrder,
    JSONCallParser,
    PythonInterpreter,
    SimpleToolTransform,
    ToolCall,
    ToolRegistry,
    XMLBlockParser,
)
from policies.chats.renderer import Renderer
from policies.load import load_policy
from policies.models.find import find_model, load_tokenizer
from policies.random import fold
from trainer.collect import collect
from trainer.transcripts import transcript


def add(a: int, b: float = 1.0) -> float:
    """Add two numbers.

    More words.
    """
    return a + b


class Search:
    """Find pages."""

    name = "search"
    schema_in = {"query": str}  # noqa: RUF012

    def __call__(self, query, **kwargs):
        return {"results": [query], "asked": len(kwargs["_state"]["messages"])}


def broken():
    raise OSError("no such disk")


def leave():
    raise SystemExit(2)


def say(env, td: TensorDict, *responses: str) -> TensorDict:
    return env.step(responded(td, *responses))["next"]


def step(transform, *responses: str) -> TensorDict:
    """Reset one chat for each response, and say it."""
    env = ChatEnv().append_transform(transform)
    td = env.reset(TensorDict({"query": ["Go."] * len(responses)}, batch_size=[len(responses)]))
    return say(env, td, *responses)


def call(name: str, args: str = "", tag: str = "") -> str:
    return f'<tool name="{name}"{tag}>{args}</tool>'


def in_order(**options) -> ExecuteToolsInOrder:
    registry = ToolRegistry([add, Search()])
    registry.register(broken, name="disk")
    registry.register(leave, name="end")
    return ExecuteToolsInOrder(registry, XMLBlockParser(), **options)


XML, JSON = XMLBlockParser(), JSONCallParser()


@pytest.mark.parametrize(
    ("parser", "text", "calls", "rest"),
    [
        (XML, '<tool name="a">not json</tool>', [ToolCall("a", {"raw": "not json"})], ""),
        (XML, '<tool name="a">{"x": 1}', [], '<tool name="a">{"x": 1}'),
        (JSON, '```json\n{"tools": [{"tool": "a"}, {"tool": "b"}]}\n```',
         [ToolCall("a", {}), ToolCall("b", {})], ""),
        (JSON, '{"tools": ["a", 3]}', [ToolCall("a", {}), ToolCall("3", {})], ""),
        (JSON, "[" * 100_000, [], "[" * 100_000),
    ],
)  # fmt: skip
def test_calls_of_a_response(parser, text, calls, rest):
    assert parser(text) == {"text": rest, "calls": calls, "meta": {"count": len(calls)}}


def test_calls_are_executed_in_their_order_and_answered_in_one_message():
    response = call("search", '{"query": "KL"}', ' tag="A"') + call("add", '{"a": 2, "b": 3}')
    out = step(in_order(), response, "just words")
    called, other = out["history"].prompt.chats()
    said = '1. search [A] gave: {"results": ["KL"], "asked": 2}\n2. add gave: 5'
    assert called[2:] == [{"role": "tool", "content": said}]
    assert other[1:] == [assistant("just words")], "no padding message"
    assert not out["done"].any()


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (call("shop"), "1. shop failed: KeyError: "),
        (call("disk"), "1. disk failed: OSError: no such disk"),
        (call("end"), "1. end failed: SystemExit: 2"),
        (call("add", '{"a": "2"}'), "1. add failed: TypeError: "),
        (call("add", '{"a": 2, "_state": 1}'), "1. add failed: TypeError: _state"),
        # half of a pair, as JSON may hold it
        (call("search", '{"query": "\\ud83d?"}'), '1. search gave: {"results": ["??"], '),
    ],
)
@pytest.mark.parametrize("timeout", [None, 9.0])
def test_what_goes_wrong_is_data_for_the_policy(response, said, timeout):
    for stop in (True, False):
        out = step(
            in_order(timeout=timeout, stop_on_error=stop), response + call("add", '{"a": 1}')
        )
        text = out["history"].prompt.chats()[0][-1]["content"]
        assert text.startswith(said)
        assert text.endswith("\n2. add gave: 2.0") is not (stop and "failed" in said)


def test_simple_tools_are_plain_functions_and_one_that_hangs_has_failed():
    forever = threading.Event()
    tools = {"add": add, "wait": forever.wait}
    options = {"tool_call_pattern": r"CALL\[(.*?)\]\((.*?)\)", "tool_name": "helper"}
    simple = SimpleToolTransform(tools, {"wait": {}}, timeout=0.1, **options)
    out = step(simple, 'CALL[add]({"a": 4})', "CALL[wait]()")
    added, waited = (chat[-1] for chat in out["history"].prompt.chats())
    assert added == {"role": "helper", "content": "1. add gave: 5.0"}
    assert "TimeoutError" in waited["content"]
    forever.set()


class Sums(Task):
    """Right is 42."""

    def reward(self, row, response: Response) -> Reward:
        good = float("42" in response.text)
        return Reward(total=good, parts={"good": good}, success=good == 1)


def test_a_call_goes_on_and_earns_nothing_until_the_answer():
    """Even a call that holds the right number: only the last turn is the answer."""
    tools = in_order()
    env = ChatEnv(Sums(), max_turns=3).append_transform(tools)
    td = env.reset(data(*[{"messages": [user("6 * 7?")]}] * 2))
    out = say(env, td, call("add", '{"a": 42}'), "42")
    for key in ("reward", "done", "terminated", "success"):
        assert out[key].flatten().tolist() == [False, True], key
    assert out["reward_part", "good"].flatten().tolist() == [0.0, 1.0]
    out = out[:1]
    for role in ("tool", "assistant"):  # the third turn is the last one
        out = say(env, out, call("add", '{"a": 42}'))
        assert out["history"].prompt.chats()[0][-1]["role"] == role
    assert out["done"].all()


TOOLED = (  # ChatML with tools and calls as Hermes models write them
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def by_a_parser() -> SimpleToolTransform:
    tools = SimpleToolTransform({"say": say_nasty})
    tools.parser = lambda text: {"text": text, "calls": [ToolCall("say", {})], "meta": {}}
    return tools


def by_the_template() -> CallTools:
    tokenizer = load_tokenizer(find_model("tiny"))
    tools = CallTools({"say": TypedTool.of("say", say_nasty)}, Renderer(tokenizer, TOOLED))
    tools.read.__dict__["_read"] = lambda *_: [Call("say")]  # whatever the policy samples
    return tools


@pytest.mark.parametrize(
    ("tools", "label"), [(by_a_parser, "1. say gave: "), (by_the_template, "")]
)
def test_results_are_never_control_tokens_and_sampled_ids_never_change(tools, label):
    policy = make_policy(max_new_tokens=8)  # it samples ids of no text's encoding
    env = ChatEnv(group_size=4, max_turns=3).append_transform(tools())
    asked = TensorDict({"query": ["Go.", "6 * 7?"]}, batch_size=[2])
    batch = collect(asked.set("stream", fold(0, torch.arange(2))), env, policy)
    tokenizer, changed = policy.tokenizer, 0
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    for i in range(8):
        real = batch["masks", "all_attention_mask"][i]
        ids = batch["tokens", "full"][i][real]
        sampled = batch["masks", "all_response_mask"][i][real]
        pairs = zip(ids.tolist(), sampled.tolist(), strict=True)
        runs = [[token for token, _ in run] for _, run in groupby(pairs, lambda pair: pair[1])]
        chat = [user(asked["query"][i // 4])]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert runs[0] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(runs) == 6, "the prompt, three responses, and what stands between them"
        for response, between in zip(runs[1::2], runs[2::2], strict=False):
            control = [x for x in between if x in tokenizer.added_tokens_decoder]
            assert control == [end] * (response[-1] != end) + [start, end, start]
            assert f"{label}{NASTY}<|im_end|>" in tokenizer.decode(between)
        shown = transcript(batch, i, 1, kind="train")["messages"]
        assert [m["content"] for m in shown if m["role"] == "tool"] == [f"{label}{NASTY}"] * 2
        for response in runs[1::2]:
            again = tokenizer(tokenizer.decode(response), add_special_tokens=False)["input_ids"]
            changed += again != response
        got = batch["log_probs", "full"][i][real].double()
        assert torch.allclose(got, plain_log_probs(policy, ids, 1.0) * sampled, atol=1e-4)
    assert changed > 4, "of 24 responses: decode -> encode is not the identity"
    if not label:
        assert batch["logged", "tools/calls"].tolist() == [2] * 8


def code(text: str) -> str:
    return f"Let me see.\n```python\n{text}\n```\n"


def test_python_blocks_run_and_answer():
    responses = (code("a = 1\nprint(f'{a=}')") + code("print(a)"), "no code", code("print(6 * 7)"))
    chats = step(PythonInterpreter(timeout=20), *responses)["history"].prompt.chats()
    assert [len(c) for c in chats] == [4, 2, 3]
    assert chats[0][2]["content"] == "Code block 1 ran:\na=1"
    assert chats[0][3]["content"].startswith("Code block 2 failed:\n"), "each block starts afresh"
    assert chats[2][2] == {"role": "tool", "content": "Code block 1 ran:\n42"}


def test_a_configuration_mounts_its_tools_also_for_evaluations(tmp_path):
    (path := tmp_path / "d.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n' * 2)
    words = [f"env.dataset={path}", f"env.eval_dataset={path}"]
    cfg = OmegaConf.create(compose_checked(["experiment=grpo_tiny", "env=python_tool", *words]))
    task = make_task(cfg.env)
    parts = plan(OmegaConf.to_container(cfg))
    policy = load_policy("tiny", chat_template=TOOLED)
    env = parts.make_env(task, policy, []).with_group_size(1)
    td = env.reset(data(task.rows("eval")[0]))
    assert "Run Python code" in policy.renderer.text(td["history"].prompt.chats()[0])
    td = say(
        env, td, '<tool_call>{"name": "python", "arguments": {"code": "print(6*7)"}}</tool_call>'
    )
    assert td["history"].prompt.chats()[0][-1]["content"] == "42"
    assert say(env, td, "It is 42")["reward"].item() == 1
