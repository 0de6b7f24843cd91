"""Keys, shapes and dtypes of the batch, the one container of the training loop.

A row is a right-padded trajectory. Letters, in all of leash: P prompts of an iteration, G samples
of a prompt, B = P * G rows (trajectories), T tokens of a row, V vocabulary, N turns, K kept tokens
of a forward, H hidden size.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tensordict import NestedKey, TensorDictBase
from torch import Tensor


class Entry(NamedTuple):
    """Shape with dtype and description of one key."""

    kind: str
    about: str


BatchFunction = Callable[[TensorDictBase], TensorDictBase]

KEYS: dict[NestedKey, Entry] = {
    ("tokens", "full"): Entry("[B, T] int64", "the exact ids of all turns"),
    ("masks", "all_attention_mask"): Entry("[B, T] bool", "real tokens"),
    ("masks", "all_assistant_mask"): Entry(
        "[B, T] bool", "tokens of assistant messages, ends of turn included"
    ),
    ("masks", "all_response_mask"): Entry("[B, T] bool", "sampled tokens"),
    ("log_probs", "full"): Entry("[B, T] float32", "by the generator; 0 unless sampled"),
    "loss_mask": Entry("[B, T] bool", "tokens to learn from"),
    "reward_raw": Entry("[B, T] float32", "task reward of each turn"),
    ("reward_part", "<name>"): Entry("[B] float32", "a part of reward_raw; NaN: does not apply"),
    "reward_errors": Entry("[B] float32", "reward functions that failed"),
    "success": Entry("[B] bool", "the task judged the response correct"),
    "truncated": Entry("[B] bool", "cut by a length or turn limit"),
    "dropped": Entry("[B] bool", "excluded from rewards and loss"),
    "group_id": Entry("[B] int64", "equal for the samples of a prompt"),
    "temperature": Entry("[B] float32", "sampling temperature"),
    "policy_version": Entry("[B] int64", "weight syncs before sampling"),
    "row": Entry("[B] dict", "cells of the prompt's row"),
    "prompt": Entry("[B] text", "the last message of the prompt"),
    "system": Entry("[B] text", "system message of the prompt, or empty"),
    "answer": Entry("[B] text", "correct answer, if the row has one"),
    "response": Entry("[B] text", "responses of all turns, joined"),
    "messages": Entry("[B] list", "all messages of a chat of several turns, else empty"),
    ("logged", "<metric>"): Entry(
        "[B, T] or [B] any",
        "metric of a function of after_rollout: logged as mean over sampled tokens or over rows",
    ),
    ("old_log_probs", "full"): Entry("[B, T] float32", "of the trained policy at sampling time"),
    "policy_weight": Entry("[B, T] float32", "factor of the policy term"),
    ("ref_log_probs", "full"): Entry("[B, T] float32", "of the reference"),
    "ref_states": Entry(
        "[B, T, H] any", "of the reference whose KL is exact; entry t predicts token t"
    ),
    "kl_penalty": Entry("[B, T] float32", "k1 in nats, without the coefficient"),
    ("teacher_log_probs", "full"): Entry("[B, T] float32", "of the teacher"),
    ("teachers", "<name>"): Entry("[B] bool", "rows of one of several teachers"),
    "teacher_kl_penalty": Entry("[B, T] float32", "k1 to the teacher"),
    "reward_kl": Entry("[B, T] float32", "-coeff * KL, or 0; the sum over the leashes"),
    "reward": Entry("[B, T] float32", "reward_raw + reward_kl"),
    "kl_coeff_in_loss": Entry("[B] float32", "KL coefficient that the loss charges"),
    "teacher_kl_coeff_in_loss": Entry("[B] float32", "the same of the KL to the teacher"),
    "later_kl": Entry("[B, T] float32", "exact KL of the states after a token, minus a baseline"),
    "advantage": Entry("[B, T] float32", "of each token"),
    "value": Entry("[B, T] float32", "the critic's V(tokens < t)"),
    "returns": Entry("[B, T] float32", "advantage + value"),
    "weight": Entry("[B, T] float32", "weight of a token in an optimiser step"),
}


RESPONSE = ("masks", "all_response_mask")


def batch_keys(*keys: NestedKey) -> tuple[NestedKey, ...]:
    """Return these keys; raise KeyError for one that KEYS lacks.

    >>> batch_keys("advantage", ("log_probs", "full"))
    ('advantage', ('log_probs', 'full'))
    """
    for key in keys:
        if key not in KEYS:
            raise KeyError(f"{key!r} is no key of a batch; describe it in trainer/batch.py")
    return keys


class LeashNames(NamedTuple):
    """Names that a leash has in the configuration, in a batch, in a loss and in the metrics."""

    section: str
    log_probs: NestedKey
    penalty: str
    coeff_in_loss: str
    loss: str
    coeff: str


LEASHES = {
    "ref": LeashNames(
        "kl", ("ref_log_probs", "full"), "kl_penalty", "kl_coeff_in_loss", "kl", "kl/coeff"
    ),
    "teacher": LeashNames(
        "teacher",
        ("teacher_log_probs", "full"),
        "teacher_kl_penalty",
        "teacher_kl_coeff_in_loss",
        "kl_teacher",
        "kl/teacher_coeff",
    ),
}

# Keys that a source of batches must write.
SOURCE_WRITES = batch_keys(
    ("tokens", "full"), ("masks", "all_attention_mask"), "loss_mask", "temperature"
)
# Keys of an advantage that an objective may read.
OF_ADVANTAGE = batch_keys("advantage", "value", "returns")
# Keys that the advantage of responses must write, by `Leash.charge_reward`.
ADVANTAGE_WRITES = batch_keys("reward", "reward_kl")


def check_written(batch: TensorDictBase, keys: Iterable[NestedKey], part: Any) -> None:
    """Raise ValueError for a key that a part did not write to the batch, or with a wrong shape."""
    if batch is None:
        raise ValueError(f"expected {type(part).__name__} to return the batch, got None")
    for key in keys:
        value, mask = batch.get(key, None), batch.get("loss_mask", None)
        kind, about = KEYS[key]
        if value is not None and (mask is None or "T" not in kind or value.shape == mask.shape):
            continue
        name = key if isinstance(key, str) else ".".join(key)
        got = "none" if value is None else f"the shape {[*value.shape]}"
        remedy = (
            "; call leash.charge_reward(batch), use its reward" if key in ADVANTAGE_WRITES else ""
        )
        text = f"expected {type(part).__name__} to write {name}, {kind}: {about}"
        raise ValueError(f"{text}; got {got}{remedy}")


def named_mask(batch: TensorDictBase, name: str) -> Tensor:
    """Return the mask of tokens with this name, [B, T].

    response: all sampled tokens; prompt: the sampled tokens of the last turn, because all before is
    its prompt; assistant: the assistant's messages, also those in the data.
    """
    if name != "prompt":
        return batch["masks", f"all_{name}_mask"]
    sampled = batch.get(RESPONSE)  # [B, T]
    begins = sampled.clone()
    begins[:, 1:] &= ~sampled[:, :-1]
    turn = begins.cumsum(-1)  # [B, T] number of each token's turn, from 1
    return sampled & (turn == turn[:, -1:])
