"""Decoding: the forward of a sampler's rows, a token at a time, on transformers' cache.

policies/sampler.py draws the tokens and ends the responses.

On a GPU a step has a thousand kernel launches, which take several times as long as the kernels. A
CUDA graph launches all at once, for models whose forward does not depend on values (GRAPHED).
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.cache_utils import DynamicLayer

from policies.layout import takes_masks
from policies.padding import positions

GRAPHED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROOM = 128  # smallest number of tokens in the buffers of a graph
FREE_SHARE = 0.8  # share of the free memory for the cache of a rollout
GROWTH = 2.5  # old and new buffer together: a full one is copied into one larger by half
LOGITS = 6  # float32 copies of a row's logits in a step
FEW = 64  # smallest number of rows of a graph; a step with fewer takes as long


def decode(model: nn.Module, prompts: Tensor, attention: Tensor) -> "Decoding":
    """Return the state after the prompts [B, T], padded left; attention [B, T] bool."""
    kind = GraphDecoding if prompts.device.type == "cuda" and fits_graph(model) else Decoding
    return kind(model, prompts, attention)


def rows_that_fit(model: nn.Module, tokens: int, device: torch.device) -> int | None:
    """Return how many rows of `tokens` the free memory of a GPU can sample; None on a CPU."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(1, int(FREE_SHARE * free / row_bytes(model, tokens)))


def row_bytes(model: nn.Module, tokens: int) -> float:
    """Return the bytes of a row of `tokens` while it is sampled: its cache, and some logits."""
    config: Any = model.config.get_text_config()  # pyright: ignore[reportCallIssue]
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    numbers = 2 * (getattr(config, "num_key_value_heads", None) or heads) * width
    weight = next(model.parameters())
    dtype, device = weight.dtype, weight.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    cache = config.num_hidden_layers * numbers * tokens * dtype.itemsize
    return GROWTH * cache + LOGITS * 4 * config.vocab_size


def fits_graph(model: nn.Module) -> bool:
    """Return whether all steps of the model are the same kernels at the same addresses."""
    kind, config = type(model), getattr(model, "config", None)
    if kind.__name__ not in GRAPHED or not kind.__module__.startswith("transformers."):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    by_length = rope.get("rope_type") in ("dynamic", "longrope")
    sharded = any(isinstance(layer, FSDPModule) for layer in model.modules())
    return takes_masks(config) and not (by_length or sharded)


