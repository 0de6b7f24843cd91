"""A trained reward model as one of several rewards."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from envs.rewards.functions import RewardFunction, Score
from envs.tasks.learnt_reward import WEIGHTS
from envs.tasks.task import Reply, Row


class RewardModel(RewardFunction):
    """The score of a `GPT2RewardModel` at the end of each chat, within +-`score_clip`.

    `model` is a folder with the model and its tokenizer, loaded when the first reply comes;
    train.py makes one of experiment:<name>.
    """

    def __init__(
        self,
        model: str,
        *,
        weight: float = 1.0,
        on_error: str = "raise",
        score_clip: float = 10.0,
    ) -> None:
        super().__init__(weight=weight, on_error=on_error)
        if not score_clip > 0:
            raise ValueError(f"expected score_clip > 0, got {score_clip}")
        if not model.startswith("experiment:") and not Path(model, WEIGHTS).expanduser().is_file():
            raise ValueError(
                f"expected model to be a folder with {WEIGHTS}, got {model}; "
                "python train.py experiment=rm_tiny makes one"
            )
        self.model, self.score_clip = model, score_clip

    @cached_property
    def _scorer(self):
        from policies.reward_scorer import ChatRewards

        return ChatRewards(Path(self.model).expanduser())

    def scores(self, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Score]:
        """Return the model's score of each chat, all scored together."""
        found = self._scorer([reply.messages for reply in replies], [r.complete for r in replies])
        return [min(max(score, -self.score_clip), self.score_clip) for score in found]
