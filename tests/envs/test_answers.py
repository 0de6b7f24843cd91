"""Which part of a response is its answer, and when it is right: env=answers, gsm8k, math."""

import json
import time
from functools import cache

import math_verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.build import make_task
from conf.compose import compose_checked
from envs.answers.comparison import holds_words, plain, same_answer, same_currency, same_mathematics
from envs.answers.extraction import extract_answer, marked_answer, tagged
from envs.answers.numbers import last_number
from envs.tasks import Answers, MathProblems, MathWords, Response


def rows(path, *answers) -> str:
    """Write a question with each answer."""
    cells = [{"question": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    path.write_text("\n".join(map(json.dumps, cells)))
    return str(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>a</think> <answer>1</answer>", ("a", "1")),
        ("<think>so <answer>1</answer></think> hm", ("so <answer>1</answer>", "")),
        ("<think>so <answer>1</answer>", ("", "")),
        ("<answer>1</answer> <think>or <answer>2</answer>", ("", "1")),
        ("<answer>1<answer>2</answer> </answer>", ("", "2")),
    ],
)
def test_an_answer_stands_outside_of_thoughts(text, found):
    assert tagged(text) == found


@pytest.mark.parametrize(
    "piece", ["<answer>", "<think>", "</think><think>", "<answer><", "9", "$a"]
)
def test_endless_responses_cost_little(piece, tmp_path):
    text, start = piece * 20_000, time.monotonic()
    tagged(text)
    marked_answer(text)
    assert not same_answer(text, "18")
    same_currency(text, "\u20ac5")
    path = rows(tmp_path / "d.jsonl", "yes " * 50)
    for match in ("exact", "words", "normalised", "fuzzy"):
        task = Answers(path, eval_dataset=path, match=match)
        assert not task.reward(task.rows("train")[0], Response(text, True, [])).success
    assert time.monotonic() - start < 12, "38 s when every tag looked through the rest"


@given(st.fractions(max_denominator=10**6), st.sampled_from(["so {}.", "${}", "{} km", "1, {}"]))
def test_a_number_is_itself_in_every_spelling(number, form):
    assert last_number(form.format(number)) == number
    assert same_answer(form.format(number), str(number))
    assert not same_answer(form.format(number + 1), str(number))


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [
        ("$1,234,567.50", "1234567.5", True),
        ("25%", "25", True),
        ("it is \u22123", "-3", True),
        ("-$5", "-5", True),
        ("it costs \u20ac5", "$5", False),
        ("$5$", "\u20ac5", True),
        ("it costs \u20ac5.00", "\u20ac5", True),
        ("it costs \u00a55", "$5", False),
        ("it costs 5 Euros", "$5", False),
        ("so 1\u202f000 in all", "1000", True),
        ("in 2024\u00a0100 people", "100", True),
        ("it costs $6 or $5", "\u20ac5", False),
        ("it costs US$5", "5", True),
        ("1/0", "1", False),
        ("x + 1", "x+1", True),
        ("x + 1", "x+2", False),
        ("1e999999999", "1", False),
        ("", "", False),
    ],
)
def test_answers_are_compared_as_numbers(said, right, same):
    assert same_answer(said, right) is same


@pytest.mark.parametrize(
    ("said", "right", "good"),
    [
        (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}", True),
        (r"\left( 1, 2 \right)", r"\boxed{(1,2)}", True),
        ("12 cm", r"first \boxed{11}, then \boxed{12}", False),
        ("1 1/2", r"\boxed{1\frac12}", False),
        (r"\frac{-3}{6}", r"\boxed{-0.5}", True),
        ("(1,234)", r"\boxed{(1234)}", False),
        ("25%", r"\boxed{25\%}", True),
    ],
)
def test_plain_mathematics_is_the_same_only_where_it_is_exactly(said, right, good):
    assert same_mathematics(said, right) is good


@pytest.mark.parametrize(
    ("right", "wrong", "good"),
    [
        (
            "5",
            ".5  <5  5!  -5  5'  >5  5^2  5\u00b2  (5,5)",
            '5.  (5)  **5**  $5$  \\(5\\)  +5  "5.0"',
        ),
        ("50", ".50  50!", "50,"),
        ("0.5", "5  5.", ".5  1/2  \\frac12"),
        ("-3", "3", "\u22123  -3.0  -\\frac{6}{2}"),
        ("3/4", "34  3/5  4/3", "\\frac{3}{4}  0.75  \\dfrac34"),
        ("[0,1]", "(0,1)  [0,1)  (0,1]  0,1", "[0,1].  \\left[0,1\\right]"),
        ("(-inf,3)", "(-inf,3]  [-inf,3)  (-inf,3", "$(-inf,3)$"),
        ("{1,2}", "(1,2)  [1,2]  12", "\\{1,2\\}"),
        ("52", "5\u00b2  5^2", "52"),
        ("x'", "x  x''", "x'."),
        ("1,234", "1234!  123,4", "1234  **1,234.0**"),
        ("Lima", "Limas  Li-ma", "lima  LIMA!  **Lima**.  \u201cLima\u201d  (Lima)"),
    ],
)
def test_only_punctuation_without_meaning_is_ignored(right, wrong, good):
    for said in wrong.split("  "):
        assert plain(said) != plain(right), said
        assert not holds_words(f"It is {said}", right), said
    for said in good.split("  "):
        assert plain(said) == plain(right), said


@cache
def parsed(text: str) -> list:
    return math_verify.parse(f"${text}$", parsing_timeout=None)


