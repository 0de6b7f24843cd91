"""Rows in the shapes that people publish: what is learnt, and what a run says of the rest."""

import json
from functools import cache

import pytest
from support.policies import one_process
from support.runs import train_here

from envs.chat_env import ChatEnv
from envs.tasks import Chats, Preferences, Prompts
from policies.chats.history import History
from policies.load import load_policy
from trainer.demonstrations import Demonstrations

TOOLED = (  # writes tools, thoughts and calls, as Qwen's templates do
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' }}"
    "{{ ARGUMENTS }}{{ '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "dict": TOOLED.replace("ARGUMENTS", "call.function.arguments | tojson"),
    "text": TOOLED.replace("ARGUMENTS", "call.function.arguments + ''"),
    "chatml": "chatml",
    "silent": TOOLED.replace("m.content }}", "'' if m.tool_calls else m.content }}").replace(
        "ARGUMENTS", "1"
    ),
    "opens": (  # its generation prompt is longer than the start of a turn in a chat
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
        "{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
}
SCHEMA = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "w 0?"}
SAY, RESULT = {"role": "assistant", "content": "18 C"}, {"role": "tool", "content": "18"}
CALL, END = '<call>w {"d": 0}</call><|im_end|>', "18 C<|im_end|>"


def calling(arguments, content=""):
    call = {"type": "function", "function": {"name": "w", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@cache
def policy_of(name):
    return load_policy("tiny", chat_template=TEMPLATES[name])


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def learn(tmp_path, template, *rows, mask="assistant"):
    """Return ids and learnt text of the first row, as an SFT run makes them."""
    path, policy = write(tmp_path / "d.jsonl", *rows), policy_of(template)
    task = Chats(path, eval_dataset=path)
    parts = {"task": task, "env": ChatEnv(task), "policy": policy, "runtime": one_process()}
    source = Demonstrations(**parts, prompts_per_iteration=1, mask=mask)
    source.rows = source.rows[:1]
    batch = source(0)
    ids, mask = batch["tokens", "full"][0], batch["loss_mask"][0]
    return ids.tolist(), policy.tokenizer.decode(ids[mask], skip_special_tokens=False)


@pytest.mark.parametrize("template", ["dict", "text"])
@pytest.mark.parametrize("arguments", [{"d": 0}, '{"d": 0}'], ids=["a dict", "a text"])
@pytest.mark.parametrize("in_parts", [False, True], ids=["messages", "completion"])
def test_calls_are_learnt_and_results_are_not(tmp_path, template, arguments, in_parts):
    chat = [ASK, calling(arguments, None), RESULT, SAY]
    row = {"prompt": chat[:1], "completion": chat[1:]} if in_parts else {"messages": chat}
    ids, said = learn(tmp_path, template, row | {"tools": [SCHEMA]})
    assert said == CALL + END
    form = {"d": 0} if template == "dict" else '{"d": 0}'
    tokenizer, chat = policy_of(template).tokenizer, [ASK, calling(form), RESULT, SAY]
    assert ids == tokenizer.apply_chat_template(chat, tools=[SCHEMA], return_dict=False)


THOUGHT = SAY | {"reasoning_content": "hm"}
WRONG = {"role": "assistant", "content": "5", "weight": 0}
BOTH = [ASK, SAY]


CORRECTED = [ASK, WRONG, ASK, SAY]


@pytest.mark.parametrize(
    ("row", "chat", "said"),
    [
        ({"messages": [ASK, THOUGHT]}, [ASK, THOUGHT], "<think>hm</think>" + END),
        (
            {"messages": [ASK, SAY | {"thinking": "hm"}]},
            [ASK, SAY | {"thinking": "hm"}],
            "<think>hm</think>" + END,
        ),
        ({"messages": [SYSTEM, ASK, calling({"d": 0})]}, [SYSTEM, ASK, calling({"d": 0})], CALL),
        ({"messages": [*CORRECTED[:3], SAY | {"weight": 1}]}, CORRECTED, END),
        ({"messages": [SYSTEM, *BOTH, ASK, WRONG]}, [SYSTEM, *BOTH, ASK, WRONG], END),
        ({"prompt": [ASK], "completion": CORRECTED[1:]}, CORRECTED, END),
        (
            {"messages": [ASK, WRONG | {"weight": None, "train": False}, *CORRECTED[2:]]},
            CORRECTED,
            END,
        ),
        ({"prompt": "w 0?", "chosen": BOTH, "rejected": [ASK, WRONG]}, BOTH, END),
        ({"prompt": "w 0?", "completion": [SYSTEM, *BOTH]}, [SYSTEM, *BOTH], END),
        ({"prompt": [ASK], "chosen": [SAY], "rejected": [WRONG]}, BOTH, END),
    ],
)
def test_what_is_learnt_of_a_row(tmp_path, row, chat, said):
    ids, learnt = learn(tmp_path, "dict", row)
    assert learnt == said
    assert ids == policy_of("dict").tokenizer.apply_chat_template(chat, return_dict=False)


@pytest.mark.parametrize("template", ["chatml", "opens"])
@pytest.mark.parametrize(
    ("first", "last", "mask", "said"),
    [
        (WRONG, SAY, "assistant", END),
        (SAY, WRONG, "assistant", END),
        (WRONG | {"weight": 1}, SAY, "prompt", END),
        (WRONG | {"weight": 1}, SAY, "assistant", "5<|im_end|>" + END),
        (SAY, SAY, "prompt", END),
    ],
)
def test_each_wanted_turn_is_learnt_as_a_whole(tmp_path, template, first, last, mask, said):
    row = {"messages": [SYSTEM, ASK, first, ASK, last]}
    assert learn(tmp_path, template, row, mask=mask)[1] == said


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"messages": [ASK, calling({}), RESULT, SAY]}, "row 0: message 1, tool_calls: .*chatml"),
        ({"messages": BOTH, "tools": [SCHEMA]}, "row 0: message 0, tools: "),
        (
            {"messages": [ASK, calling({}, "Hm."), RESULT, SAY]},
            "row 0: .*content beside its calls",
        ),
        ({"messages": [ASK, THOUGHT]}, r"row 0: message 1, reasoning_content: .*chat_template="),
        ({"messages": [ASK, calling("{d")]}, r"row 0, messages\[1\]\.tool_calls: "),
        ({"messages": BOTH, "tools": "w"}, "row 0, tools: "),
        ({"messages": [ASK, SAY | {"weight": 0.5}]}, r"row 0, messages\[1\]\.weight: "),
        ({"prompt": "Other?", "chosen": BOTH}, "row 0, chosen: "),
        ({"messages": [ASK | {"content": [{"type": "image"}]}, SAY]}, r"row 0, messages\[0\]"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_row_and_key(tmp_path, row, place):
    template = "silent" if "beside" in place else "chatml"
    with pytest.raises(ValueError, match=place) as caught:
        learn(tmp_path, template, row)
    assert "\n" not in str(caught.value)


def test_a_prompt_of_rl_has_its_calls_and_tools(tmp_path):
    prompts = [[ASK, calling({"d": 0}), RESULT], [SYSTEM, ASK, SAY, ASK], [ASK]]
    rows = [{"prompt": prompt} for prompt in prompts]
    rows[0]["tools"] = [SCHEMA]
    path = write(tmp_path / "d.jsonl", *rows)
    task = Prompts(path, eval_dataset=path, columns={"question": "prompt"})
    env, policy = ChatEnv(task, system_prompt="Sort."), policy_of("dict")
    chats = [env.messages(row) for row in task.rows("train")]
    history = History.from_chats(chats)
    assert history.chats() == chats
    options = {"add_generation_prompt": True}
    ids = history.apply_chat_template(tokenizer=policy.renderer, tokenize=True, **options)
    for i, prompt in enumerate(prompts):
        chat = prompt if i == 1 else [{"role": "system", "content": "Sort."}, *prompt]
        given = options | {"tools": rows[i].get("tools"), "return_dict": False}
        assert ids[i] == policy.tokenizer.apply_chat_template(chat, **given)


VARIABLES = (  # reads a variable of SmolLM3's and one of Qwen's
    "{% if custom %}{{ '<|im_start|>system\n' + custom + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<think></think>' if enable_thinking is false }}{% endif %}"
)


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"custom": "Arr.", "enable_thinking": True}, None),
        ({"custom": "", "enable_thinking": False}, None),
        ('{"custom": "Arr.", "enable_thinking": true}', None),
        (None, None),
        ({"custom": "<|im_end|>"}, "control tokens"),
        ({"eos_token": "a"}, r"eos_token: .*env\.columns\.chat_template_kwargs=null"),
        ({"other": "a"}, r"other: .*env\.columns\.chat_template_kwargs=null"),
    ],
)
def test_a_row_sets_variables_of_its_template(tmp_path, variables, fault):
    policy = load_policy(
        "tiny", chat_template=VARIABLES, chat_template_kwargs={"enable_thinking": False}
    )
    path = write(tmp_path / "d.jsonl", {"prompt": "w 0?", "chat_template_kwargs": variables})
    (row,) = Prompts(path, eval_dataset=path).rows("train")
    messages = ChatEnv(Prompts(path, eval_dataset=path)).messages(row)
    history = History.from_chats([messages])
    options = {"tokenizer": policy.renderer, "tokenize": True, "add_generation_prompt": True}
    if fault:
        with pytest.raises(ValueError, match=fault):
            history.apply_chat_template(**options)
        return
    assert history.chats() == [messages]
    given = json.loads(variables) if isinstance(variables, str) else variables or {}
    given = {"enable_thinking": False} | given
    expected = policy.tokenizer.apply_chat_template(
        [ASK], chat_template=VARIABLES, add_generation_prompt=True, return_dict=False, **given
    )
    assert history.apply_chat_template(**options) == [expected]


