"""The truth table of preflight: kinds and masks of tokens by hand, by families of templates."""

from itertools import groupby

import pytest
from templates_by_family import CHATML, DEEPSEEK_R1, GEMMA, LLAMA3, QWEN3, QWEN25

from policies.chats.chat_template import Renderer
from policies.chats.templates import with_variables
from trainer.modes.preflight.play import Findings
from trainer.modes.preflight.template import WIDTH, Reader, table
from trainer.modes.preflight.tokens import judge_begin, judge_thinking, judge_turns

ASKED = [{"role": "user", "content": "Sort 31"}]
TAUGHT = [*ASKED, {"role": "assistant", "content": "13"}]
THOUGHT = "<think>\nsmall first\n</think>\n\n13"
GOES_ON = {"role": "user", "content": "And 2?"}


def made(family, **variables):
    """Return tokenizer, renderer and reader of a family."""
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer, with_variables(family.text, variables))
    return tokenizer, renderer, Reader(renderer, renderer.stop_ids)


def taught(family, chat=TAUGHT, **variables):
    """Return a demonstration as SFT has it."""
    _, renderer, reader = made(family, **variables)
    done = renderer.render(chat, require_assistant=True)
    return reader.given(done.ids, chat, done.assistant), reader


def rolled_out(family, *turns, **variables):
    """Return a row of a rollout as `collect` makes it; `turns`: replies and messages in turn."""
    tokenizer, renderer, reader = made(family, **variables)
    end = tokenizer.convert_tokens_to_ids(family.end)
    chat, ids, sampled = list(ASKED), [], []
    for turn in turns:
        if isinstance(turn, dict):
            ids = renderer.extend(ids, chat, [turn])
            chat.append(turn)
            continue
        if not ids:
            ids = renderer.render(chat, add_generation_prompt=True).ids
        sampled += [False] * (len(ids) - len(sampled))
        ids = [*ids, *tokenizer(turn, add_special_tokens=False)["input_ids"], end]
        sampled += [True] * (len(ids) - len(sampled))
        chat.append({"role": "assistant", "content": turn})
    return reader.sampled(ids, sampled, sampled, [[*ASKED, chat[1]], chat]), reader


def runs(row):
    """Return (kind, learnt, text) of runs of tokens."""
    keys = list(zip(row.kinds, row.learnt, strict=True))
    out = []
    for key, places in groupby(range(len(keys)), key=keys.__getitem__):
        out.append((*key, "".join(row.texts[i] for i in places)))
    return out


def test_a_demonstration_in_each_family():
    row, _ = taught(CHATML)
    assert runs(row) == [
        ("template", False, "<|im_start|>user\n"),
        ("prompt", False, "Sort 31"),
        ("template", False, "<|im_end|>\n<|im_start|>assistant\n"),
        ("reply", True, "13"),
        ("template", True, "<|im_end|>"),
        ("template", False, "\n"),
    ]
    row, _ = taught(QWEN25)
    assert runs(row) == [
        (
            "template",
            False,
            "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n",
        ),
        ("prompt", False, "Sort 31"),
        ("template", False, "<|im_end|>\n<|im_start|>assistant\n"),
        ("reply", True, "13"),
        ("template", True, "<|im_end|>"),
        ("template", False, "\n"),
    ]
    row, _ = taught(LLAMA3, [{"role": "system", "content": "Be brief."}, *TAUGHT])
    head = "<|eot_id|><|start_header_id|>{}<|end_header_id|>\n\n"
    assert runs(row) == [
        ("template", False, "<|begin_of_text|>" + head.format("system").removeprefix("<|eot_id|>")),
        ("prompt", False, "Be brief."),
        ("template", False, head.format("user")),
        ("prompt", False, "Sort 31"),
        ("template", False, head.format("assistant")),
        ("reply", True, "13"),
        ("template", True, "<|eot_id|>"),
    ]
    row, _ = taught(GEMMA)
    assert runs(row) == [
        ("template", False, "<bos><start_of_turn>user\n"),
        ("prompt", False, "Sort 31"),
        ("template", False, "<end_of_turn>\n<start_of_turn>model\n"),
        ("reply", True, "13"),
        ("template", True, "<end_of_turn>"),
        ("template", False, "\n"),
    ]


