"""The batch: the one container of the loop, and every key that may stand in it.

A row is a trajectory, right-padded. Letters, here and in all of leash: P prompts of an iteration,
G samples of a prompt, B = P * G rows (trajectories), T tokens of a row, V vocabulary, N turns,
K kept tokens of a forward, H hidden size.
"""

from dataclasses import dataclass

from tensordict import NestedKey


@dataclass(frozen=True)
class Key:
    """One key: shape and dtype, the file that writes it, the files that read it, what it is.

    Files are of trainer/, without ".py"; a source is whatever makes batches (collect for rollouts,
    demonstrations, reward_modelling).
    """

    shape: str
    dtype: str
    writer: str
    readers: tuple[str, ...]
    about: str


KEYS: dict[NestedKey, Key] = {
    ("tokens", "full"): Key(
        "[B, T]", "int64", "collect", ("update", "transcripts"), "the exact ids of all turns"
    ),
    ("masks", "all_attention_mask"): Key(
        "[B, T]", "bool", "collect", ("update", "trainer"), "real tokens"
    ),
    ("masks", "all_assistant_mask"): Key(
        "[B, T]", "bool", "collect", (), "tokens of assistant messages, ends of turn included"
    ),
    ("masks", "all_response_mask"): Key(
        "[B, T]", "bool", "collect", ("metrics", "transcripts", "overlong"), "sampled tokens"
    ),
    ("log_probs", "full"): Key(
        "[B, T]", "float32", "collect", ("objectives", "metrics"), "of who sampled, else 0"
    ),
    "loss_mask": Key(
        "[B, T]", "bool", "collect", ("update", "advantage", "metrics"), "tokens to learn from"
    ),
    "reward_raw": Key(
        "[B, T]", "float32", "collect", ("kl", "advantage", "metrics"), "task reward of each turn"
    ),
    ("reward_part", "<name>"): Key(
        "[B]", "float32", "collect", ("metrics", "transcripts"), "a part of it; NaN: does not apply"
    ),
    "reward_errors": Key("[B]", "float32", "collect", ("metrics",), "reward functions that failed"),
    "success": Key("[B]", "bool", "collect", ("evaluation",), "the task says the reply is right"),
    "truncated": Key("[B]", "bool", "collect", ("metrics", "overlong"), "cut by a limit"),
    "dropped": Key("[B]", "bool", "collect", ("metrics", "evaluation"), "its group is not judged"),
    "group_id": Key("[B]", "int64", "collect", ("update", "advantage"), "the samples of a prompt"),
    "temperature": Key("[B]", "float32", "collect", ("update",), "of the sampling"),
    "policy_version": Key("[B]", "int64", "collect", (), "the weights that sampled, by syncs"),
    "prompt": Key("[B]", "text", "collect", ("transcripts",), "the last message of the prompt"),
    "response": Key("[B]", "text", "collect", ("transcripts",), "the replies, joined"),
    ("logged", "<metric>"): Key(
        "[B, T] or [B]",
        "any",
        "importance_sampling",
        ("metrics",),
        "what a verb wants on the curves: a mean over sampled tokens or over rows",
    ),
    ("old_log_probs", "full"): Key(
        "[B, T]", "float32", "importance_sampling", ("objectives",), "of the policy that learns"
    ),
    "policy_weight": Key(
        "[B, T]", "float32", "importance_sampling", ("objectives",), "factor of the policy term"
    ),
    ("ref_log_probs", "full"): Key("[B, T]", "float32", "reference", ("kl", "metrics"), "its own"),
    "kl_penalty": Key(
        "[B, T]", "float32", "reference", ("kl", "metrics"), "k1 in nats, without the coefficient"
    ),
    "reward_kl": Key("[B, T]", "float32", "kl", ("advantage",), "-coeff * KL, or 0"),
    "reward": Key("[B, T]", "float32", "kl", ("gae", "metrics"), "reward_raw + reward_kl"),
    "kl_left": Key("[B]", "float32", "kl", ("kl",), "the coefficient left for the loss to charge"),
    "advantage": Key("[B, T]", "float32", "advantage", ("objectives", "transcripts"), "A"),
    "value": Key("[B, T]", "float32", "gae", ("objectives", "metrics"), "V(tokens < t)"),
    "returns": Key("[B, T]", "float32", "gae", ("objectives", "metrics"), "advantage + value"),
    "weight": Key("[B, T]", "float32", "update", ("update",), "what a token counts in a step"),
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