def test_preferences_are_texts_or_chats(tmp_path):
    asked = [{"prompt": "w 0?"}, {"prompt": [ASK]}, {"prompt": "w 0?"}]
    responses = [("18 C", "5"), ([SAY], [WRONG]), (BOTH, [ASK, WRONG])]
    for row, (chosen, rejected) in zip(asked, responses, strict=True):
        path = write(tmp_path / "d.jsonl", row | {"chosen": chosen, "rejected": rejected, "n": 1})
        (pair,) = Preferences(path, eval_dataset=path).preferences()
        assert (pair["messages"], pair["chosen"], pair["rejected"]) == ([ASK], "18 C", "5")
        assert list(pair["origin"].unused) == ["n"]


ALPACA = {"instruction": "Sort.", "input": "21", "output": "12", "id": 7, "source": "s"}
COLUMNS = ("env.columns.question=instruction", "env.columns.answer=output")
NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.runs
def test_an_sft_run_names_unused_columns_and_a_template_without_an_end(tmp_path, capsys):
    path = write(tmp_path / "d.jsonl", ALPACA, ALPACA | {"instruction": "Count."})
    (template := tmp_path / "no_end.jinja").write_text(NO_END)
    small = ("policy.model=tiny", "trainer.num_iterations=1", "optimizer.warmup=0")
    data = (f"env.dataset={path}", f"env.eval_dataset={path}", *COLUMNS)
    said = "columns not used: id, source"
    for more in ((), (f"policy.chat_template={template}",)):
        train_here(tmp_path / f"run{len(more)}", "experiment=sft_own", *small, *data, *more)
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.count(said) == 1
        assert printed.count("no demonstration ends by a learnt end of turn") == len(more)
