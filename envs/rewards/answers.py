"""Is this answer right? Pure functions of texts; numbers are compared as in tasks/math_words.py.

Left out on purpose: symbolic equality by ourselves; math-verify does it where it is installed.
"""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction

from envs.tasks.math_words import ANSWER_TAG, marked_answer, same_answer

THINK_TAG = re.compile(r"<think>(.*?)</think>", re.DOTALL)
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
SPACING = re.compile(r"\\(?:left|right|[!,;:])|[\s$]|\\text\{[^{}]*\}$")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST = 500  # characters of an expression that is worth parsing


def tagged(text: str) -> tuple[str, str]:
    """Return what stands in the first <think> and in the last <answer>, "" without.

    >>> tagged("<think>6 * 7</think> <answer>41</answer> no, <answer>42</answer>")
    ('6 * 7', '42')
    """
    thought, answers = THINK_TAG.search(text), ANSWER_TAG.findall(text)
    return (thought[1].strip() if thought else "", answers[-1].strip() if answers else "")


def final_answer(solution: str) -> str:
    """Return the answer that a solution marks by ####, <answer> or \\boxed, else all of it."""
    marked = marked_answer(solution)
    return (solution if marked is None else marked).strip()


def same_number(said: str, solution: str) -> bool:
    """Return whether an answer is the final one of a solution, as in GSM8K.

    >>> same_number("72 clips", "48 + 24 = 72 #### 72"), same_number("322", "#### 72")
    (True, False)
    """
    return same_answer(said, final_answer(solution))


def same_mathematics(said: str, solution: str, *, symbolic: bool = False) -> bool:
    r"""Return whether an answer is the boxed one of a solution, as in MATH.

    Plain: the same number, else the same LaTeX without spacing. `symbolic` asks math-verify.

    >>> same_mathematics("1/2", r"so \boxed{\dfrac{1}{2}}"), same_mathematics("x+1", r"\boxed{x}")
    (True, False)
    """
    right = final_answer(solution)
    if symbolic:
        return _verify(said, right)
    plain = [SPACING.sub("", FRACTION.sub(r"\1/\2", text)) for text in (said, right)]
    return plain[0] == plain[1] or same_answer(*plain)


def _verify(said: str, right: str) -> bool:
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("symbolic=True needs math-verify: pip install math-verify") from error
    return bool(verify(parse(f"${right}$"), parse(f"${said}$")))


def solves_countdown(said: str, solution: str) -> bool:
    """Return whether an expression makes the target from the numbers, each used at most once.

    `solution` is "target=24, numbers=1,2,3,4"; only + - * / and brackets count.

    >>> solution = "target=24, numbers=2,3,4"
    >>> solves_countdown("(2 * 3) * 4", solution), solves_countdown("4 * 6", solution)
    (True, False)
    """
    target = re.search(r"target\s*=\s*(-?\d+)", solution)
    numbers = re.search(r"numbers\s*=\s*([\d,\s]+)", solution)
    if target is None or numbers is None:
        raise ValueError(f"expected 'target=<int>, numbers=<int>,<int>,...', got {solution[:80]!r}")
    given = Counter(int(n) for n in re.findall(r"\d+", numbers[1]))
    used: Counter[int] = Counter()
    try:
        tree = ast.parse(said.strip()[: LONGEST + 1], mode="eval").body
        value = _value(tree, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return len(said.strip()) <= LONGEST and not used - given and value == int(target[1])


def _value(node: ast.AST, used: Counter[int]) -> Fraction:
    """Return the exact value of an expression and count its numbers; ValueError for others."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("expected numbers, + - * / and brackets")