# Expressions that both judge alike, and others. {m}, {n}: whole numbers; not 1e5, which is 5e for
# math-verify.
VALUES = [
    "{a}", "-{a}", "\u2212{m}", "+{m}", "{m}/{n}", "\\frac{{{m}}}{{{n}}}", "-\\frac{{{m}}}{{{n}}}",
    "(-{m},{n})", "[-{m}, {n}]", "(-{m}, {n}]", "[-{m},{n})", "(-{m}, {n})", "[-{m},{n}]",
]  # fmt: skip
OTHERS = [
    "({a},{b})", "[{a}, {b}]", "\\{{{a},{b}\\}}", "{{{a}, {b}}}", "{a}, {b}", "{a} {b}", "{a},{b}",
    "{a}{b}", "{a}.{b}", "{a}!", "{a}^2", "{a}\u00b2", "{a}^{{2}}", "x_{a}", "x'", "|{a}|",
    "\\sqrt{{{a}}}", "{a}\\%", "{a}<{b}", "{a} > {b}", "<{a}", "\\le {a}", "x+{a}", "x + {a}",
    "2(x+{a})", "-(x+{a})", "(-\\infty,{a}]", "(-\\infty, {a})",
]  # fmt: skip
NUMBERS = ["1", "2", "5", "12", "0.5", ".5", "2.0", "1000", "1,000", "234"]
WRITTEN = ["{}", " {}.", "${}$", "**{}**", "'{}'", '"{}"', "`{}`", "\\({}\\)", "({})", "Answer: {}"]


@st.composite
def expressions(draw) -> tuple[str, str]:
    """Draw an expression, and its shape."""
    shape = draw(st.sampled_from(VALUES) | st.sampled_from(OTHERS))
    a, b = (draw(st.sampled_from(NUMBERS)) for _ in range(2))
    m, n = (draw(st.sampled_from([1, 2, 5, 12])) for _ in range(2))
    return shape.format(a=a, b=b, m=m, n=n), shape


@settings(max_examples=200, deadline=None)
@given(expressions(), expressions(), st.sampled_from(WRITTEN))
def test_what_normalised_pays_math_verify_never_calls_wrong(one, other, written):
    (said, shape), (right, shape_of_right) = one, other
    written = "{}" if "," in said and written == "({})" else written  # a list would be an interval
    paid = plain(extract_answer(written.format(said))[0]) == plain(right)
    equal = said == right or math_verify.verify(parsed(right), parsed(said), timeout_seconds=None)
    assert equal or not paid
    if shape in VALUES and shape_of_right in VALUES:
        assert paid == equal


# right answer, what a response says, and by which matches it is right
CASES = [
    ("yes", " **Yes** ", "words normalised fuzzy"),
    ("yes", "yesterday", ""),
    ("yes", "<think>yes</think> no", ""),
    ("yes", "It may be no. #### yes", "exact words normalised fuzzy"),
    ("New York", "It is New York City", "words"),
    ("Mississippi", "Missisippi", "fuzzy"),
    ("1,000", "1000.0", "normalised fuzzy words"),
    ("A", "It is a city by the sea.", ""),
    ("I", "I think it is option C.", ""),
    ("A", "It is A, since Lima is a city.", "words"),
    ("B", "Option B is a city.", "words"),
    ("A", "The answer is A", "exact words normalised fuzzy"),
    ("34", "17 + 17 = 34.\nAnswer: 34", "exact words normalised fuzzy"),
    ("$5", "\u20ac5", ""),
    ("\u20ac5", "5.00", "words normalised fuzzy"),
    ("34", "I doubt that the answer is 34", "words"),
]


@pytest.mark.parametrize("match", ["exact", "words", "normalised", "fuzzy"])
def test_what_is_right_by_each_match(tmp_path, match):
    path = rows(tmp_path / "d.jsonl", *[right for right, _, _ in CASES])
    words = ["env=answers", f"env.dataset={path}", f"env.eval_dataset={path}", f"env.match={match}"]
    task = make_task(compose_checked(words)["env"])
    for row, (_, said, matches) in zip(task.rows("train"), CASES, strict=True):
        reward = task.reward(row, Response(said, True, []))
        assert reward.success is (match in matches.split()), (row["finals"], said)
        assert reward.total == reward.parts["correct"] == float(reward.success)


@pytest.mark.parametrize(
    ("text", "complete", "parts"),
    [
        ("42", True, (1, 0)),
        ("#### 42\nNot 8", True, (1, 1)),
        ("#### 8, not 42", True, (1, 1)),  # the mark's line, its last number
        ("#### 8 <answer>42</answer>", True, (1, 1)),
        (r"<answer>8</answer> \boxed{42}", True, (1, 1)),
        ("<think>#### 42</think> #### 8", True, (0, 1)),
        ("<think>#### 8</think> 42", True, (1, 0)),
    ],
)
def test_gsm8k_rewards_the_marked_number_before_the_last_one(tmp_path, text, complete, parts):
    path = rows(tmp_path / "d.jsonl", "six sevens #### 42")
    task = MathWords(path, eval_dataset=path)
    reward = task.reward(task.rows("train")[0], Response(text, complete, []))
    assert (reward.parts["correct"], reward.parts["format"]) == parts
    assert (reward.total, reward.success) == (parts[0], parts[0] == 1)


def test_right_answers_without_a_number_are_refused_from_half_of_the_rows_on(tmp_path):
    path = tmp_path / "a.jsonl"
    for answers in (["cold", "dry", "low"], ["4", "5 km", "dry", "x"]):
        with pytest.raises(ValueError, match="env=answers"):
            MathWords(rows(path, *answers))
        MathProblems(rows(path, *answers), symbolic=False)
    with pytest.warns(UserWarning, match="'dry'"):
        MathWords(rows(path, "4", "dry", "6"))
    MathWords(rows(path, "It is #### dry", "<answer>cold</answer>", "6 apples"))
