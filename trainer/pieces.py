"""A sampled row token by token, for transcripts.jsonl: what report.html colours."""

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

MOST = 256  # tokens of a row: some ten kilobytes


def pieces(batch: TensorDictBase, i: int, tokenizer: Any) -> dict[str, Any]:
    """Return row i from its first sampled token on, as columns of equal length.

    `text`; `log_prob`, `kl` (k1) and `advantage`, in nats and null where nothing was sampled: such
    tokens stand together. `left_out`: how many tokens beyond the first MOST the row has.
    """
    sampled = batch.get(("masks", "all_response_mask"))[i]
    length = int(batch.get(("masks", "all_attention_mask"))[i].sum())  # rows are right-padded
    start = int(sampled.int().argmax()) if bool(sampled.any()) else length
    ids = batch.get(("tokens", "full"))[i, start:length].tolist()[:MOST]
    texts = split(ids, tokenizer)
    sources = {"log_prob": ("log_probs", "full"), "kl": "kl_penalty", "advantage": "advantage"}
    found = {name: batch.get(key, None) for name, key in sources.items()}
    values = {n: _plain(v[i, start:]) for n, v in found.items() if v is not None}
    out: dict[str, Any] = {"text": [], **{name: [] for name in values}}
    own, before = sampled[start:length].tolist(), True
    for k, text in enumerate(texts):
        if not own[k] and not before:
            out["text"][-1] += text
            continue
        before = own[k]
        out["text"].append(text)
        for name, column in values.items():
            out[name].append(column[k] if own[k] else None)
    left_out = length - start - len(ids)
    return out | ({"left_out": left_out} if left_out else {})


def split(ids: list[int], tokenizer: Any) -> list[str]:
    """Return the text of each token, so that together they are the text of all.

    A character of several tokens stands with the last of them, the others are empty.
    """

    def decode(a: int, b: int) -> str:
        return tokenizer.decode(ids[a:b], clean_up_tokenization_spaces=False)

    out, context, done = [], 0, 0  # as in streaming: decode behind the token before
    for end in range(1, len(ids) + 1):
        text = decode(context, end)
        if text.endswith("\ufffd") and end < len(ids):
            out.append("")
            continue
        out.append(text[len(decode(context, done)) :])
        context, done = done, end
    return out


def _plain(values: Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in values.tolist()]
