"""A trained reward model as one of several rewards."""

from collections.abc import Sequence

from envs.rewards.functions import RewardFunction, Score
from envs.tasks.learnt_reward import LearntScore
from envs.tasks.task import Reply, Row


class RewardModel(RewardFunction):
    """The score of a `GPT2RewardModel` at the end of each chat, within +-`score_clip`.

    `model` is a folder with the model and its tokenizer, loaded when the first reply comes;
    train.py makes one of experiment:<name>.
    """

    tried = False  # it would load a model

    def __init__(
        self,
        model: str,
        *,
        weight: float = 1.0,
        on_error: str = "raise",
        score_clip: float = 10.0,
    ) -> None:
        super().__init__(weight=weight, on_error=on_error)
        self.score = LearntScore(model, score_clip, name="model")

    def scores(self, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Score]:
        """Return the model's score of each chat, all scored together."""
        return [self.score.clipped(score) for score in self.score.replies(replies)]
