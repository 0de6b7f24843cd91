"""What a preflight prints: sections, and the problems that they found."""

import time

import psutil
from rich.console import Console
from rich.text import Text


class Findings:
    """Print sections and collect problems; `quiet` on ranks other than 0."""

    def __init__(self, *, quiet: bool = False, untrained: bool = False) -> None:
        self.console = Console(highlight=False, quiet=quiet)
        self.untrained = untrained  # another experiment would train the model first
        self.problems: list[str] = []
        self.start = time.time() - psutil.Process().create_time()  # seconds to load everything

    def section(self, title: str, *lines: str | Text) -> None:
        """Print a title and the lines below it."""
        self.console.print(Text(title, style="bold"))
        for line in lines:
            self.say(line)

    def say(self, line: str | Text, *, style: str = "") -> None:
        """Print a line of a section."""
        self.console.print(Text("  ", style=style).append(line), soft_wrap=True)

    def problem(self, text: str) -> None:
        """Note something to change before the run."""
        self.problems.append(text)
        self.say(f"problem: {text}", style="red")

    def judge(self, text: str) -> None:
        """Note a problem of what the model says; it is none if the model is yet to be trained."""
        if self.untrained:
            self.say(f"of the untrained model: {text}")
        else:
            self.problem(text)

    def finish(self) -> int:
        """Print and return how many problems there are."""
        count = len(self.problems)
        text = "no problem found" if not count else f"{count} problem{'s' if count > 1 else ''}:"
        self.section(f"preflight: {text}", *[f"- {problem}" for problem in self.problems])
        return count
