"""One-sentence reviews, rewarded for their sentiment: a scorer that is easy to exploit.

The reward is the compound score of the PyPI library vaderSentiment (Hutto and Gilbert 2014), from
-1 to 1: a word list with rules for negation, capitals and exclamation marks. It ignores the
subject, so only the KL penalty limits how far the policy exploits it (the first experiment of
Ziegler et al. 2019, arXiv 1909.08593, with a scorer in place of their classifier).
Train and eval have different subjects.
"""

from collections.abc import Sequence
from typing import Any

from envs.tasks.task import Response, Reward, Row, Split, Task, user
from policies.optional_packages import EXTRAS

REQUEST = "Write a one-sentence review of {}."
CLEAR = 0.5  # a reward above it counts as right; vaderSentiment calls 0.05 positive
SUBJECTS: dict[Split, tuple[str, ...]] = {
    "train": (
        "a hotel room", "a laptop", "a cup of coffee", "a pair of running shoes", "a city bus",
        "a horror film", "a phone charger", "a public library", "an office chair", "a train ride",
        "a frozen pizza", "a rain jacket", "a history book", "a dentist", "a kitchen knife",
        "a camping tent", "a piano concert", "a wristwatch", "a grocery store", "a car wash",
        "a desk lamp", "a bowl of soup", "a football match", "a language course", "a ferry trip",
        "a bicycle", "a vacuum cleaner", "a zoo", "a birthday cake", "a backpack",
        "a barber", "a video game", "a swimming pool", "a cookbook", "a mattress",
        "an airport", "a garden hose", "a pencil", "a wedding speech", "a cheese sandwich",
    ),
    "eval": (
        "a restaurant", "a pair of headphones", "a museum", "a science fiction novel",
        "an umbrella", "a taxi ride", "a washing machine", "a bakery", "a winter coat",
        "a theatre play", "a toothbrush", "a gym", "a parking garage", "a box of tea",
        "a camera", "a puppet show",
    ),
}  # fmt: skip


class Reviews(Task):
    """Requests such as "Write a one-sentence review of a hotel room.".

    The reward is the score; a response that was cut off gets at most half of it. A reward above
    0.5 is right.

    >>> task = Reviews()
    >>> task.rows("train")[0]["messages"]
    [{'role': 'user', 'content': 'Write a one-sentence review of a hotel room.'}]
    >>> task.reward({}, Response("The room was wonderful.", True, [])).parts
    {'sentiment': 0.5719, 'ended': 1.0}
    """

    def __init__(self) -> None:
        self._scorer = _scorer()

    def rows(self, split: Split) -> Sequence[Row]:
        """Return a request for each subject of a split."""
        return [
            {"messages": [user(REQUEST.format(subject))], "subject": subject}
            for subject in SUBJECTS[split]
        ]

    def reward(self, row: Row, response: Response) -> Reward:
        """Return the compound score of the response, from -1 to 1."""
        score = self._scorer.polarity_scores(response.text)["compound"]
        total = score if response.complete else min(score, score / 2)
        parts = {"sentiment": score, "ended": float(response.complete)}
        return Reward(total=total, parts=parts, success=total > CLEAR)


def _scorer() -> Any:
    """Return vaderSentiment's scorer; raise ImportError if it is not installed."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise ImportError(EXTRAS["vaderSentiment"]) from None
    return SentimentIntensityAnalyzer()
