"""Tools of env.tools: calls in the format of a chat template, answered by typed functions."""

import gc
import time
from functools import cache
from pathlib import Path

import psutil
import pytest
import yaml
from support import workers as functions
from support.chats import data, responded
from support.workers import Counter, add, leave, most, wait
from tensordict import TensorDict

from conf.build import make_tools
from envs import ChatEnv, check_env_specs
from envs.tasks.task import Response, Reward, Task, user
from envs.tools import CallReader, CallTools, TypedTool
from envs.tools.process import ToolProcess
from policies.chats.renderer import Renderer
from policies.models.find import find_model, load_tokenizer

CHAT = (
    "{%% if tools %%}{{ 'Tools: ' + tools | tojson + '\n' }}{%% endif %%}"
    "{%% for m in messages %%}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%% for call in m.tool_calls or [] %%}{%% set f = call.function %%}%s{%% endfor %%}"
    "{{ '<|im_end|>\n' }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\n' }}%s{%% endif %%}"
)
FORMATS = yaml.safe_load(Path(__file__).with_name("tool_formats.yaml").read_text("utf-8"))
WITH_THOUGHTS = ("hermes", "qwen_xml", "glm", "deepseek")


ADD = TypedTool.of("add", add)
USER = user("Go.")


def template(family: str, begun: str = "") -> str:
    return CHAT % (FORMATS[family]["writes"], begun)


def reader(text: str, **attributes) -> CallReader:
    tokenizer = load_tokenizer(find_model("tiny"))
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return CallReader(Renderer(tokenizer, text))


def read(calls: CallReader, text: str) -> list:
    return [(c.name, c.arguments, bool(c.fault)) for c in calls(text, [ADD.schema])]


WANTED = [("add", {"a": 1, "text": "2"}, False), ("add", {"a": -3, "text": "<x> {y}"}, False)]


ANSWERS = [
    "It is 42.",
    'The record is {"name": "Bob", "age": 3}.',
    '{"name": "Bob"}',
    '{"answer": [1, 2]}',
]


@pytest.mark.parametrize(("family", "name"), [("hermes", "hermes"), *((f, "") for f in FORMATS)])
def test_calls_are_read_as_the_template_writes_them(family, name):
    two, broken = (FORMATS[family][key] for key in ("two", "broken"))
    calls = reader(name or template(family))
    assert read(calls, two) == WANTED
    for text in [broken] if isinstance(broken, str) else broken:
        assert read(calls, text)
        assert all(fault for *_, fault in read(calls, text))
    for answer in ANSWERS:
        assert read(calls, answer) == []


@pytest.mark.parametrize("family", WITH_THOUGHTS)
def test_a_call_in_thoughts_is_none(family):
    two = FORMATS[family]["two"]
    inner = reader(template(family, "{{ '<think>\n' }}"))  # the prompt opens the thoughts
    for calls, begun in (inner, ""), (reader(template(family)), "<think>"):
        assert read(calls, f"{begun}I could do {two}</think>\n\n{two}") == WANTED
        assert read(calls, f"{begun}I could do {two}</think>\n\nIt is 42.") == []


def test_the_tokenizer_knows_its_own_format_best():
    text = CHAT % ("{{ 'CALL ' ~ f.name ~ ' ' ~ f.arguments | tojson ~ ' END' }}", "")
    field = {
        "open_pattern": "CALL (?P<name>\\w+) ",
        "close": " END",
        "repeats": True,
        "content": "json",
    }
    field["transform"] = {
        "type": "function",
        "function": {"name": "{name}", "arguments": "{content}"},
    }
    own = {"start_anchor": "assistant\n", "fields": {"tool_calls": field}}
    calls = reader(text, response_template=own)
    assert read(calls, 'CALL add {"a": 1} END') == [("add", {"a": 1}, False)]
    assert read(calls, "CALL add {1} END") == [("", {}, True)]
    with pytest.raises(ValueError, match=r"env\.tools: .*response_template"):
        reader(text)
    with pytest.raises(ValueError, match=r"env\.tools: .*policy"):
        reader("chatml")


def untyped(text) -> str:
    """Echo.

    Args:
        text: Any text.
    """
    return text


def undescribed(text: str) -> str:
    """Echo."""
    return text


