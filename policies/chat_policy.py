"""What a run computes with its policy: chats or ids in, responses or log-probs out.

`load_policy` returns a TransformersPolicy: this class with an engine's `_draw`, which samples ids.
A batch is dense: ids [B, T] with bool masks [B, T], prompts padded left, responses right.
Token in, token out: if a batch has ids, these ids are the prompt or are scored; only a prompt
without ids is rendered from its history.
Alignment: entry t of a `full` belongs to token t; unscored entries are 0.
Texts or ragged rows as input, several samples per prompt and distributions are in
policies/torchrl/, because no run needs them.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from policies.chats.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from policies.chats.history import History
from policies.chats.messages import records_of, visible
from policies.chats.renderer import Renderer
from policies.host import send
from policies.limits import Limits
from policies.models.find import token_ids
from policies.padding import attended, inner, is_ragged, pad, pad_mask, rows, unpad
from policies.sampler import Sampled, Stop
from policies.scorer import max_positions, score_in_parts

NestedKey = str | tuple[str, ...]
Records = list[list[dict[str, Any]]]  # the messages of B chats, with their flags


@dataclass(frozen=True)
class Sequences:
    """Prompts or full sequences: ids [B, T] and bool masks [B, T], None where unknown."""

    tokens: Tensor
    attention: Tensor
    assistant: Tensor | None = None
    response: Tensor | None = None  # sampled tokens


@dataclass(frozen=True)
class Prompts:
    """The prompts of a call: ids, the seed of each row, and the chats if there are any."""

    ids: Sequences
    streams: Tensor  # [B]
    chats: History | None
    records: Records | None  # the messages of `chats`


class ChatPolicy(TensorDictModuleBase):
    """Generate responses to prompts or score full sequences, a TensorDict [B] at a time.

    limits: lengths, temperature, filters and stops of generation.
    generate: False scores the ids of `tokens.full`.
    inplace: write into the input, else into a new TensorDict.
    text_key, log_probs_key: the keys of texts and log-probs; text_key=None leaves texts out.
    score_mask_key: a bool mask [B, T]; only its tokens are scored, the others are 0.
    micro_batch_tokens: the maximum of padded tokens in one scoring forward.

    A `stream` [B] in the input seeds each row; otherwise torch's generator does.
    Log-probs of a response belong to the sampling distribution (temperature, top-p, ...); scores
    belong to the full distribution at the temperature.
    """

    default_device = torch.device("cpu")  # device of a model without weights

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any,
        renderer: Renderer | None,
        limits: Limits,
        generate: bool = True,
        inplace: bool | str = True,
        text_key: NestedKey | None = "text",
        log_probs_key: NestedKey | None = "log_probs",
        score_mask_key: NestedKey | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer, self.limits = tokenizer, limits
        self.renderer: Any = renderer
        self.generate, self.inplace = generate, inplace
        self.text_key, self.log_probs_key = text_key, log_probs_key
        self.score_mask_key, self.micro_batch_tokens = score_mask_key, micro_batch_tokens
        self.temperature, self.max_new_tokens = limits.temperature, limits.max_new_tokens
        self.version = 0  # counts the weight syncs
        self._set_model(model)
        self._set_ends()
        self.in_keys = [("history", "prompt")] if generate else [("tokens", "full")]
        keys = [text_key if generate else None, "masks", "tokens", log_probs_key]
        keys += ["history", "policy_version", "temperature"] if generate else []
        self.out_keys = [key for key in keys if key is not None]

    def get_new_version(self, **changes: Any) -> Any:
        """Return a policy over the same weights with some constructor arguments changed."""
        same = ("tokenizer", "renderer", "limits", "generate", "inplace", "text_key")
        same += ("log_probs_key", "score_mask_key", "micro_batch_tokens")
        settings = {name: getattr(self, name) for name in same}
        settings["model"] = self.model if self.scorer is None else self.scorer
        new = type(self)(**settings | changes)
        new.copy_attributes(self, same_weights=new.model is self.model)
        return new

    def copy_attributes(self, other: Any, *, same_weights: bool) -> None:
        """Copy the attributes that load_policy and weight syncs set on another policy."""
        names = ("source", "system_prompt", "classes")
        for name in (*names, "files", "version") if same_weights else names:
            if hasattr(other, name):
                setattr(self, name, getattr(other, name))

    def for_rollouts(self) -> Any:
        """Return this policy as `trainer.collect` calls it: in place, without texts."""
        if not self.generate:
            raise ValueError("collect expects a policy with generate=True, got generate=False")
        if self.inplace is True and self.text_key is None:
            return self
        return self.get_new_version(inplace=True, text_key=None)

    def at_temperature(self, temperature: float) -> Any:
        """Return this policy at another sampling temperature."""
        return self.get_new_version(limits=replace(self.limits, temperature=temperature))

    def sampling(self) -> AbstractContextManager[None]:
        """Return the context of a rollout, in which each rank samples at its own pace."""
        return nullcontext()

    def _set_model(self, model: Any) -> None:
        """Store the model, and the scorer that computes with it if the engine has one."""
        self.model, self.scorer = model, None

    def _set_ends(self) -> None:
        """Find the ids that end a response, the id of padding, and the longest context."""
        ends = token_ids(getattr(self.model, "generation_config", None), "eos_token_id")
        ends += token_ids(self.tokenizer, "eos_token_id")
        ends += self.renderer.stop_ids if self.renderer else ()
        eos_ids = self.limits.eos_token_id
        self.stop_ids = frozenset(ends if eos_ids is None else eos_ids)
        self.stop = Stop(self.stop_ids, self.limits.stop_finder(self.tokenizer))
        pads = [self.limits.pad_token_id, *token_ids(self.tokenizer, "pad_token_id"), *ends, 0]
        self.pad_token_id = next(i for i in pads if i is not None)
        self.max_positions = max_positions(self.model)
        if self.generate:
            self.limits.check_positions(self.max_positions)

    @property
    def room(self) -> float:
        """Return the largest number of tokens of a prompt; inf = no limit."""
        return self.limits.room(self.max_positions)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        weights = self.model.parameters() if isinstance(self.model, nn.Module) else iter(())
        return next((w.device for w in weights), self.default_device)

    def forward(
        self, tensordict: TensorDictBase, *, temperature_key: NestedKey | None = None
    ) -> TensorDictBase:
        """Generate or score td [B].

        Scores are at the temperatures [B] at `temperature_key`, else at the policy's temperature.
        """
        out = self.outputs(tensordict, temperature_key)
        return update_in_place(out, tensordict) if self.inplace else out

    def outputs(self, td: TensorDictBase, temperature_key: NestedKey | None) -> TensorDictBase:
        """Return the responses to the prompts of td [B], or the scores of its sequences."""
        if self.generate:
            return self._generate(self._prompts(td))
        return self._score(td, self.sequences(td), temperature_key)

    # Generating.

    def _prompts(self, td: TensorDictBase) -> Prompts:
        """Return the prompts of td, which must fit the limits."""
        records = self.records(td)
        chats = None if records is None else td.get(self.in_keys[0])
        ids = self.prompt_ids(td, records)
        self.limits.check_lengths(ids.attention, self.max_positions)
        streams = td.get("stream", None)  # [B]
        if streams is None:
            streams = torch.randint(2**62, (len(ids.tokens),))  # [B]
        return Prompts(ids, streams, chats, records)

    def records(self, td: TensorDictBase) -> Records | None:
        """Return the messages of each prompt; None without a history."""
        chats = td.get(self.in_keys[0], None)
        return None if chats is None else [records_of(chat) for chat in chats.unbind(0)]

    def prompt_ids(self, td: TensorDictBase, records: Records | None = None) -> Sequences:
        """Return the ids of the prompts, padded left, from td or, if it has none, rendered."""
        ids = rows(td, ("tokens", "prompt"))
        if ids is not None:
            masks, ragged = rows(td, "attention_mask"), is_ragged(td.get("tokens"))
            return self.padded(attended(ids, masks, ragged=ragged), "left")
        records = self.records(td) if records is None else records
        if records is None:
            keys = f"{self.in_keys[0]} or ('tokens', 'prompt')"
            raise ValueError(f"expected {keys}, got keys {sorted(map(str, td.keys()))}")
        return self.rendered(records, "left", add_generation_prompt=True)

    def rendered(self, records: Records, side: str, *, add_generation_prompt: bool) -> Sequences:
        """Render each chat once; adjacent repeats (the samples of a group) share the work."""
        ids, assistant, last = [], [], None
        for chat in map(visible, records):
            if chat != last:
                last, render = chat, self.renderer.render
                done = render(chat, add_generation_prompt=add_generation_prompt)
                row, mask = torch.tensor(done.ids), torch.tensor(done.assistant, dtype=torch.bool)
            ids.append(row)
            assistant.append(mask)
        marks = send(pad(assistant, False, side=side), self.device)  # [B, T]
        return replace(self.padded(ids, side), assistant=marks)

    def padded(self, ids: list[Tensor], side: str) -> Sequences:
        """Return ids [t] of each row as sequences [B, T] without other masks, padded on `side`."""
        mask = pad_mask([len(row) for row in ids], side=side)  # [B, T]
        tokens = pad(ids, self.pad_token_id, side=side)  # [B, T]
        return Sequences(send(tokens, self.device), send(mask, self.device))

    def _generate(self, prompts: Prompts) -> TensorDictBase:
        """Return a response to each prompt: tokens, masks, log-probs, texts and histories."""
        ids, streams = prompts.ids, prompts.streams.cpu()  # [B, P], [B]
        return self._responses(prompts, self._draw(ids.tokens, ids.attention, streams))

    def _responses(self, prompts: Prompts, sampled: Sampled) -> TensorDict:
        """Return the containers of prompts and sampled responses."""
        size = len(prompts.streams)
        out = self._containers(prompts.ids, sampled)
        out.set("policy_version", torch.full((size,), self.version))  # [B]
        out.set("temperature", torch.full((size,), self.temperature or 1.0))  # [B]
        self._add_chats(out, prompts, sampled)
        return out

    def _containers(self, prompts: Sequences, sampled: Sampled) -> TensorDict:
        """Return a td [B] with tokens, masks and log-probs of prompts and responses."""
        return self._placed(self._dense(prompts, sampled), len(sampled.ids))

    def _dense(self, prompts: Sequences, sampled: Sampled) -> dict[type, Any]:
        """Return the containers of prompts and responses; prompts have log-probs 0."""
        real, mask = prompts.attention, sampled.mask  # [B, P], [B, R]
        known = torch.zeros_like(real) if prompts.assistant is None else prompts.assistant
        zeros = torch.zeros(real.shape, device=real.device)  # [B, P]
        ids = sampled.ids.masked_fill(~mask, self.pad_token_id)  # [B, R]
        common: Any = {"padded": True, "batch_size": [len(real)]}
        masks = Masks(
            all_attention_mask=torch.cat([real, mask], -1),  # [B, T]
            all_assistant_mask=torch.cat([known, mask], -1),  # [B, T]
            all_response_mask=torch.cat([torch.zeros_like(real), mask], -1),  # [B, T]
            **common,
        )
        done: dict[type, Any] = {Masks: masks}
        pairs = {Tokens: (prompts.tokens, ids), LogProbs: (zeros, sampled.log_probs)}
        for kind, (prompt, response) in pairs.items():
            full = torch.cat([prompt, response], -1)  # [B, T]
            done[kind] = kind(prompt=prompt, response=response, full=full, **common)
        return done

    def _placed(self, containers: dict[type, Any], size: int) -> TensorDict:
        """Return a td [size] with the containers that have a key, at this key."""
        keys = self.container_keys()
        placed = {keys[kind]: value for kind, value in containers.items() if keys[kind] is not None}
        return TensorDict(placed, batch_size=[size])

    def container_keys(self) -> dict[type, NestedKey | None]:
        """Return the keys of tokens, masks and log-probs."""
        return {Tokens: "tokens", Masks: "masks", LogProbs: self.log_probs_key}

    def _add_chats(self, out: TensorDictBase, prompts: Prompts, sampled: Sampled) -> None:
        """Write the texts and histories of prompts, of responses and of both."""
        responses = self._decode(sampled.ids, sampled.mask & ~sampled.ends(self.stop_ids))
        if self.text_key is not None:
            ids, attention = prompts.ids.tokens, prompts.ids.attention  # [B, P] each
            full = torch.cat([ids, sampled.ids], -1)  # [B, T]
            real = torch.cat([attention, sampled.mask], -1)  # [B, T]
            text = Text(
                prompt=self._decode(ids, attention),
                response=responses,
                full=self._decode(full, real),
                batch_size=[len(responses)],
            )
            out.set(self.text_key, text)
        if prompts.records is not None:
            complete = sampled.complete.tolist()
            out.set("history", generated_chats(prompts, responses, complete))

    def _decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        rows = [row.tolist() for row in unpad(ids.cpu(), mask.cpu())]
        skip = self.limits.skip_special_tokens
        return self.tokenizer.batch_decode(rows, skip_special_tokens=skip)

    # Scoring.

    def sequences(self, td: TensorDictBase) -> Sequences:
        """Return the full sequences of td [B], ids [B, T] with the masks that it has."""
        tokens, masks = td.get(("tokens", "full"), None), td.get("masks", None)
        if tokens is None:
            raise ValueError(f"expected ('tokens', 'full'), got {sorted(map(str, td.keys()))}")
        names = ("all_attention_mask", "all_assistant_mask", "all_response_mask")
        known = [None if masks is None else masks.get(name, None) for name in names]
        attention, *marks = [None if mask is None else mask.to(self.device) for mask in known]
        tokens = tokens.to(self.device)  # [B, T]
        attention = torch.ones_like(tokens, dtype=torch.bool) if attention is None else attention
        return Sequences(tokens, attention, *marks)

    def _score(
        self, td: TensorDictBase, seq: Sequences, temperature_key: NestedKey | None
    ) -> TensorDictBase:
        """Return tokens, masks and log-probs of the full sequences of td."""
        common: Any = {"padded": True, "batch_size": [len(seq.tokens)]}
        masks = Masks(
            all_attention_mask=seq.attention,
            all_assistant_mask=seq.assistant,
            all_response_mask=seq.response,
            **common,
        )
        scores = self._scored(td, seq, temperature_key)  # [B, T]
        containers = {Masks: masks, Tokens: Tokens(full=seq.tokens, **common)}
        containers |= {LogProbs: LogProbs(full=scores, **common)}
        return self._placed(containers, len(seq.tokens))

    def score(self, td: TensorDictBase, temperature_key: NestedKey | None = None) -> Tensor:
        """Return the log-probs [B, T] of the tokens of a td's sequences; see `forward`."""
        return self._scored(td, self.sequences(td), temperature_key)

    def _scored(
        self, td: TensorDictBase, seq: Sequences, temperature_key: NestedKey | None = None
    ) -> Tensor:
        """Return the log-probs [B, T] of a td's sequences."""
        return self._log_probs(*self._to_score(td, seq, temperature_key))

    def _to_score(
        self, td: TensorDictBase, seq: Sequences, temperature_key: NestedKey | None
    ) -> tuple[Any, ...]:
        """Return the arguments of `_log_probs` for a td's sequences."""
        keep = None
        if self.score_mask_key is not None:
            keep = self.mask_at(td, self.score_mask_key)  # [B, T]
        group = td.get("group_id", None)
        group = None if group is None else group.to(self.device)  # [B]
        scale = self.scoring_temperature(td, temperature_key)
        return seq.tokens, seq.attention, keep, scale, group

    def mask_at(self, td: TensorDictBase, key: NestedKey) -> Tensor | None:
        """Return the bool mask [B, T] at a key; None without one."""
        mask = td.get(key, None)
        return None if mask is None else mask.to(self.device)

    def scoring_temperature(
        self, td: TensorDictBase, key: NestedKey | None = None
    ) -> Tensor | float:
        """Return the scoring temperature, from td [B] at `key` or, without it, the policy's."""
        temperatures = None if key is None else td.get(key, None)
        return (self.temperature or 1.0) if temperatures is None else temperatures.to(self.device)

    # Methods that a subclass for an engine (transformers, vLLM) overrides, on token ids.

    def _draw(self, prompts: Tensor, attention: Tensor, streams: Tensor) -> Sampled:
        """Return a response to each prompt [B, P], padded left; streams [B] seed the rows."""
        raise NotImplementedError(f"{type(self).__name__} does not generate: it has no _draw")

    def _log_probs(
        self,
        tokens: Tensor,
        attention: Tensor,
        keep: Tensor | None,
        temperature: Tensor | float,
        group_id: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Return the log-probs [B, T] of the tokens kept (None = all), 0 elsewhere.

        `temperature` is a number or [B]; rows of one `group_id` [B] share their prompt. `options`
        are further arguments of the scorer.
        """
        return score_in_parts(
            self.scorer,
            tokens,
            attention,
            keep,
            limit=self.micro_batch_tokens,
            group_id=group_id,
            temperature=temperature,
            **options,
        )


def generated_chats(prompts: Prompts, responses: list[str], complete: list[bool]) -> ChatHistory:
    """Return the histories of prompts, of responses and of both."""
    turns = [
        [{"role": "assistant", "content": text, "is_complete": done}]
        for text, done in zip(responses, complete, strict=True)
    ]
    both = [[*chat, *turn] for chat, turn in zip(prompts.records or [], turns, strict=True)]
    response, full = History.from_records(turns), History.from_records(both)
    return ChatHistory(prompt=prompts.chats, response=response, full=full, batch_size=[len(turns)])


def update_in_place(out: TensorDictBase, target: TensorDictBase) -> TensorDictBase:
    """Write outputs into a td and keep other entries of its containers."""
    for key, value in out.items():
        old = target.get(key, None)
        if old is None or isinstance(old, Tensor) or isinstance(value, Tensor):
            continue
        alike = is_ragged(value) == is_ragged(old) and type(inner(value)) is type(inner(old))
        if not alike:  # different kinds cannot share a container
            target.set(key, value)
    return target.update(out)
