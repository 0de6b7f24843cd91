"""Tokenised prompts with labels: TL;DR-style data sets for `RolloutFromModel`.

A row of the data has the texts "prompt" and "label"; its tokens are prompt, label and EOS, padded
right to `max_length`, T tokens. All tokens are kept in memory.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from tensordict import TensorClass
from torch import Tensor
from transformers import AutoTokenizer

from envs.data import Table, load_table
from envs.rows import is_file

DEFAULT_DATASET = "CarperAI/openai_summarize_tldr"
IGNORED = -100  # label that transformers' losses ignore


class PromptData(TensorClass["nocast"]):  # pyright: ignore[reportInvalidTypeArguments]
    """Hold prompts with their labels: ids [B, T] int64, attention_mask [B, T] bool.

    `prompt_rindex` [B] is the index of the prompt's last token. `labels` [B, T] are the ids, -100
    at padding; `logits` and `loss` are fields for the outputs of a model.

    >>> ids = torch.tensor([[5, 6, 7, 0]])
    >>> data = PromptData(input_ids=ids, attention_mask=ids > 0, prompt_rindex=torch.tensor([1]),
    ...     batch_size=[1])
    >>> data.mask_label(pad_token_id=9).input_ids.tolist()
    [[5, 6, 9, 9]]
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_rindex: Tensor
    labels: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None

    def mask_label(self, pad_token_id: int = 0) -> "PromptData":
        """Return the full prompts, with padding in place of their labels."""
        place = torch.arange(self.input_ids.shape[-1], device=self.input_ids.device)
        keep = self.attention_mask.bool() & (place <= self.prompt_rindex[:, None])  # [B, T]
        return PromptData(
            input_ids=self.input_ids.masked_fill(~keep, pad_token_id),
            attention_mask=keep,
            prompt_rindex=self.prompt_rindex,
            loss=self.loss,
            batch_size=self.batch_size,
        )

    @classmethod
    def from_dataset(
        cls,
        split: str = "train",
        dataset_name: str | None = None,
        max_length: int = 550,
        *,
        from_disk: bool = False,
        tokenizer: Any = "gpt2",
    ) -> "PromptData":
        """Tokenise a data set.

        `dataset_name`: a .jsonl, .json, .csv or .parquet file, a hub id, or with `from_disk` the
        folder of a saved `datasets` data set. `split` is for hub ids and folders: a file has only
        "train". `tokenizer`: a tokenizer, a folder or a hub id. Rows of more than
        `max_length` tokens are dropped with a warning.
        """
        table = _table(dataset_name or DEFAULT_DATASET, split, from_disk)
        if not {"prompt", "label"} <= {*table.columns}:
            got = ", ".join(table.columns)
            raise ValueError(f"{table.name}: expected columns prompt and label, got {got}")
        if isinstance(tokenizer, str | Path):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        rows = [_row(table, index, tokenizer) for index in range(len(table.rows))]
        short = [(ids, size) for ids, size in rows if len(ids) <= max_length]
        if not short:
            raise ValueError(f"{table.name}: no row has block_size={max_length} tokens or less")
        if len(short) < len(rows):
            warnings.warn(
                f"{table.name}: dropped {len(rows) - len(short)} of {len(rows)} rows, longer than "
                f"{max_length} tokens",
                stacklevel=2,
            )
        ids = torch.full((len(short), max_length), tokenizer.pad_token_id or 0)
        for i, (row, _) in enumerate(short):
            ids[i, : len(row)] = torch.tensor(row)
        mask = torch.arange(max_length) < torch.tensor([[len(row)] for row, _ in short])
        return cls(
            input_ids=ids,
            attention_mask=mask,
            prompt_rindex=torch.tensor([size - 1 for _, size in short]),
            labels=ids.masked_fill(~mask, IGNORED),
            batch_size=[len(short)],
        )


def get_dataloader(
    batch_size: int,
    block_size: int,
    tensorclass_type: Any,
    device: torch.device | str,
    dataset_name: str | None = None,
    infinite: bool = True,
    *,
    split: str = "train",
    from_disk: bool = False,
    tokenizer: Any = "gpt2",
) -> Iterator[Any]:
    """Return shuffled batches of a data set on `device`; torch's seed sets the order.

    An infinite loader continues with another epoch within a batch, so each batch has `batch_size`
    rows; the last batch of a finite loader may be smaller. `tensorclass_type` is `PromptData` or a
    class with the same `from_dataset`, which gets the other arguments.
    """
    data = tensorclass_type.from_dataset(
        split=split,
        dataset_name=dataset_name,
        max_length=block_size,
        from_disk=from_disk,
        tokenizer=tokenizer,
    )
    return _batches(data, batch_size, device, infinite)


def _batches(data: Any, size: int, device: torch.device | str, infinite: bool) -> Iterator[Any]:
    order = torch.randperm(len(data))
    while infinite or len(order):
        while infinite and len(order) < size:
            order = torch.cat([order, torch.randperm(len(data))])
        yield data[order[:size]].to(device)
        order = order[size:]


def _table(dataset: str, split: str, from_disk: bool) -> Table:
    if from_disk:
        rows = load_from_disk(dataset)[split].to_list()
        return Table(dataset, list(rows[0]) if rows else [], rows)
    if is_file(dataset) and split != "train":
        raise ValueError(f"a file has the split train, got {split!r}; give that split's file")
    return load_table(dataset, split=split)


def _row(table: Table, index: int, tokenizer: Any) -> tuple[list[int], int]:
    """Return the ids of prompt, label and EOS, and the length of the prompt."""
    prompt = tokenizer(table.text(index, "prompt"))["input_ids"]
    label = tokenizer(table.text(index, "label"), add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*prompt, *label, *end], len(prompt)