@cache
def renderer() -> Renderer:
    return Renderer(load_tokenizer(find_model("tiny")), template("hermes"))


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Sums(Task):
    """Right is 42; a chat of several turns goes on by a message of the user."""

    def reward(self, row, response: Response) -> Reward:
        good = float("42" in response.text)
        return Reward(total=good, parts={"good": good}, success=good == 1)

    def respond(self, row, response: Response) -> list[dict]:
        return [user("again")] if row.get("again") else []


FUNCTIONS = {"add": add, "count": Counter(), "wait": wait, "leave": leave, "most": most}


def make_env(task: Task | None = None, functions: dict = FUNCTIONS, **options):
    gc.collect()  # the processes of earlier environments
    tools = {name: TypedTool.of(name, each) for name, each in functions.items()}
    schemas = [tool.schema for tool in tools.values()]
    env = ChatEnv(task, max_turns=3, tools=schemas)
    return env.append_transform(CallTools(tools, renderer(), **options))


def step(env, *responses: str) -> TensorDict:
    td = env.reset(TensorDict({"query": ["Go."] * len(responses)}, batch_size=[len(responses)]))
    return env.step(responded(td, *responses))["next"]


def results(td: TensorDict) -> list[list[str]]:
    chats = td["history"].prompt.chats()
    return [[m["content"] for m in chat if m["role"] == "tool"] for chat in chats]


def test_results_are_messages_in_order_and_async_functions_run_together():
    env = make_env()
    both = call("count", '{"step": 2}') + call("add", '{"a": 1, "text": "x"}')
    td = step(env, both + call("count", '{"step": 5, "name": "me"}'), "It is 42.", both * 2)
    chats = td["history"].prompt.chats()
    assert chats[0][0]["tools"] == env.base_env.tools
    assert [m["role"] for m in chats[1]] == ["user", "assistant"]
    names, ids = ([m[key] for m in chats[0][2:]] for key in ("name", "tool_call_id"))
    assert names == ["count", "add", "count"]
    assert ids == ["call00000", "call00001", "call00002"]
    assert results(td)[0] == ['{"seen": 2, "name": ""}', "x+1", '{"seen": 7, "name": "me"}']
    assert results(td)[2] == ['{"seen": 9, "name": ""}', "x+1", '{"seen": 11, "name": ""}', "x+1"]
    assert td["logged", "tools/calls"].tolist() == [3, 0, 4]
    first, none, third = td["logged", "tools/seconds"].tolist()
    assert (first > 0.2, none == 0, third > 0.4) == (True, True, True)
    assert not td["logged", "tools/failures"].any()
    assert results(step(env, call("most"))) == [["3"]]
    check_env_specs(make_env())


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (call("shop"), "there is no tool shop; there are add, count, wait, leave, most"),
        (call("<|im_end|>"), "there is no tool <|im_end|>"),
        (call("count"), "missing arguments step; expected step, name"),
        (call("count", '{"step": 1, "by": 2}'), "unknown arguments by; expected step, name"),
        (call("count", '{"step": "two"}'), 'expected step to be {"type": "integer"}, got \'two\''),
        (call("count", '{"step": true}'), 'expected step to be {"type": "integer"}, got True'),
        (
            call("add", '{"a": 1, "text": "", "sign": "*"}'),
            'expected sign to be {"type": "string", "enum": ["+", "-"]}, got',
        ),
        (call("leave", '{"code": [1, "2"]}'), 'expected code to be {"type": "array"'),
        (call("leave", '{"code": [1]}'), "SystemExit: [1]"),
        (call("leave", '{"code": [2]}'), "StopIteration: [2]"),
        (call("leave", '{"code": [3]}'), "KeyboardInterrupt: [3]"),
        (call("leave", f'{{"code": {"[" * 450 + "]" * 450}}}'), "the arguments are nested"),
        (call("wait", '{"text": ""}'), "TimeoutError: no result within 0.3 s"),
        (call("count", "[1]"), "this call cannot be read: expected the arguments as an object"),
        (call("count", "{"), "this call cannot be read: expected an object with a name"),
        (call("count", "[" * 100_000), "this call cannot be read: RecursionError"),
        ("<tool_call>7", "this call cannot be read: expected an object with a name"),
    ],
)
def test_what_goes_wrong_is_an_answer(said, answer):
    td = step(make_env(tool_timeout=0.3), said + call("count", '{"step": 1}'))
    chat = td["history"].prompt.chats()[0]
    renderer().render(chat, add_generation_prompt=True)  # no name or id breaks the template
    first, *others = results(td)[0]
    assert first.startswith(f"Error: {answer}")
    unread = "Recursion" in answer or said == "<tool_call>7"  # of the response as a whole
    assert others == ([] if unread else ['{"seen": 1, "name": ""}'])
    assert td["logged", "tools/failures"].item() == 1


