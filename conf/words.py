"""What is wrong with the form of a command line, before Hydra parses it. Torch-free."""

import difflib
import re
from collections import Counter
from collections.abc import Sequence

from conf import explain
from conf.foreign import known_elsewhere
from conf.help import about

SHOW = ("job", "hydra", "all")
FLAGS = {  # of Hydra
    *("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p"),
    *("--run", "-r", "--multirun", "-m", "--shell-completion", "-sc", "--info", "-i"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    "--experimental-rerun",
}


def split(words: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the flags of a command line, and its overrides in their order.

    >>> split(["-m", "seed=1,2", "kl.coeff=0"])
    ({'-m'}, ['seed=1,2', 'kl.coeff=0'])
    """
    return {w for w in words if w[:1] == "-"}, [w for w in words if w[:1] != "-"]


def spell_out(words: Sequence[str]) -> list[str]:
    """Return the words with env.task=<name> as env.task.name=<name>: the task itself is a node.

    >>> spell_out(["env=reasoning_gym", "env.task=chain_sum,sudoku", "env.task={a: 1}"])
    ['env=reasoning_gym', 'env.task.name=chain_sum,sudoku', 'env.task={a: 1}']
    """
    return [re.sub(r"^env\.task=(?=\w[\w,]*$)", "env.task.name=", word) for word in words]


def check_flags(words: Sequence[str]) -> None:
    """Raise ValueError for a flag that Hydra does not have."""
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        after = next(iter(words[place + 1 :]), "")
        value = value or (after if after[:1] != "-" and "=" not in after else "")
        if flag.startswith("-") and flag not in FLAGS:
            write = f"write {flag.lstrip('-')}={value or '...'}" if len(flag) > 2 else "see --help"
            raise ValueError(f"there is no flag {flag}{known_elsewhere(flag) or f'; {write}'}")
        if flag in ("--cfg", "-c") and value not in SHOW:
            raise ValueError(f"expected {flag} {' | '.join(SHOW)}, got {value or 'none'}")


def check_overrides(words: Sequence[str]) -> None:
    """Raise ValueError for a word that is no name=value, removes a key or repeats a name."""
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("~") and not word.startswith("~env.task."):
            raise ValueError(f"{word}: no key can be removed; give it a value, {name[1:]}=...")
        if word.startswith("~"):
            continue
        if "=" not in word or not name:
            meant = _meant(word, words)
            raise ValueError(f"expected name=value, got {word!r}{meant}")
    count = Counter(word.partition("=")[0].lstrip("+") for word in words)
    for key in (key for key, times in count.items() if times > 1):
        raise ValueError(f"{key} is given {count[key]} times; give it once, or sweep: -m {key}=a,b")


def _meant(word: str, words: Sequence[str]) -> str:
    """Return a hint at the override that a word without a name or a value stands for."""
    place = list(words).index(word)
    after = list(words[place + 1 : place + 3])
    if after and after[0].startswith("="):
        return f"; write {word}{''.join(after if after[0] == '=' else after[:1])}, without blanks"
    close = difflib.get_close_matches(word, about("experiment"), n=1)
    if close:
        return f"; did you mean experiment={close[0]}?"
    if explain.is_known(word):
        value = after[0] if after and "=" not in after[0] else "..."
        return f"; did you mean {word}={value}?"
    return ""