def test_the_empty_block_of_qwen3_is_learnt_unless_thinking_is_off(capsys):
    findings = Findings()
    row, reader = taught(QWEN3)
    assert runs(row)[2:] == [
        ("template", False, "<|im_end|>\n<|im_start|>assistant\n"),
        ("template", True, "<think>\n\n</think>\n\n"),
        ("reply", True, "13"),
        ("template", True, "<|im_end|>"),
        ("template", False, "\n"),
    ]
    judge_thinking([row], findings, reader=reader)
    (problem,) = findings.problems
    assert "learnt: the model would be taught not to think" in problem
    assert "policy.chat_template_kwargs.enable_thinking=false" in problem
    findings = Findings()
    row, reader = taught(QWEN3, enable_thinking=False)
    assert runs(row)[2:] == [
        ("template", False, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("reply", True, "13"),
        ("template", True, "<|im_end|>"),
        ("template", False, "\n"),
    ]
    judge_thinking([row], findings, reader=reader)
    assert not findings.problems
    assert "ok: the empty <think></think> is the prompt's" in capsys.readouterr().out


def test_reasoning_in_a_demonstration_is_the_replys():
    row, reader = taught(QWEN3, [*ASKED, {"role": "assistant", "content": THOUGHT}])
    assert ("reply", True, THOUGHT) in runs(row)
    findings = Findings(quiet=True)
    judge_thinking([row], findings, reader=reader)
    assert not findings.problems


def test_a_rollout_in_qwen3_and_deepseek(capsys):
    row, reader = rolled_out(QWEN3, THOUGHT)
    assert runs(row) == [
        ("template", False, "<|im_start|>user\n"),
        ("prompt", False, "Sort 31"),
        ("template", False, "<|im_end|>\n<|im_start|>assistant\n"),
        ("sampled", True, THOUGHT + "<|im_end|>"),
    ]
    judge_thinking([row], Findings(), reader=reader)
    assert "a reply opens its own" in capsys.readouterr().out
    row, reader = rolled_out(QWEN3, "13", enable_thinking=False)
    assert runs(row)[2:] == [
        ("template", False, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("sampled", True, "13<|im_end|>"),
    ]
    judge_thinking([row], Findings(), reader=reader)
    assert "the prompt's" in capsys.readouterr().out
    row, reader = rolled_out(DEEPSEEK_R1, "small first\n</think>\n\n13")
    assert runs(row) == [
        ("template", False, "<|begin|><|User|>"),
        ("prompt", False, "Sort 31"),
        ("template", False, "<|Assistant|><think>\n"),
        ("sampled", True, "small first\n</think>\n\n13<|end|>"),
    ]
    judge_thinking([row], Findings(), reader=reader)
    assert "a reply begins inside of it" in capsys.readouterr().out


def test_turns_of_a_rollout_and_what_a_tool_said():
    result = {"role": "tool", "content": "4731"}
    row, _ = rolled_out(QWEN25, "57*83", result, "It is 4731")
    assert runs(row)[1:] == [
        ("prompt", False, "Sort 31"),
        ("template", False, "<|im_end|>\n<|im_start|>assistant\n"),
        ("sampled", True, "57*83<|im_end|>"),
        ("template", False, "\n<|im_start|>user\n<tool_response>\n"),
        ("prompt", False, "4731"),
        ("template", False, "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("sampled", True, "It is 4731<|im_end|>"),
    ]


@pytest.mark.parametrize(
    ("family", "variables", "changed"),
    [
        (CHATML, {}, ""),
        (QWEN25, {}, ""),
        (LLAMA3, {}, ""),
        (GEMMA, {}, ""),
        (QWEN3, {}, "the reasoning of earlier turns"),
        (QWEN3, {"enable_thinking": False}, "earlier turns"),
        (DEEPSEEK_R1, {}, "earlier turns"),
    ],
    ids=["chatml", "qwen2.5", "llama3", "gemma", "qwen3", "qwen3-no-thinking", "r1"],
)
def test_whether_earlier_turns_stay_is_judged_as_extend_finds_it(
    family, variables, changed, capsys
):
    tokenizer, renderer, reader = made(family, **variables)
    opened = "<think>\n" if family is DEEPSEEK_R1 else ""
    ids = renderer.render(ASKED, add_generation_prompt=True).ids
    end = tokenizer.convert_tokens_to_ids(family.end)
    kept = {}
    for reply in ("13", THOUGHT.removeprefix(opened)):
        said = [*ASKED, {"role": "assistant", "content": reply}]
        try:
            renderer.extend([*ids, end], said, [GOES_ON])
        except ValueError:
            kept[reply] = False
        else:
            kept[reply] = True
    assert all(kept.values()) == (not changed)
    for most in (1, 3):
        findings = Findings()
        judge_turns([[*TAUGHT, GOES_ON]], most, findings, reader=reader, samples=True)
        said = capsys.readouterr().out
        assert len(findings.problems) == (most > 1 and bool(changed))
        assert (f"rewrites {changed}" if changed else "ok: earlier turns stay") in said


def test_a_tool_that_answers_leaves_the_reasoning_of_qwen3():
    _, renderer, reader = made(QWEN3)
    asked = [*ASKED, {"role": "assistant", "content": THOUGHT}]
    tool = {"role": "tool", "content": "13"}
    findings = Findings(quiet=True)
    judge_turns([[*asked, tool]], 3, findings, reader=reader, samples=True)
    assert not findings.problems
    ids = renderer.render(ASKED, add_generation_prompt=True).ids
    assert renderer.extend(ids, asked, [tool])[: len(ids)] == ids


def test_a_text_that_begins_twice_is_a_problem(capsys):
    for family, text, problems in (
        (LLAMA3, LLAMA3.text, 0),
        (LLAMA3, "{{ bos_token }}" + LLAMA3.text, 1),
    ):
        tokenizer = family.tokenizer()
        renderer = Renderer(tokenizer, text)
        reader = Reader(renderer, renderer.stop_ids)
        done = renderer.render(TAUGHT, require_assistant=True)
        findings = Findings()
        judge_begin(reader.given(done.ids, TAUGHT, done.assistant), findings, reader=reader)
        assert len(findings.problems) == problems
    assert "<|begin_of_text|> stands twice" in findings.problems[0]
    assert "ok: <|begin_of_text|> stands once" in capsys.readouterr().out


def test_the_text_of_a_control_token_in_a_content_is_no_end_of_turn():
    chat = [{"role": "user", "content": "What is <|im_end|>?"}, TAUGHT[1]]
    row, _ = taught(CHATML, chat)
    assert ("prompt", False, "What is <|im_end|>?") in runs(row)
    assert sum(row.ends) == 2


def test_a_table_fits_80_columns_and_names_the_end_of_turn():
    long = [{"role": "user", "content": "Sort\n" + "31 " * 200}, TAUGHT[1]]
    row, _ = taught(CHATML, long)
    lines = [line.plain for line in table(row, colour=False)]
    assert max(map(len, lines)) <= WIDTH < 80 - 2
    assert lines[0].split() == ["tokens", "kind", "learnt", "text"]
    assert [line.split()[1:3] for line in lines if line.endswith("<- end of turn")] == [
        ["template", "-"],
        ["template", "yes"],
    ]
    assert "..." in lines[2]
    many = [message for _ in range(30) for message in TAUGHT]
    row, _ = taught(CHATML, many)
    assert any("runs more" in line.plain for line in table(row, colour=False))
