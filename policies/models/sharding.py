"""Shard weights, gradients and moments over ranks with torch's FSDP2.

Decoder layers are gathered one at a time. The rest (embeddings, head, last norm) belongs to the
root, the scorer, so that a tied head is complete in its forward. Weights are complete only inside
`forward`, `values`, `logits` and `within` of a sharded scorer, and all ranks must call these
equally often: a rank without rows runs a dummy. Trained half-precision weights have float32
masters in the shards and are half precision when gathered.

In a mesh of two dimensions the second has the shards and the first has copies (HSDP). Tensor and
sequence parallelism are not supported: docs/scaling.md says where to stop.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from policies.host import bare
from policies.padding import predicted
from policies.scorer import Placement, Scorer

FORWARDS = ("values", "logits", "within")  # methods that use weights, besides `forward`


def shard(scorer: Scorer, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard a scorer's weights over a mesh's ranks in place, before the optimizer is built.

    `offload` keeps them on the CPU between forwards; the optimizer then runs there.
    """
    shares: dict[str, Any] = {"mesh": mesh}
    if offload:
        shares["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    layers, half = decoder_layers(scorer), trained_half(scorer)
    _part(layers)
    if scorer.critic is not None:  # float32 for any dtype of the body
        fully_shard(scorer.critic.head, mp_policy=_gathered_in(None), **shares)
    _become_sharded(scorer)
    for unit in (*layers, scorer):  # one by one, to avoid a second model in float32
        for p in unit.parameters() if half else ():
            if not isinstance(p, DTensor):  # float32 may not fit on a host of many ranks
                p.data = p.data.to(device_of(mesh)).float()
        fully_shard(unit, mp_policy=_gathered_in(half), **shares)
    for name in FORWARDS:
        register_fsdp_forward_method(scorer, name)
    _fetch_in_order(scorer)
    scorer.placement = Shards(scorer, mesh, half=half)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device in a mesh."""
    number = torch.cuda.current_device() if mesh.device_type == "cuda" else None
    return torch.device(mesh.device_type, number)


def _fetch_in_order(scorer: Any) -> None:
    """Let a layer's backward prefetch the layer before it, independent of past forwards."""
    # FSDP follows the forwards since the last backward; after sampling these differ between ranks.
    critic = scorer.critic
    bodies = [scorer.model, *([critic.body] if critic is not None and critic.body else [])]
    chains: list[Any] = [decoder_layers(body) for body in bodies]
    for chain in chains:
        for layer, before in zip(chain, [scorer, *chain], strict=False):  # first the root
            layer.set_modules_to_backward_prefetch([before])
    scorer.set_modules_to_backward_prefetch([chain[-1] for chain in chains])
    if critic is not None:
        critic.head.set_modules_to_backward_prefetch([scorer])


def tie(scorer: Scorer, owner: Scorer) -> None:
    """Let a second scorer on a sharded model (another adapter) use the owner's shards."""
    _become_sharded(scorer)
    object.__setattr__(scorer, "owner", owner)  # no submodule: the owner registers the weights
    scorer.placement = owner.placement


def _become_sharded(scorer: Scorer) -> None:
    kind = type(scorer)
    scorer.__class__ = type(f"Sharded{kind.__name__}", (ShardedScorer, kind), {})


def decoder_layers(scorer: Any) -> list[nn.Module]:
    """Return the decoder layers of a scorer's model and critic; raise ValueError without any."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in scorer.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        kind = type(scorer.model).__name__
        raise ValueError(f"launch=fsdp2 finds no decoder layers in {kind}; use launch=ddp")
    return layers


def _part(layers: list[nn.Module]) -> None:
    """Give each layer separate parameters: a critic's body shares the weights that LoRA froze."""
    seen: set[int] = set()
    for layer in layers:
        ids = {id(p) for p in layer.parameters()}
        for module in layer.modules():
            for name, p in module._parameters.items():
                if id(p) in seen and p is not None:
                    module._parameters[name] = nn.Parameter(p.data, requires_grad=p.requires_grad)
        seen |= ids


def trained_half(scorer: Scorer) -> torch.dtype | None:
    """Return the half-precision dtype of a scorer's weights if such weights are trained."""
    apart = {id(p) for p in scorer.critic.head.parameters()} if scorer.critic is not None else set()
    body = [p for p in scorer.parameters() if id(p) not in apart]
    half = {p.dtype for p in body if p.requires_grad and p.dtype.itemsize < 4}
    if half and len(kinds := {p.dtype for p in body}) > 1:
        raise ValueError(
            f"launch=fsdp2 expects weights of one dtype, got {sorted(map(str, kinds))}; use "
            "policy.dtype=float32 with policy.autocast=bfloat16, or launch=ddp"
        )
    return next(iter(half), None)


def _gathered_in(half: torch.dtype | None) -> MixedPrecisionPolicy:
    # Inputs are not cast: temperatures would be rounded (contract 3).
    reduced = torch.float32 if half else None
    return MixedPrecisionPolicy(half, reduce_dtype=reduced, cast_forward_inputs=False)


class ShardedScorer(Scorer):
    """Mixin of sharded scorers: gathers the weights, runs equally many forwards on each rank."""

    owner: "ShardedScorer | None" = None  # the scorer whose weights it uses; None = itself

    def within(self, call: Callable[[], Any]) -> Any:
        """Call with the root's weights gathered."""
        return call()

    def forward(self, tokens: Tensor, attention_mask: Tensor, keep=None, **how: Any) -> Any:
        """Score as the base class does; without tokens to keep, run a dummy row with weight 0."""
        empty = not predicted(bare(attention_mask), bare(keep)).any()
        rows: tuple[Any, ...] = (tokens, attention_mask, keep)
        if empty:
            how |= {"temperature": 1.0, "group_id": None}
            rows = _dummy(self.device)
        call = partial(super().forward, *rows, **how)
        reference = how.get("reference")
        if isinstance(reference, ShardedScorer) and reference.owner is None:
            call = partial(_inside, reference, call)
        done = call() if self.owner is None else self.owner.within(call)
        results = {field.name: getattr(done, field.name) for field in fields(done)}
        results = {name: x for name, x in results.items() if x is not None}
        if empty:
            zeros = torch.zeros(bare(tokens).shape, device=self.device)
            return replace(done, **{name: zeros + 0 * x.sum() for name, x in results.items()})
        # FSDP attaches its hooks to the outputs; a view would lose them.
        return replace(done, **{n: x.clone() for n, x in results.items() if x._base is not None})

    def values(self, tokens: Tensor, attention: Tensor, keep: Tensor, *, group_id=None) -> Tensor:
        """Return only the values, as the base class does."""
        if predicted(bare(attention), bare(keep)).any():
            return super().values(tokens, attention, keep, group_id=group_id)
        anchor = 0 * super().values(*_dummy(self.device)).sum()
        return torch.zeros(bare(tokens).shape, device=self.device) + anchor


def _inside(reference: ShardedScorer, call: Callable[[], Any]) -> Any:
    """Call with the root's weights of a reference gathered, and return the scores."""
    # As an output they would get hooks that gather frozen layers in the backward too: after the
    # policy's layers, in an empty micro-batch before them. Ranks would mix up the weights.
    done = []
    reference.within(lambda: done.append(call()))
    return done[0]


def _dummy(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, attention and keep of a dummy row that predicts one token."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    return ids, torch.ones_like(ids, dtype=torch.bool), ids.new_tensor([[0, 1]]).bool()


def _plain(p: Any, dtype: torch.dtype, *, fill: bool) -> nn.Parameter:
    full = p.detach().full_tensor()
    value = full.to("cpu", dtype) if fill else torch.empty(0, dtype=dtype)
    return nn.Parameter(value, requires_grad=p.requires_grad)


class Unsharded(Placement):
    """Every rank holds every weight until sharding; forwards run on `device`.

    Copies share their weights, so that no rank ever holds a second model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copy(self, module: nn.Module, shared: dict[int, Any] | None = None) -> nn.Module:
        """Return a copy of a module with the same weights."""
        every = list(module.parameters())
        same = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in every}
        return copy.deepcopy(module, same | (shared or {}))


class Shards(Placement):
    """Every rank holds a part of every weight; trained weights are gathered in dtype `half`.

    Full tensors have this dtype too, as without shards; a critic's head is float32.
    """

    def __init__(self, scorer: Any, mesh: DeviceMesh, *, half: torch.dtype | None) -> None:
        self.scorer, self.mesh, self.half = scorer, mesh, half
        trained = {name for name, p in scorer.named_parameters() if p.requires_grad and half}
        self.rounded = dict.fromkeys(trained - {"critic.head.weight", "critic.head.bias"}, half)
        self.device = device_of(mesh)
        self.gathered = False

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Gather all weights and keep them inside the block."""
        if self.gathered:
            yield
            return
        units = [m for m in self.scorer.modules() if isinstance(m, FSDPModule)]
        self.scorer.within(lambda: None)  # runs the hooks that make the scorer FSDP's root
        self.gathered = True
        try:
            for unit in units:
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            yield
        finally:
            self.gathered = False
            for unit in units:
                unit.set_reshard_after_forward(unit is not self.scorer, recurse=False)
                unit.reshard()

    @contextmanager
    def full_tensors(self, *, fill: bool = True) -> Iterator[None]:
        """Replace the shards by full CPU tensors inside the block, with values if `fill`."""
        self.scorer.reshard()
        swapped: dict[int, tuple[Any, nn.Parameter]] = {}
        places = []
        for prefix, module in self.scorer.named_modules():
            for name, p in module._parameters.items():
                if isinstance(p, DTensor):
                    if id(p) not in swapped:
                        dtype = self.rounded.get(f"{prefix}.{name}", p.dtype)
                        swapped[id(p)] = p, _plain(p, dtype, fill=fill)
                    places.append((module, name, p))
        try:
            for module, name, p in places:
                module._parameters[name] = swapped[id(p)][1]
            yield
        finally:
            for module, name, p in places:
                module._parameters[name] = p

    @contextmanager
    def forwards(self, count: int) -> Iterator[int]:
        """Return the maximum of `count` over ranks, or `count` while all weights are gathered."""
        if self.gathered:
            yield count
            return
        most = torch.tensor(count, device=self.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        yield int(most)
        self.scorer.reshard()

    def master(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the float32 master of a weight that is saved in half precision."""
        return {"master": weight.detach()} if name in self.rounded else {}
