"""Replies scored by a trained reward model, as in summarisation from feedback (arXiv 2009.01325).

The prompts come from a data set whose own replies are the labels. Without one: the prompts of the
packaged pairs of sorted digits, whose reward model `experiment=rm_tiny` trains.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from envs.tasks.dataset import DatasetTask
from envs.tasks.preferences import SORTED_DIGITS
from envs.tasks.task import Reply, Reward, Row, assistant

WEIGHTS = "reward_model.safetensors"


class LearntReward(DatasetTask):
    """A reply earns its score less that of the data's own reply, within +-`score_clip`.

    `reward_model` is a folder with a `GPT2RewardModel` and its tokenizer, loaded when the first
    reply comes; train.py makes one of experiment:<name>. `relative=False` leaves the score as it
    is. A reply is right if it says the words of the data's own. The rest as in `DatasetTask`.
    """

    packaged = str(SORTED_DIGITS)

    def __init__(
        self,
        dataset: str | None = None,
        *,
        reward_model: str,
        relative: bool = True,
        score_clip: float = 10.0,
        eval_dataset: str | None = None,
        columns: Mapping[str, str | None] | None = None,
        split: str = "train",
        eval_split: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            dataset,
            eval_dataset=eval_dataset,
            columns=columns,
            split=split,
            eval_split=eval_split,
            seed=seed,
        )
        if not score_clip > 0:
            raise ValueError(f"expected score_clip > 0, got {score_clip}")
        folder = Path(reward_model).expanduser()
        if not reward_model.startswith("experiment:") and not (folder / WEIGHTS).is_file():
            raise ValueError(
                f"expected reward_model to be a folder with {WEIGHTS}, got {reward_model}; "
                "python train.py experiment=rm_tiny makes one"
            )
        self.reward_model, self.relative, self.score_clip = reward_model, relative, score_clip

    @cached_property
    def _scorer(self):
        from policies.reward_scorer import ChatRewards

        return ChatRewards(self.reward_model)

    def rewards(self, rows: Sequence[Row], replies: Sequence[Reply]) -> list[Reward]:
        """Return what each reply earns, all scored together."""
        scores = self._scorer([reply.messages for reply in replies], [r.complete for r in replies])
        labels = [0.0] * len(rows)
        if self.relative:
            chats = [[*row["messages"], assistant(row["answer"])] for row in rows]
            labels = self._scorer(chats)
        return [self._reward(*each) for each in zip(rows, replies, scores, labels, strict=True)]

    def _reward(self, row: Row, reply: Reply, score: float, label: float) -> Reward:
        exact = reply.complete and reply.text.split() == row["answer"].split()
        total = min(max(score - label, -self.score_clip), self.score_clip)
        return Reward(total=total, parts={"score": score, "exact": float(exact)}, success=exact)
