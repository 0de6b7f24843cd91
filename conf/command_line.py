"""The words of a command line, before anything is composed: flags, overrides, jobs of a sweep.

Torch-free. Also what the files of conf/ say of themselves, for --help.
"""

import difflib
import itertools
import re
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from conf import names
from conf.names import all_keys
from trainer.runs.failures import say
from trainer.runs.run_files import dig, read_yaml

FLAGS = (  # -m, and those of Hydra that show something and run nothing
    "--help -h --hydra-help --version --cfg -c --resolve --package -p --multirun -m -sc "
    "--shell-completion --info -i"
)
SWEEP = {"-m", "--multirun"}
OUTPUTS = "outputs"  # where runs lie, dated
ALLOW = (
    "a file of conf/ sets allow_targets, which counts on the command line alone; take it out of "
    "the file, and give allow_targets=true if you trust the code that the file names"
)


def flags_and_overrides(words: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the flags of a command line, and its overrides in their order.

    >>> flags_and_overrides(["-m", "seed=1,2", "kl.coeff=0"])
    ({'-m'}, ['seed=1,2', 'kl.coeff=0'])
    """
    return {w for w in words if w[:1] == "-"}, [w for w in words if w[:1] != "-"]


def without_flags(words: Sequence[str]) -> list[str]:
    """Return the words that are no flag, nor the value of one.

    >>> without_flags(["--cfg", "job", "-p", "kl", "kl.coeff=0"])
    ['kl.coeff=0']
    """
    values = {a for flag, a in itertools.pairwise(words) if flag[:1] == "-" and flag not in SWEEP}
    return [w for w in words if w[:1] != "-" and ("=" in w or w not in values)]


def spell_out(words: Sequence[str]) -> list[str]:
    """Return the words with what is short for another: env.task=<name>, resume=last.

    The task itself is a node, its name env.task.name; the last run is the newest of outputs/.

    >>> spell_out(["env=reasoning_gym", "env.task=chain_sum,sudoku", "env.task={a: 1}"])
    ['env=reasoning_gym', 'env.task.name=chain_sum,sudoku', 'env.task={a: 1}']
    """
    if "resume=last" in words and not Path("last").exists():
        from conf.resume import last_run  # here: most starts do not need it

        trained = any(word.startswith("mode=") for word in words)
        newest, running = last_run(Path(OUTPUTS), trained=trained)
        if newest is None:
            raise ValueError(f"resume=last: there is no run in {OUTPUTS}; give resume=<run folder>")
        if running:
            what = "running, or left no weights" if trained else "still running"
            say(f"{what}: {', '.join(map(str, running))}; the newest that has ended:")
        words = [f"resume={newest}" if word == "resume=last" else word for word in words]
    return [re.sub(r"^env\.task=(?=\w[\w,]*$)", "env.task.name=", word) for word in words]


def check_flags(words: Sequence[str]) -> None:
    """Raise ValueError for a flag that Hydra does not have, or that shows nothing alone."""
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        after = next(iter(words[place + 1 :]), "")
        value = value or (after if after[:1] != "-" and "=" not in after else "")
        if flag.startswith("-") and flag not in FLAGS.split():
            from conf.hints import known_elsewhere  # here: most starts have no fault

            write = f"write {flag.lstrip('-')}={value or '...'}" if len(flag) > 2 else "see --help"
            if flag.startswith("--config"):  # -name, -dir, -path
                name = re.sub(r".*/|\.ya?ml$", "", value) or "<name>"
                write = f"a file of keys lies in conf/experiment, {name}.yaml: experiment={name}"
            hint = known_elsewhere(flag, value or None)
            raise ValueError(f"there is no flag {flag}{hint or f'; {write}'}")
        if flag in ("--cfg", "-c") and value not in ("job", "hydra", "all"):
            raise ValueError(f"expected {flag} job, hydra or all, got {value or 'none'}")
        if flag in ("--package", "-p", "--resolve") and not {"--cfg", "-c"} & {
            word.partition("=")[0] for word in words
        }:
            raise ValueError(f"{flag} is about what --cfg prints; write --cfg job {flag} {value}")


def check_overrides(words: Sequence[str]) -> None:
    """Raise ValueError for a word that is no name=value, removes a key or repeats a name."""
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("~") and not word.startswith("~env.task."):
            raise ValueError(f"{word}: no key can be removed; give it a value, {name[1:]}=...")
        if re.match(r"\+*hydra[/.=](launcher|sweeper|callbacks)", word):
            told = "a launcher and a sweeper are chosen beside -m, callbacks nowhere"
            raise ValueError(f"{word}: {told} (docs/sweeps.md)")
        if not word.startswith("~") and ("=" not in word or not name):
            raise ValueError(f"expected name=value, got {word!r}{_meant(word, list(words))}")
    count = Counter(word.partition("=")[0].lstrip("+") for word in words)
    for key in (key for key, times in count.items() if times > 1):
        raise ValueError(f"{key} is given {count[key]} times; give it once, or sweep: -m {key}=a,b")


def _meant(word: str, words: list[str]) -> str:
    """Return a hint at the override that a word without a name or a value stands for."""
    after = words[words.index(word) + 1 :][:2]
    if after and after[0].startswith("="):
        return f"; write {word}{''.join(after if after[0] == '=' else after[:1])}, without blanks"
    before = words[words.index(word) - 1] if words.index(word) else ""
    if before.startswith("trainer.stop_at="):
        return f"; write '{before} {word}', in quotes"
    if close := difflib.get_close_matches(word, first_lines("experiment"), n=1):
        return f"; did you mean experiment={close[0]}?"
    if word == "experiment" or word in all_keys():
        return f"; did you mean {word}={after[0] if after and '=' not in after[0] else '...'}?"
    return ""


def read_override(word: str) -> Override:
    """Return an override as Hydra reads it."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        name, _, value = word.partition("=")
        quoted = shlex.quote('{}="{}"'.format(name, value.replace('"', r"\"")))
        fault = f"cannot read {word}; quote values with special characters: {quoted}"
        if name == "trainer.stop_at":
            fault = f"cannot read {word}; write 'trainer.stop_at=eval/sampled_accuracy 0.8'"
        raise ValueError(fault) from None


def swept_by_experiment(words: Sequence[str]) -> dict[str, str]:
    """Return the keys and values that the experiment named in `words` sweeps; {} if it is none.

    >>> swept_by_experiment(["experiment=kl_sweep_tiny", "seed=3"])["seed"]
    '1,2'
    """
    name = next((w.partition("=")[2] for w in words if w.startswith("experiment=")), "")
    path = names.FOLDER / "experiment" / f"{name}.yaml"
    params = dig(read_yaml(path), "hydra", "sweeper", "params")
    if "allow_targets" in str(params):
        raise ValueError(ALLOW)
    return {str(key): str(value) for key, value in (params or {}).items()}


def check_single(words: Sequence[str]) -> None:
    """Raise ValueError if one run is asked of an experiment that is a sweep."""
    given = {word.partition("=")[0] for word in words}
    left = [key for key in swept_by_experiment(words) if key not in given]
    if left:
        name = next(word for word in words if word.startswith("experiment="))
        raise ValueError(
            f"{name} is a sweep over {', '.join(left)}: python train.py -m {name}; for one run "
            f"give {' '.join(f'{key}=...' for key in left)}"
        )


def first_lines(group: str) -> dict[str, str]:
    """Return what the files of a folder of conf/ say of themselves: first lines, less commands."""
    out = {}
    for path in sorted((names.FOLDER / group).glob("*.yaml")):
        head = itertools.takewhile(lambda line: line[:1] == "#", path.read_text().splitlines())
        said = [line[2:] for line in head if not re.match("# ( |@|python train)", line)]
        out[path.stem] = " ".join(said).rstrip(":")
    return out


def help_text() -> str:
    """Return what --help shows: conf/help.txt, with a paragraph per experiment in its place."""
    said, width = first_lines("experiment"), shutil.get_terminal_size((100, 0)).columns
    edge = max(map(len, said)) + 4
    fill = textwrap.TextWrapper(max(width, 2 * edge), subsequent_indent=" " * edge).fill
    shown = "\n".join(fill(f"  {name:{edge - 2}}{text}") for name, text in said.items())
    return (names.FOLDER / "help.txt").read_text().replace("{experiments}", shown)
