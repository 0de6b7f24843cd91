"""Another model than the policy's as its reference: frozen, of the same vocabulary."""

from policies.load import check_head
from policies.models import FoundModel, load_model, load_tokenizer
from policies.scorer import Scorer
from policies.wrappers.transformers_wrapper import TransformersWrapper


def load_scorer(found: FoundModel, policy: TransformersWrapper) -> Scorer:
    """Return a frozen scorer on a model of the policy's vocabulary, dtype and device."""
    like = next(policy.model.parameters())
    network = load_model(found, dtype=str(like.dtype).split(".")[-1], device=like.device)
    _check_vocabulary(found, network.get_input_embeddings().num_embeddings, policy)
    scorer = Scorer(network.requires_grad_(False), autocast=policy.scorer.autocast)
    check_head(scorer)
    return scorer


def _check_vocabulary(found: FoundModel, rows: int, policy: TransformersWrapper) -> None:
    """Refuse a model in which an id is another token than in the policy, or has no embedding.

    Ids that only one of the tokenizers names are rows that pad an embedding: those may differ.
    """
    mine, theirs = policy.tokenizer.get_vocab(), load_tokenizer(found).get_vocab()
    named = {i: token for token, i in theirs.items()}
    differs = ""
    for token, i in sorted(mine.items(), key=lambda item: item[1]):
        if named.get(i, token) != token:
            differs = f"id {i} is {named[i]!r} in it and {token!r} in the policy"
        elif theirs.get(token, i) != i:
            differs = f"{token!r} has id {theirs[token]} in it and {i} in the policy"
        elif i >= rows:
            differs = f"it has {rows} embeddings and the policy's {token!r} has id {i}"
        if differs:
            raise ValueError(
                f"expected kl.reference to have the policy's vocabulary, got {found.folder}: "
                f"{differs}; use a reference of the same family"
            )
