"""The task of env=learnt_reward: a reward model rewards responses, as in arXiv 2009.01325.

Prompts come from a data set; its responses are the labels. By default these are the packaged pairs
of sorted digits, for which `experiment=rm_tiny` trains the reward model.
"""

from collections.abc import Sequence
from typing import Any

from envs.rewards.learnt_score import LearntScore
from envs.tasks.dataset import SORTED_DIGITS, DatasetTask
from envs.tasks.task import Response, Reward, Row, assistant


class LearntReward(DatasetTask):
    """Reward a response by its score minus the data response's score, within +-`score_clip`.

    `reward_model` is the folder of a run of `experiment=rm_tiny`, or a folder or hub id of a
    ForSequenceClassification with one score and a chat template. It is loaded at the first
    response; train.py resolves experiment:<name>. `relative=False` uses only the score. A response
    is right if it has the words of the data's response. Everything else as in `DatasetTask`.
    """

    packaged = str(SORTED_DIGITS)

    def __init__(
        self,
        dataset: str | Sequence[str] | None = None,
        *,
        reward_model: str,
        relative: bool = True,
        score_clip: float = 10.0,
        **data: Any,
    ) -> None:
        super().__init__(dataset, **data)
        self.score = LearntScore(reward_model, score_clip, name="reward_model")
        self.relative = relative

    def rewards(self, rows: Sequence[Row], responses: Sequence[Response]) -> list[Reward]:
        """Return the reward of each response, scored as one batch."""
        scores, labels = self.score.score_responses(responses), [0.0] * len(rows)
        if self.relative:
            chats = [[*row["messages"], assistant(row["answer"])] for row in rows]
            labels = self.score.chats(chats)
        return [self._reward(*each) for each in zip(rows, responses, scores, labels, strict=True)]

    def _reward(self, row: Row, response: Response, score: float, label: float) -> Reward:
        exact = response.complete and response.text.split() == row["answer"].split()
        total = self.score.clipped(score - label)
        return Reward(total=total, parts={"score": score, "exact": float(exact)}, success=exact)