class Decoding:
    """The running forward: cache, mask and the next-token logits of the active rows."""

    def __init__(self, model: nn.Module, prompts: Tensor, attention: Tensor) -> None:
        self.model = model
        first = unique_prompts(prompts, attention)  # [B] bool
        owner = first.cumsum(0) - 1  # [B] the prompt that each row uses
        mask = attention[first]
        position = positions(mask)
        out = model(
            input_ids=prompts[first],
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache = out.past_key_values
        _narrow(self.cache, prompts.device.type)
        self.cache.reorder_cache(owner)
        self.mask = mask[owner]  # [n, L]
        self.position = position[owner, -1:] + 1  # [n, 1]
        self.logits = out.logits[owner, -1].float()  # [n, V]

    def advance(self, sampled: Tensor, active: Tensor) -> None:
        """Feed the sampled tokens [n] of the rows `active`; drop the other rows."""
        if len(active) < len(sampled):
            self.cache.reorder_cache(active)
            self.mask, self.position = self.mask[active], self.position[active]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(active), 1)], -1)
        out = self.model(
            input_ids=sampled[active, None],
            attention_mask=self.mask,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.position = self.position + 1
        self.logits = out.logits[:, -1].float()


class GraphDecoding(Decoding):
    """Decoding by a CUDA graph over buffers of fixed size.

    Rows that have ended stay in the buffers, and their outputs are not read. When half of more than
    FEW rows have ended, the others move to smaller buffers. Full buffers grow by half.
    """

    # device -> stream of all captures, last graph: a new graph uses the memory of the last one.
    captures: ClassVar[dict[torch.device, tuple[Any, Any]]] = {}

    def __init__(self, model: nn.Module, prompts: Tensor, attention: Tensor) -> None:
        super().__init__(model, prompts, attention)
        self.filled = self.mask.shape[-1]  # slots of the buffers
        self.slot = torch.zeros(1, dtype=torch.int64, device=prompts.device)  # the next slot
        self.rows = torch.arange(len(prompts), device=prompts.device)
        for layer in self.cache.layers:
            layer.__class__, layer.slot = FixedLayer, self.slot
        self._fit()

    def advance(self, sampled: Tensor, active: Tensor) -> None:
        """Feed the sampled tokens [n] of the rows `active`; drop the other rows."""
        self.rows = self.rows[active]  # [n] places in the buffers
        sparse = len(self.ids) > FEW and 2 * len(active) <= len(self.ids)
        if sparse or self.filled == self.mask.shape[-1]:
            self._fit()
        self.ids[self.rows, 0] = sampled[active]
        self.mask[..., self.filled] = True
        self.slot.fill_(self.filled)
        self.filled += 1
        self._step()
        self.position += 1
        self.logits = self.out[self.rows, -1].float()

    def _fit(self) -> None:
        """Copy the active rows into buffers with room for more tokens."""
        room = self.filled + max(ROOM, self.filled // 2)
        more = room - room % 8 - self.filled  # attention's kernels copy masks of other sizes
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                used = getattr(layer, name)[self.rows, :, : self.filled]
                setattr(layer, name, F.pad(used, (0, 0, 0, more)))
        used = self.mask[self.rows][..., : self.filled].view(len(self.rows), 1, 1, -1)
        self.mask = F.pad(used, (0, more))  # [n, 1, 1, room]
        self.position = self.position[self.rows]
        self.ids = self.position.new_zeros(len(self.rows), 1)
        self.rows = torch.arange(len(self.rows), device=self.rows.device)
        self.graph = None

    def _forward(self) -> Tensor:
        return self.model(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        ).logits

    def _step(self) -> None:
        """Set the logits `out` [n, 1, V]; the first step on new buffers captures the graph."""
        with torch.cuda.device(self.rows.device):
            if self.graph is None:
                self.graph = self._capture(self.rows.device)
            self.graph.replay()

    def _capture(self, device: torch.device) -> Any:
        side, last = self.captures.get(device) or (torch.cuda.Stream(device), None)
        graph, pool = torch.cuda.CUDAGraph(), last.pool() if last else None
        side.wait_stream(main := torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._forward()  # loads and chooses kernels, which a capture cannot
            # torch.cuda.graph would empty the allocator's cache at each rollout.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.out = self._forward()
            finally:
                graph.capture_end()
        main.wait_stream(side)
        self.captures[device] = side, graph
        return graph


class FixedLayer(DynamicLayer):
    """The cache of a layer in buffers [B, heads, room, D]; a token goes to `slot` [1]."""

    slot: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Store keys and values of one token and return the buffers."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.slot, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.slot, value_states.to(self.values.dtype))
        return self.keys, self.values


class NarrowLayer(DynamicLayer):
    """The cache of a layer in autocast's dtype, because autocast would cast it for each token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append keys and values; rotary embeddings make the keys float32."""
        dtype = torch.get_autocast_dtype(key_states.device.type)
        return super().update(key_states.to(dtype), value_states.to(dtype), *args, **kwargs)


def _narrow(cache: Any, device: str) -> None:
    """Cast the layers of full attention to the dtype of autocast, if autocast is on."""
    if not torch.is_autocast_enabled(device):
        return
    dtype = torch.get_autocast_dtype(device)
    for layer in cache.layers:
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
            layer.__class__ = NarrowLayer


def unique_prompts(prompts: Tensor, attention: Tensor) -> Tensor:
    """Return which rows differ from the row before them, [B] bool."""
    same = (prompts[1:] == prompts[:-1]) & (attention[1:] == attention[:-1])
    first = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    first[1:] = ~same.all(-1)
    return first
