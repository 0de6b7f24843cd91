"""The generator of a `RetrieveKL`, where its log-probs are not there yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envs.transforms.log_probs import check_model

if TYPE_CHECKING:
    from envs.transforms.kl import RetrieveKL
    from envs.transforms.log_probs import RetrieveLogProb


def check_pair(gen: Any, ref: Any) -> None:
    """Raise unless a generation model that was given scores like the reference."""
    check_model(gen, "generation model", "RetrieveKL")
    if gen.pad_output != ref.pad_output:
        raise ValueError(
            f"pad_output mismatch: gen_model.pad_output={gen.pad_output}, "
            f"ref_model.pad_output={ref.pad_output}; the KL needs equal shapes, use one value"
        )
    if gen.log_probs_key == ref.log_probs_key:
        raise ValueError(
            "The generation and reference models must have different `log_probs_key` values, "
            f"got {ref.log_probs_key!r} for both"
        )


def from_collector(transform: RetrieveKL) -> RetrieveLogProb:
    """Return what scores the policy of the collector that runs the environment."""
    ref, path = transform.ref_model, transform.gen_log_probs_full_key[:-1]
    mode = ref.input_mode
    policy = collector_policy(transform).get_new_version(
        generate=False,
        return_log_probs=True,
        log_probs_key=path[0] if len(path) == 1 else path,
        input_mode=mode,
        input_key=(transform.history_key if mode == "history" else mode, "full"),
        pad_output=ref.pad_output,
    )
    return transform.scorer_of(policy)


def collector_policy(transform: RetrieveKL) -> Any:
    """Return the policy of the collector that runs the environment, or say who is missing."""
    remedy = "register one, pass gen_model, or give generation log-probs at "
    remedy += str(transform.gen_log_probs_full_key)
    if transform.container is None:
        raise ValueError(f"The container is not set: mount this on a TransformedEnv; {remedy}")
    if transform.collector is None:
        raise ValueError(f"The collector is not set; {remedy}")
    return transform.collector.policy
