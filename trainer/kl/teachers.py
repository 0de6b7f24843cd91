"""Several teachers, of which a column of the row chooses one (multi-teacher distillation).

All are in memory. Every rank asks every teacher in the same order, with a row for it or without,
so that forwards of sharded teachers agree.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDictBase

from envs.data import cell_of
from envs.rows import is_listed
from policies.host import send
from policies.scorer import Scorer
from trainer.batch import LEASHES, RESPONSE, batch_keys
from trainer.kl.reference import Reference

READS = batch_keys(("tokens", "full"), ("log_probs", "full"), "temperature", "group_id", RESPONSE)
READS += batch_keys(("masks", "all_attention_mask"))
WRITES = LEASHES["teacher"].log_probs, LEASHES["teacher"].penalty


class Teachers:
    """Add to each row of a batch the log-probs and the KL of the teacher that its `column` names.

    Writes the keys of a `Reference` named teacher, and teachers.<name> [B], the rows of each one.
    Raise ValueError if one of `rows`, of those that are made on access the first, names no teacher.
    """

    def __init__(
        self, teachers: Mapping[str, Reference], column: str, rows: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.teachers = {str(name): each for name, each in teachers.items()}  # YAML has numbers
        self.column = column
        for row in rows if is_listed(rows) else islice(rows, 1):
            self._name(row)

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
        named = [self._name(row) for row in batch.get("row").tolist()]
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

    def _name(self, row: Mapping[str, Any]) -> str:
        """Return the name of a row's teacher."""
        value = cell_of({**(row.get("columns") or {}), **row}, self.column)
        if str(value) not in self.teachers:
            place = f"row {row['index']}: " if "index" in row else ""
            known = f"expected {self.column} to name a teacher, {' or '.join(self.teachers)}"
            remedy = "correct the row, add the name to teacher.reference, or set teacher.column"
            raise ValueError(f"{place}{known}, got {value!r:.80}; {remedy}")
        return str(value)
