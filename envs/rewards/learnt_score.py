"""The score of a trained reward model: for a task, and as one function of `env.rewards`.

policies/models/reward_model.py has the model, trainer/preference_pairs.py its training.
"""

from collections.abc import Sequence
from functools import cached_property

from envs.rewards.functions import RewardFunction, Score
from envs.tasks.task import Message, Response, Row
from policies.models.find import no_reward_model


class LearntScore:
    """Score chats by a reward model, loaded at the first chat.

    A folder is checked at once; experiment:<name> is resolved later. `name`: for errors.
    """

    def __init__(self, folder: str, clip: float, *, name: str) -> None:
        fault = None if folder.startswith("experiment:") else no_reward_model(folder)
        if fault:
            raise ValueError(f"{name}: {fault}; python train.py experiment=rm_tiny makes one")
        self.folder, self.clip = folder, clip

    @cached_property
    def _model(self):
        from policies.models.reward_model import ChatRewards

        return ChatRewards(self.folder)

    def score_responses(self, responses: Sequence[Response]) -> list[float]:
        """Return the score at the end of each response, as one batch."""
        return self._model(
            [response.messages for response in responses], [r.complete for r in responses]
        )

    def chats(self, chats: Sequence[list[Message]]) -> list[float]:
        """Return the score at the end of each complete chat."""
        return self._model(chats)

    def clipped(self, score: float) -> float:
        """Return a score within +-clip."""
        return min(max(score, -self.clip), self.clip)


class RewardModel(RewardFunction):
    """The score of a reward model at the end of each chat, within +-`score_clip`.

    `model`: see `reward_model` of `LearntReward`.
    """

    tried = False  # it would load a model

    def __init__(
        self, model: str, *, weight: float = 1.0, on_error: str = "raise", score_clip: float = 10.0
    ) -> None:
        super().__init__(weight=weight, on_error=on_error)
        self.score = LearntScore(model, score_clip, name="model")

    def scores(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Score]:
        """Return the model's score of each chat, as one batch."""
        return [self.score.clipped(score) for score in self.score.score_responses(responses)]
