"""The batch: the one container of the loop, and every key that may stand in it.

A row is a trajectory, right-padded. Letters, here and in all of leash: P prompts of an iteration,
G samples of a prompt, B = P * G rows (trajectories), T tokens of a row, V vocabulary, N turns,
K kept tokens of a forward, H hidden size.
"""

from dataclasses import dataclass

from tensordict import NestedKey


@dataclass(frozen=True)
class Entry:
    """One key: shape and dtype, what it is, and the files of trainer/ it goes from > to."""

    kind: str
    about: str
    files: str


KEYS: dict[NestedKey, Entry] = {
    ("tokens", "full"): Entry(
        "[B, T] int64",
        "the exact ids of all turns",
        "collect demonstrations > demonstrations gae importance_sampling reference "
        "reward_modelling transcripts update",
    ),
    ("masks", "all_attention_mask"): Entry(
        "[B, T] bool",
        "real tokens",
        "collect demonstrations > demonstrations gae importance_sampling reference "
        "reward_modelling trainer transcripts update",
    ),
    ("masks", "all_assistant_mask"): Entry(
        "[B, T] bool",
        "tokens of assistant messages, ends of turn included",
        "collect demonstrations >",
    ),
    ("masks", "all_response_mask"): Entry(
        "[B, T] bool",
        "sampled tokens",
        "collect > evaluation importance_sampling metrics overlong reference transcripts",
    ),
    ("log_probs", "full"): Entry(
        "[B, T] float32",
        "of who sampled, else 0",
        "collect > importance_sampling kl metrics objectives reference transcripts",
    ),
    "loss_mask": Entry(
        "[B, T] bool",
        "tokens to learn from",
        "collect demonstrations overlong reward_modelling sources > advantage "
        "collect demonstrations gae kl metrics objectives overlap overlong "
        "sources transcripts update",
    ),
    "reward_raw": Entry(
        "[B, T] float32",
        "task reward of each turn",
        "collect overlong > advantage collect evaluation kl metrics overlong trainer transcripts",
    ),
    ("reward_part", "<name>"): Entry(
        "[B] float32", "a part of it; NaN: does not apply", "collect overlong > metrics transcripts"
    ),
    "reward_errors": Entry("[B] float32", "reward functions that failed", "collect > metrics"),
    "success": Entry("[B] bool", "the task says the reply is right", "collect > evaluation"),
    "truncated": Entry("[B] bool", "cut by a limit", "collect > metrics overlong transcripts"),
    "dropped": Entry("[B] bool", "not judged", "collect > collect evaluation metrics"),
    "group_id": Entry(
        "[B] int64",
        "the samples of a prompt",
        "collect reward_modelling > advantage collect gae importance_sampling metrics reference "
        "reward_modelling transcripts update",
    ),
    "temperature": Entry(
        "[B] float32",
        "of the sampling",
        "collect demonstrations > demonstrations importance_sampling reference update",
    ),
    "policy_version": Entry("[B] int64", "the weights that sampled, by syncs", "collect > overlap"),
    "prompt": Entry("[B] text", "the last message of the prompt", "collect > transcripts"),
    "system": Entry("[B] text", "the prompt's system message or nothing", "collect > transcripts"),
    "answer": Entry("[B] text", "the right one, where the row has it", "collect > transcripts"),
    "response": Entry("[B] text", "the replies, joined", "collect > transcripts"),
    ("logged", "<metric>"): Entry(
        "[B, T] or [B] any",
        "what a verb wants on the curves: a mean over sampled tokens or over rows",
        "importance_sampling overlap sources > metrics",
    ),
    ("old_log_probs", "full"): Entry(
        "[B, T] float32", "of the policy that learns", "importance_sampling > objectives"
    ),
    "policy_weight": Entry(
        "[B, T] float32", "factor of the policy term", "importance_sampling > objectives"
    ),
    ("ref_log_probs", "full"): Entry(
        "[B, T] float32", "its own", "demonstrations reference > kl metrics objectives"
    ),
    "kl_penalty": Entry(
        "[B, T] float32",
        "k1 in nats, without the coefficient",
        "reference > evaluation kl metrics transcripts",
    ),
    "reward_kl": Entry("[B, T] float32", "-coeff * KL, or 0", "kl > advantage"),
    "reward": Entry("[B, T] float32", "reward_raw + reward_kl", "kl > advantage gae metrics"),
    "kl_left": Entry("[B] float32", "the coefficient left for the loss to charge", "kl > kl"),
    "advantage": Entry("[B, T] float32", "A", "advantage gae > objectives transcripts"),
    "value": Entry("[B, T] float32", "V(tokens < t)", "gae > metrics objectives"),
    "returns": Entry("[B, T] float32", "advantage + value", "gae > metrics objectives"),
    "weight": Entry("[B, T] float32", "what a token counts in a step", "update > update"),
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
