"""Weight sync: the generator gets the policy's new weights after each update."""

from policies.transformers_wrapper import TransformersWrapper


def weight_sync(policy: TransformersWrapper) -> None:
    """Count a new version; a policy that generates by its own weights needs no copy."""
    policy.version += 1
