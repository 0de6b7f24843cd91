"""What does not go together with the engine that samples. Torch-free."""

from collections.abc import Iterator, Sequence
from typing import Any

from conf import schema


def findings(policy: dict[str, Any], given: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with `policy.engine` and the keys of policy.vllm that are given."""
    if policy["engine"] == "transformers":
        for name in given:
            yield f"policy.vllm.{name} is for policy.engine=vllm; give that, or leave it out"
        return
    for name in given if policy["vllm"]["url"] else ():
        if name not in ("url", "dtype", "tolerance"):
            option = f"--{name.replace('_', '-')}"
            yield f"policy.vllm.{name} is the server's to say: give `vllm serve` {option} instead"
    if policy["_target_"] == "policies.load_reward_model":
        yield "policy.engine=vllm samples replies, a reward model gives none; leave it out"
    for name in ("top_k", "top_p", "min_p"):
        if policy[name] != schema.declared()["policy"][name].default:
            told = "ratio and KL are over what it leaves, which vLLM does not say"
            yield f"policy.{name} needs policy.engine=transformers: {told}"
