"""Several teachers, of which a column of the row chooses one (multi-teacher distillation).

All are in memory. Every rank runs every teacher in the same order, even without a row for it,
because all ranks take part in a forward of a sharded teacher.
"""

from collections.abc import Mapping

import torch
from tensordict import TensorDictBase

from policies.host import send
from policies.scorer import Scorer
from trainer.batch import LEASHES, RESPONSE, batch_keys
from trainer.kl.cells import teacher_of
from trainer.kl.reference import Reference

READS = batch_keys(("tokens", "full"), ("log_probs", "full"), "temperature", "group_id", RESPONSE)
READS += batch_keys(("masks", "all_attention_mask"))
WRITES = LEASHES["teacher"].log_probs, LEASHES["teacher"].penalty


class Teachers:
    """Add to each row of a batch the log-probs and the KL of the teacher that its `column` names.

    Writes the keys of a `Reference` named teacher, and teachers.<name> [B], the mask of its rows.
    """

    def __init__(self, teachers: Mapping[str, Reference], column: str) -> None:
        self.teachers = {str(name): each for name, each in teachers.items()}  # YAML reads 1 as int
        self.column = column

    @property
    def scorer(self) -> dict[str, Scorer]:
        """Return the scorer of each teacher."""
        return {name: each.scorer for name, each in self.teachers.items()}

    @property
    def sha256(self) -> dict[str, str]:
        """Return the hash of each teacher's weights."""
        return {name: each.sha256 for name, each in self.teachers.items()}

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase, *, keep_states: bool = False) -> TensorDictBase:
        """Return the batch with the results; the states of several models are never kept."""
        named = [teacher_of(row, self.column, self.teachers) for row in batch.get("row").tolist()]
        device, order, done = batch.get("temperature").device, list[int](), []
        for name, teacher in self.teachers.items():
            mine = torch.tensor([each == name for each in named])  # [B]
            batch.set(("teachers", name), send(mine, device))
            rows = mine.nonzero().squeeze(-1)  # [b]
            if len(rows):
                order += rows.tolist()
                done.append(teacher(batch.select(*READS)[send(rows, device)]).select(*WRITES))
            else:
                teacher.join()
        return batch.update(torch.cat(done)[send(torch.tensor(order).argsort(), device)])