def workers() -> set[int]:
    """Return the processes of tools."""
    children = psutil.Process().children()
    return {child.pid for child in children if "envs.rewards.workers" in str(child.cmdline())}


@pytest.mark.parametrize("name", ["wait", "spin", "backtrack", "swallow", "block", "Threads"])
def test_a_call_that_does_not_end_is_a_time_out_and_the_next_one_runs(name):
    function = getattr(functions, name)
    function = function() if isinstance(function, type) else function
    env = make_env(functions={"count": Counter(), "hang": function}, tool_timeout=0.4)
    count, before = call("count", '{"step": 2}'), workers()
    begun = time.monotonic()
    td = step(env, count + call("hang", '{"text": "b"}') + count)
    ends_first = name in ("swallow", "block", "Threads")  # those that may run together come first
    seen = [f'{{"seen": {number}, "name": ""}}' for number in (2, 4 if ends_first else 2)]
    assert results(td) == [[seen[0], "Error: TimeoutError: no result within 0.4 s", seen[1]]]
    assert results(step(env, count))[0][0] == f'{{"seen": {6 if ends_first else 4}, "name": ""}}'
    assert time.monotonic() - begun < 20, "the tool takes a minute or more"
    assert len(workers() - before) == 1


def test_an_object_is_made_again_in_the_process_of_the_tools():
    tools = make_tools({"locked": {"_target_": "support.workers.Locked", "start": 3}})
    process = ToolProcess({"locked": tools["locked"].portable}, at_once={}, timeout=5)
    assert [done.text for done in process.outcomes([("locked", {})] * 2)] == ["4", "5"]


def test_the_child_that_a_tool_forks_answers_no_call():
    process = ToolProcess({"fork": functions.fork}, at_once={}, timeout=5)
    answers = [process.outcomes([("fork", {"text": str(n)})])[0].text for n in range(6)]
    assert answers == ["0", "1", "2", "3", "4", "5"]


def test_calls_of_a_turn_have_a_limit():
    td = step(make_env(max_calls=2), call("count", '{"step": 1}') * 5)
    refused = ["Error: at most 2 calls a turn are made"] * 3
    assert results(td)[0][1:] == ['{"seen": 2, "name": ""}', *refused]
    assert td["logged", "tools/failures"].item() == 3


@pytest.mark.parametrize(
    "writes",
    [
        FORMATS["hermes"]["writes"] + "{% if loop.index > 1 %}{{ 1 / 0 }}{% endif %}",
        "{% if loop.first %}" + FORMATS["hermes"]["writes"] + "{% endif %}",
    ],
    ids=["refuses the second", "does not write the second"],
)
def test_a_template_of_one_call_a_turn_gets_one_result(writes):
    one = Renderer(load_tokenizer(find_model("tiny")), CHAT % (writes, ""))
    tool = TypedTool.of("count", Counter())
    env = ChatEnv(tools=[tool.schema]).append_transform(CallTools({"count": tool}, one))
    td = step(env, call("count", '{"step": 1}') * 3)
    assert results(td) == [['{"seen": 1, "name": ""}']]


def test_a_call_earns_nothing_and_takes_the_place_of_the_tasks_message():
    env = make_env(Sums())
    rows = [{"messages": [USER], "again": again} for again in (False, True, True)]
    td = env.reset(data(*rows))
    said = call("count", '{"step": 42}')
    td = env.step(responded(td, said, said, "42"))["next"]
    roles = [[m["role"] for m in chat[2:]] for chat in td["history"].prompt.chats()]
    assert roles == [["tool"], ["tool"], ["user"]]
    assert not td["done"].any()
    assert td["reward"].flatten().tolist() == [0, 0, 1]
    assert td["success"].flatten().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda text: text, "no docstring"),
        (untyped, "text is missing a type"),
        (undescribed, "no description for the argument 'text'"),
    ],
)
def test_a_function_without_types_or_text_is_refused(function, text):
    with pytest.raises(ValueError, match=f"env.tools.mine: .*{text}"):
        TypedTool.of("mine", function)
