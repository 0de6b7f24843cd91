"""From a model's name to a policy, and from a policy to its frozen reference and its weights.

A run without an adapter loads no code of adapters.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from policies.chats.renderer import Renderer
from policies.chats.templates import find_template, require_template, with_variables
from policies.decoding import Decoding
from policies.limits import Limits
from policies.models.find import ModelFiles, find_model, has_adapter, load_model, load_tokenizer
from policies.models.weights import ModelWeights
from policies.sampler import Filters
from policies.scorer import LOCAL, Scorer, body_of, max_positions
from policies.transformers_policy import TransformersPolicy


def load_policy(
    model: str,
    *,
    source: str = "auto",
    dtype: str = "float32",
    device: str | torch.device | None = None,
    autocast: str | None = None,
    attn_implementation: str | None = None,
    kernels: bool = True,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    max_new_tokens: int = 64,
    max_prompt_tokens: int | None = None,
    max_rows: int | None = None,
    system_prompt: str | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    stop: list[str] | None = None,
    lora: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    compile: bool = False,
) -> TransformersPolicy:
    """Return the generating policy on `model`: a folder, an embedded model or a hub id.

    dtype: of the weights. autocast: of matrix multiplications (see `resolve_autocast`).
    attn_implementation, kernels: see `policies.models.find.load_model`.
    lora: arguments of `policies.models.lora.add_adapter`; then only the adapter is trained.
    gradient_checkpointing: compute the activations of each layer again in the backward.
    compile: fuse layers and head of updates by torch.compile, in place of `kernels`.
    chat_template_kwargs: variables of the template, {"enable_thinking": False}; they are saved in
    the tokenizer's template.
    `policy.files` says where the weights are (folder, origin, sha256).
    """
    files = find_model(model, source=source)
    tokenizer = load_tokenizer(files)
    if chat_template is None:
        require_template(tokenizer)
    if chat_template_kwargs:
        template = find_template(tokenizer, chat_template).text
        chat_template = with_variables(template, chat_template_kwargs)
    classes = {"attn_implementation": attn_implementation, "kernels": kernels and not compile}
    network = load_model(files, dtype=dtype, device=device, **classes)
    files = replace(files, frozen=check_model(network))
    if lora and lora.get("r") != 0:
        from policies.models.lora import add_adapter

        files = replace(files, without_adapter=add_adapter(network, **lora))
    if gradient_checkpointing:
        compute_again(network)
    if compile:
        from policies.models.fast.compiled import compile_layers

        compile_layers(network, body_of(network), max_positions(network))
    autocast = resolve_autocast(autocast, network.device)
    scorer = Scorer(network, autocast=getattr(torch, autocast) if autocast else None)
    scorer.compiled = compile
    limits = Limits(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_rows=max_rows,
        stop=tuple(stop or ()),
        filters=Filters(top_k=top_k, top_p=top_p, min_p=min_p),
    )
    renderer = Renderer(tokenizer, chat_template)
    policy: Any = TransformersPolicy(scorer, tokenizer=tokenizer, renderer=renderer, limits=limits)
    if chat_template is not None:  # saved with the model, which is trained with it
        policy.tokenizer.chat_template = policy.renderer.template
    policy.files, policy.source = files, source
    policy.classes = classes
    policy.system_prompt = system_prompt
    return policy


def compute_again(network: Any) -> None:
    """Let the layers keep only their inputs, and compute the rest again in the backward."""
    # Nothing is random in a layer: dropout is 0.
    how = {"use_reentrant": False, "preserve_rng_state": False}
    # The second is the name that older versions of transformers have for it.
    old = getattr(network, "gradient_checkpointing_enable", None)
    enable: Any = getattr(network, "activation_checkpointing_enable", old)
    enable(how)
    network.disable_input_require_grads()  # only the reentrant kind needs that


def resolve_autocast(name: str | None, device: torch.device) -> str | None:
    """Return the dtype of matrix multiplications; "auto": bfloat16 if the device has it."""
    if name != "auto":
        return name
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if native else None


def load_reference(
    policy: TransformersPolicy,
    name: str | None = None,
    *,
    moves: bool = False,
    micro_batch_tokens: int | None = None,
    temperature_factor: float = 1.0,
) -> TransformersPolicy:
    """Return a frozen scoring wrapper: a copy of the policy as it is now, or the model `name`.

    It scores the tokens of `masks.all_response_mask` only; the rest of its log-probs is 0.
    `micro_batch_tokens` bounds the padded tokens of one forward. Its logits are divided by the
    temperature of the policy times `temperature_factor`.
    A policy with an adapter is not copied: its reference is the same model with the adapter off,
    or, if the adapter is not at zero any more or the reference `moves`, with a copy of the adapter.
    """
    files = getattr(policy, "files", None)
    if name is not None:
        files = find_model(name, source=getattr(policy, "source", "auto"))
        scorer = _load_scorer(files, policy)
    elif has_adapter(policy.model):
        from policies.models.lora import reference_scorer

        scorer = reference_scorer(policy.scorer, moves=moves)
    else:
        scorer = frozen_copy(policy.scorer)
    separate = name is not None or not has_adapter(policy.model)
    if separate and not moves and policy.scorer.placement is LOCAL:
        cast_layers(scorer)
    scorer.temperature_factor = temperature_factor
    reference = policy.get_new_version(
        model=scorer,
        generate=False,
        log_probs_key="ref_log_probs",
        text_key=None,
        score_mask_key=("masks", "all_response_mask"),
        micro_batch_tokens=micro_batch_tokens,
        inplace=False,
    )
    reference.files = files
    return reference


def weights_of(scorer: Scorer) -> ModelWeights:
    """Return the weights of a scorer's adapter if it has one, else of its model."""
    if not has_adapter(scorer.model):
        return ModelWeights(scorer.model)
    from policies.models.lora import TRAINED, AdapterWeights

    return AdapterWeights(scorer.model, getattr(scorer, "adapter", TRAINED))


