"""Responses as plain records for transcripts.jsonl and the pages that show it."""

from itertools import islice
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from trainer.metrics import judged_rows

MAX_TOKENS = 256  # tokens of a row that `token_columns` keeps, about ten kilobytes


def transcripts(
    batch: TensorDictBase,
    iteration: int,
    *,
    count: int | str,
    kind: str,
    tokenizer: Any = None,
    rewarded: bool = True,
) -> list[dict]:
    """Return responses of a batch as plain records for transcripts.jsonl, the highest reward first.

    They are the best, median and worst response, and `count` responses group by group, beginning
    with the groups of these three; "all": every response that was not dropped. With a tokenizer the
    three have `rank` and `pieces`.
    """
    reward, owner = batch.get("reward_raw").sum(-1).tolist(), batch.get("group_id").tolist()
    judged = judged_rows(batch).nonzero().squeeze(-1).tolist()
    order = sorted(judged, key=reward.__getitem__, reverse=True)
    first = [*order[:1], *order[-1:], *order[len(order) // 2 :][:1]]
    ranks = dict([*zip(first, ("best", "worst", "median"), strict=False)][::-1])  # may be one row
    groups: dict[int, list[int]] = {}
    for i in order:
        groups.setdefault(owner[i], []).append(i)
    ends = (i for pair in zip(order, reversed(order), strict=True) for i in pair)  # to the middle
    wanted = (i for g in dict.fromkeys(owner[i] for i in (*first, *ends)) for i in groups[g])
    chosen = {*first, *islice(wanted, None if count == "all" else int(count))}
    options = {"kind": kind, "rewarded": rewarded}
    rows = {i: transcript(batch, i, iteration, **options) for i in order if i in chosen}
    for i, rank in ranks.items() if tokenizer is not None else ():
        rows[i] |= {
            "rank": rank if rewarded else None,
            "pieces": token_columns(batch, i, tokenizer),
        }
    return list(rows.values())


def transcript(
    batch: TensorDictBase, i: int, iteration: int, *, kind: str, rewarded: bool = True
) -> dict:
    """Return row i of a batch as a plain record; its reward is None unless the task `rewarded`."""
    mask = batch.get("loss_mask")[i]
    sampled = batch.get(("masks", "all_response_mask"), batch.get("loss_mask"))[i]
    parts = batch.get("reward_part", TensorDict())
    advantage, penalty = batch.get("advantage", None), batch.get("kl_penalty", None)
    none = advantage is None or not bool(mask.any())
    messages = batch.get("messages")[i].data if "messages" in batch else []
    system = batch.get("system")[i].data if "system" in batch else ""
    return {
        "iteration": iteration,
        "kind": kind,
        "group": int(batch.get("group_id")[i]),
        **({"system": system} if system else {}),
        "prompt": batch.get("prompt")[i].data,
        "answer": batch.get("answer")[i].data or None if "answer" in batch else None,
        "response": batch.get("response")[i].data,
        **({"messages": messages} if messages else {}),
        "reward": _short(batch.get("reward_raw")[i].sum()) if rewarded else None,
        "parts": {n: _short(v[i]) for n, v in parts.items() if not bool(v[i].isnan())},
        "advantage": None if none else _short(advantage[i][mask].mean()),
        "kl": None if penalty is None else _short((penalty[i] * sampled).sum()),
        "truncated": bool(batch.get("truncated")[i]),
    }


def _short(value: Tensor) -> float:
    """Round a float32 to its decimal digits: 0.1, not 0.10000000149."""
    return float(f"{value:.7g}")


def token_columns(batch: TensorDictBase, i: int, tokenizer: Any) -> dict[str, Any]:
    """Return row i from its first sampled token on, as columns of equal length.

    `text`, `log_prob`, `kl` (k1), `advantage`; adjacent tokens that were not sampled are one entry
    with null values. `left_out`: number of tokens after the first MAX_TOKENS.
    """
    sampled = batch.get(("masks", "all_response_mask"))[i]
    length = int(batch.get(("masks", "all_attention_mask"))[i].sum())  # rows are right-padded
    start = int(sampled.int().argmax()) if bool(sampled.any()) else length
    ids = batch.get(("tokens", "full"))[i, start:length].tolist()[:MAX_TOKENS]
    texts = token_texts(ids, tokenizer)
    tensors = {
        "log_prob": batch.get(("log_probs", "full"), None),
        "kl": batch.get("kl_penalty", None),
        "advantage": batch.get("advantage", None),
    }
    values = {n: v[i, start:].tolist() for n, v in tensors.items() if v is not None}
    out: dict[str, Any] = {"text": [], **{name: [] for name in values}}
    marks, before = sampled[start:length].tolist(), True
    for k, text in enumerate(texts):
        if not marks[k] and not before:
            out["text"][-1] += text
            continue
        before = marks[k]
        out["text"].append(text)
        for name, column in values.items():
            out[name].append(float(f"{column[k]:.3g}") if marks[k] else None)
    left_out = length - start - len(ids)
    return out | ({"left_out": left_out} if left_out else {})


def token_texts(ids: list[int], tokenizer: Any) -> list[str]:
    """Return the text of each token; joined, they are the text of all tokens.

    A character of several tokens belongs to the last of them; the others are empty.
    """

    def decode(a: int, b: int) -> str:
        return tokenizer.decode(ids[a:b], clean_up_tokenization_spaces=False)

    out, context, done = [], 0, 0  # as in streaming: decode after the previous token
    for end in range(1, len(ids) + 1):
        text = decode(context, end)
        if text.endswith("\ufffd") and end < len(ids):
            out.append("")
            continue
        out.append(text[len(decode(context, done)) :])
        context, done = done, end
    return out
