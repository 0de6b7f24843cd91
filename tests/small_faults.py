"""The smallest run that does all that a long one does, to put a fault into."""

from pathlib import Path

TINY = (
    "experiment=grpo_tiny",
    "policy.model=tiny",
    "policy.max_new_tokens=4",
    "trainer.num_iterations=6",
    "trainer.prompts_per_iteration=4",
    "algorithm.group_size=2",
    "eval.max_rows=4",
    "eval.num_samples=2",
    "checkpoint.every=2",
)


def one_error(text: str) -> str:
    """Return the only line of an output that tells an error."""
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    return line


def lines_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