@torch.no_grad()
def check_model(model: Any) -> int:
    """Raise ValueError if scores or samples differ from the model's own forward of a row.

    Freeze the weights that the row never reaches; return how many.
    """
    name, exact = type(model).__name__, model.dtype.itemsize >= 4
    ids = torch.arange(4, device=model.device)[None]  # [1, 4]
    every = torch.ones_like(ids, dtype=torch.bool)
    with torch.enable_grad():
        logits = model(input_ids=ids, attention_mask=every).logits[0]  # [4, V]
    frozen, expected = freeze_unreached(model, logits), logits.detach().float()
    with _supported(name, "scored"):
        scores = Scorer(model).logits(ids, every)[0, 1:]  # [3, V]
    # Half precision rounds the two ways differently, by up to 1 %.
    if not _distance(scores, expected[:3]) <= (1e-3 if exact else 2e-2):
        raise ValueError(
            f"expected the logits of {name} to be its output embeddings applied to its last hidden "
            "state, got other values; its head is not supported"
        )
    prompts, mask = ids[:, [0, 1]].repeat(3, 1), every[:, :2].repeat(3, 1)  # [3, 2]
    prompts[2], mask[2, 0] = 0, False  # only the row's first token
    with _supported(name, "sampled"):
        state = Decoding(model, prompts, mask)
        first = state.logits  # [3, V]
        state.advance(ids[0, [2, 2, 1]], torch.tensor([1, 2], device=ids.device))
    samples = torch.cat([first, state.logits])  # [5, V]
    # In half precision a router may choose another expert.
    if not _distance(samples, expected[[1, 1, 0, 2, 1]]) <= (1e-3 if exact else 1.0):
        raise ValueError(
            f"expected {name} to compute the same logits for a whole row and token by token, got "
            "other values; it cannot be sampled from"
        )
    return frozen


def freeze_unreached(model: torch.nn.Module, logits: torch.Tensor) -> int:
    """Freeze weights that the logits do not depend on (image encoders); return how many.

    DDP waits for a gradient of every trained weight. An expert that the row does not use is
    trained: other experts of the same name are in the graph.
    """
    nodes, seen = [logits.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    reached = {id(node.variable) for node in seen if hasattr(node, "variable")}
    named = [(re.sub(r"\d+", "#", name), p) for name, p in model.named_parameters()]
    names = {name for name, p in named if id(p) in reached}
    for name, p in named:
        p.requires_grad_(name in names)
    return sum(p.numel() for p in model.parameters() if not p.requires_grad)


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value; NaN where one is NaN."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))


@contextmanager
def _supported(name: str, verb: str) -> Iterator[None]:
    """Turn the error of an unusual model into one line."""
    try:
        yield
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        text = f"{name} cannot be {verb} ({cause}); see docs/models.md for models that can"
        raise ValueError(text) from error


def _load_scorer(files: ModelFiles, policy: TransformersPolicy) -> Scorer:
    """Return a frozen scorer on a model of the policy's vocabulary, dtype and device."""
    like = next(policy.model.parameters())
    dtype, classes = str(like.dtype).split(".")[-1], getattr(policy, "classes", {})
    network = load_model(files, dtype=dtype, device=like.device, **classes)
    _check_vocabulary(files, network.get_input_embeddings().num_embeddings, policy)
    check_model(network)
    return Scorer(network.requires_grad_(False), autocast=policy.scorer.autocast)


def frozen_copy(scorer: Scorer) -> Scorer:
    """Return a scorer of the same weights as they are now."""
    network = scorer.placement.copy(scorer.model).requires_grad_(False).eval()
    return Scorer(network, autocast=scorer.autocast)


def cast_layers(scorer: Scorer) -> None:
    """Cast the linear layers of a frozen model to the dtype of their matmuls; scores stay equal."""
    layers = list(scorer.model.modules())
    embeddings = [x.weight for x in layers if isinstance(x, torch.nn.Embedding)]  # shared by a head
    for layer in layers:
        if isinstance(layer, torch.nn.Linear) and all(layer.weight is not e for e in embeddings):
            layer.to(scorer.autocast or layer.weight.dtype)


def _check_vocabulary(files: ModelFiles, rows: int, policy: TransformersPolicy) -> None:
    """Raise ValueError if an id is another token than in the policy, or has no embedding."""
    mine, theirs = policy.tokenizer.get_vocab(), load_tokenizer(files).get_vocab()
    named = {i: token for token, i in theirs.items()}
    for token, i in mine.items():
        if i >= rows or named.get(i, token) != token or theirs.get(token, i) != i:
            raise ValueError(
                f"expected a reference with the policy's vocabulary, got {files.folder}: "
                f"{token!r} has id {i} in the policy and {theirs.get(token)} of {rows} there; use "
                "a reference of the same family"
            )
