"""The batch: the one container of the loop, and every key that may stand in it.

A row is a trajectory, right-padded. Letters, here and in all of leash: P prompts of an iteration,
G samples of a prompt, B = P * G rows (trajectories), T tokens of a row, V vocabulary, N turns,
K kept tokens of a forward, H hidden size.
"""

from typing import NamedTuple

from tensordict import NestedKey


class Entry(NamedTuple):
    """One key: shape and dtype, what it is."""

    kind: str
    about: str


KEYS: dict[NestedKey, Entry] = {
    ("tokens", "full"): Entry("[B, T] int64", "the exact ids of all turns"),
    ("masks", "all_attention_mask"): Entry("[B, T] bool", "real tokens"),
    ("masks", "all_assistant_mask"): Entry(
        "[B, T] bool", "tokens of assistant messages, ends of turn included"
    ),
    ("masks", "all_response_mask"): Entry("[B, T] bool", "sampled tokens"),
    ("log_probs", "full"): Entry("[B, T] float32", "of who sampled, else 0"),
    "loss_mask": Entry("[B, T] bool", "tokens to learn from"),
    "reward_raw": Entry("[B, T] float32", "task reward of each turn"),
    ("reward_part", "<name>"): Entry("[B] float32", "a part of it; NaN: does not apply"),
    "reward_errors": Entry("[B] float32", "reward functions that failed"),
    "success": Entry("[B] bool", "the task says the reply is right"),
    "truncated": Entry("[B] bool", "cut by a limit"),
    "dropped": Entry("[B] bool", "not judged"),
    "group_id": Entry("[B] int64", "the samples of a prompt"),
    "temperature": Entry("[B] float32", "of the sampling"),
    "policy_version": Entry("[B] int64", "the weights that sampled, by syncs"),
    "prompt": Entry("[B] text", "the last message of the prompt"),
    "system": Entry("[B] text", "the prompt's system message or nothing"),
    "answer": Entry("[B] text", "the right one, where the row has it"),
    "response": Entry("[B] text", "the replies, joined"),
    ("logged", "<metric>"): Entry(
        "[B, T] or [B] any",
        "what a verb wants on the curves: a mean over sampled tokens or over rows",
    ),
    ("old_log_probs", "full"): Entry("[B, T] float32", "of the policy that learns"),
    "policy_weight": Entry("[B, T] float32", "factor of the policy term"),
    ("ref_log_probs", "full"): Entry("[B, T] float32", "of the reference"),
    "kl_penalty": Entry("[B, T] float32", "k1 in nats, without the coefficient"),
    "reward_kl": Entry("[B, T] float32", "-coeff * KL, or 0"),
    "reward": Entry("[B, T] float32", "reward_raw + reward_kl"),
    "kl_left": Entry("[B] float32", "the coefficient left for the loss to charge"),
    "advantage": Entry("[B, T] float32", "A"),
    "value": Entry("[B, T] float32", "V(tokens < t)"),
    "returns": Entry("[B, T] float32", "advantage + value"),
    "weight": Entry("[B, T] float32", "what a token counts in a step"),
}


def reads(*keys: NestedKey) -> tuple[NestedKey, ...]:
    """Return keys that a part says it reads; one that KEYS does not have is a KeyError.

    >>> reads("advantage", ("log_probs", "full"))
    ('advantage', ('log_probs', 'full'))
    """
    for key in keys:
        if key not in KEYS:
            raise KeyError(f"{key!r} is no key of a batch; say what it is in trainer/batch.py")
    return keys
