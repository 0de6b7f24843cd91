"""Names of metrics that several files read (docs/metrics.md)."""

ACCURACY, HELD_REWARD, HELD_KL = "eval/sampled_accuracy", "eval/reward", "eval/kl_ref_sequence"
