"""Rows for the experiments that have none of their own."""

from pathlib import Path

OWN = {"grpo_own", "sft_own"}
ROWS = Path(__file__).with_name("own_rows.jsonl")


def words_of(experiment: str) -> list[str]:
    """Return the command line of an experiment, with rows where it asks for them."""
    words = [f"experiment={experiment}"]
    return [*words, f"env.dataset={ROWS}"] if experiment in OWN else words
