"""From a model's name to a policy, and from a policy to its frozen reference."""

import copy

import torch

from policies.models import find_model, load_model, load_tokenizer
from policies.scorer import Scorer
from policies.transformers_wrapper import TransformersWrapper


def load_policy(
    model: str,
    *,
    source: str = "auto",
    dtype: str = "float32",
    device: str | torch.device | None = None,
    autocast: str | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 64,
    max_prompt_tokens: int | None = None,
    system_prompt: str | None = None,
    chat_template: str | None = None,
    stop: list[str] | None = None,
) -> TransformersWrapper:
    """Return the generating policy on `model`: a folder, an embedded model or a hub id.

    dtype is that of the weights; autocast that of the matrix products (bfloat16 on a GPU).
    The found copy stands at `policy.found` (folder, origin, sha256), what an env should put in
    front of each chat at `policy.system_prompt`.
    """
    found = find_model(model, source=source)
    network = load_model(found, dtype=dtype, device=device)
    scorer = Scorer(network, autocast=getattr(torch, autocast) if autocast else None)
    _check_head(scorer)
    policy = TransformersWrapper(
        scorer,
        tokenizer=load_tokenizer(found),
        generate_kwargs={
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "stop": list(stop or []),
        },
        chat_template=chat_template,
        pad_output=True,
    )
    if chat_template is not None:  # the saved model speaks the template it was trained with
        policy.tokenizer.chat_template = policy.renderer.template
    policy.found = found
    policy.system_prompt = system_prompt
    return policy


def load_reference(policy: TransformersWrapper, name: str | None = None) -> TransformersWrapper:
    """Return a frozen scoring wrapper: a copy of the policy as it is now, or the model `name`.

    It scores the tokens of `masks.all_response_mask` only; the rest of its log-probs is 0. `found`
    says where its weights come from.
    """
    weights = next(policy.model.parameters())
    found = getattr(policy, "found", None)
    if name is None:
        network = copy.deepcopy(policy.model)
    else:
        found = find_model(name)
        network = load_model(found, dtype=str(weights.dtype).split(".")[-1], device=weights.device)
        if network.get_input_embeddings().num_embeddings < len(policy.tokenizer):
            raise ValueError(
                f"expected a reference with the policy's vocabulary ({len(policy.tokenizer)} "
                f"tokens), got {network.get_input_embeddings().num_embeddings} in {name!r}; use a "
                "reference of the same family"
            )
    network.requires_grad_(False).eval()
    reference = policy.get_new_version(
        model=Scorer(network, autocast=policy.scorer.autocast),
        generate=False,
        log_probs_key="ref_log_probs",
        score_mask_key=("masks", "all_response_mask"),
        inplace=False,
    )
    reference.found = found
    return reference


@torch.no_grad()
def _check_head(scorer: Scorer) -> None:
    """Refuse a model whose logits are not its output embeddings times its last hidden state."""
    device = next(scorer.parameters()).device
    ids = torch.arange(4, device=device)[None]
    with scorer.precision():
        expected = scorer.model(input_ids=ids).logits[:, :-1].float()
    got = scorer.logits(ids, torch.ones_like(ids, dtype=torch.bool))[:, 1:]
    if not torch.allclose(expected, got, atol=1e-3, rtol=1e-3):
        raise ValueError(
            f"expected the logits of {type(scorer.model).__name__} to be its output embeddings "
            "applied to its last hidden state, got other values; policies/scorer.py needs to "
            "learn this family's head"
        )
