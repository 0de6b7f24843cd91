"""What a generating policy may be asked for, checked; an unknown or impossible wish is an error.

Names are those of transformers' GenerationConfig, with the common other names of some. The sampler
fulfils most wishes; those that only transformers' own `generate` can are handed on to it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from policies.filters import NO_FILTERS, Filters

ALIASES = {
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
FILTERS = tuple(asdict(NO_FILTERS))
# Processors of transformers; what they leave of the distribution has log-probs like any other.
HANDED_ON = (
    *("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("exponential_decay_length_penalty", "renormalize_logits", "remove_invalid_values"),
    *("forced_eos_token_id", "guidance_scale"),
)
# These say what `generate` returns; log-probs are returned anyway (return_log_probs).
ALWAYS = frozenset({"output_scores", "output_logits", "return_dict_in_generate"})
NEUTRAL = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "penalty_alpha": 0.0,
    "use_cache": True,
}
REASONS = {
    "beam": "a beam search draws from no distribution, so its replies have no log-probs",
    "length": "lengths count new tokens here: max_new_tokens, min_new_tokens, max_prompt_tokens",
    "time": "a reply would end where no token shows it",
    "logprobs": "say return_log_probs of the wrapper",
    "": "the wrapper does not offer it",
}
BEAM = ("num_beam", "early_stopping", "diversity", "length_penalty", "constraints", "force_words")


@dataclass(frozen=True)
class GenerateKwargs:
    """How to generate: temperature 0 is greedy; lengths in tokens; stop texts end a reply."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    max_prompt_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_return_sequences: int | None = None
    eos_token_id: tuple[int, ...] | None = None  # instead of the model's and the template's
    pad_token_id: int | None = None
    skip_special_tokens: bool = False  # in the texts
    filters: Filters = NO_FILTERS
    handed_on: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, kwargs: dict[str, Any]) -> "GenerateKwargs":
        """Return the checked arguments; raises ValueError with the names and ranges expected.

        >>> GenerateKwargs.read({"do_sample": False, "max_tokens": 5}).temperature
        0.0
        """
        asked = {k: v for k, v in _renamed(kwargs).items() if v is not None}
        greedy = asked.pop("do_sample", True) is False
        if greedy and asked.get("temperature", 0) != 0:
            raise ValueError(
                "When do_sample=False (greedy decoding), temperature must be 0, got "
                f"{asked['temperature']}; drop one of them"
            )
        eos = asked.pop("eos_token_id", None)
        stop = asked.pop("stop", ())
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"expected stop to be a list of texts, got {stop!r}")
        made = cls(
            temperature=0.0 if greedy else float(asked.pop("temperature", 1.0)),
            max_new_tokens=int(asked.pop("max_new_tokens", 64)),
            stop=tuple(stop),
            eos_token_id=None if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            filters=Filters(**{k: asked.pop(k) for k in FILTERS if k in asked}),
            **{k: asked.pop(k) for k in _OWN if k in asked},
            handed_on={k: asked.pop(k) for k in HANDED_ON if k in asked},
        )
        _refuse(asked)
        made._check()
        return made

    def _check(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"expected temperature >= 0, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens >= 1, got {self.max_new_tokens}")
        if self.num_return_sequences is not None and self.num_return_sequences < 1:
            raise ValueError(f"expected n >= 1, got {self.num_return_sequences}")
        if self.filters.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"expected min_new_tokens <= max_new_tokens, got {self.filters.min_new_tokens} and "
                f"{self.max_new_tokens}"
            )
        if self.handed_on and self.stop:
            raise ValueError(
                f"expected stop or {sorted(self.handed_on)}, got both: with these, only tokens "
                "(eos_token_id) can end a reply"
            )

    @property
    def num_samples(self) -> int | None:
        """Return how many replies a prompt gets; None is one, without a dimension for it."""
        count = self.num_return_sequences
        return None if count == 1 else count

    @property
    def narrowed(self) -> list[str]:
        """Return what makes the log-probs others than those of the model at the temperature."""
        return [*self._filters(), *self.handed_on]

    def _filters(self) -> dict[str, Any]:
        chosen, neutral = asdict(self.filters), asdict(NO_FILTERS)
        return {k: v for k, v in chosen.items() if v != neutral[k]}

    def config(self) -> GenerationConfig:
        """Return the wishes for transformers' own generate."""
        wishes = self._filters() | self.handed_on
        if self.temperature == 0:
            return GenerationConfig(do_sample=False, **wishes)
        return GenerationConfig(do_sample=True, temperature=self.temperature, **wishes)

    def found(self, tokenizer: Any) -> Callable[[list[int]], bool] | None:
        """Return what tells whether a reply holds a stop text; None if there are none."""
        if not self.stop:
            return None
        if tokenizer is None:
            raise ValueError(f"expected a tokenizer to find stop={list(self.stop)}, got none")
        return lambda ids: any(text in tokenizer.decode(ids) for text in self.stop)

    def check_positions(self, most: int | None) -> None:
        """Raise where the longest prompt and reply together exceed the model's `most` positions."""
        asked = f"policy.max_new_tokens={self.max_new_tokens}"
        if self.max_prompt_tokens is not None:
            asked = f"policy.max_prompt_tokens={self.max_prompt_tokens} and {asked}"
        total = (self.max_prompt_tokens or 1) + self.max_new_tokens
        if most is not None and total > most:
            raise ValueError(
                f"{asked} make up to {total} tokens, the model's max_position_embeddings is "
                f"{most}; lower policy.max_prompt_tokens or policy.max_new_tokens"
            )

    def check_lengths(self, prompts: list[Tensor], tokenizer: Any, most: int | None = None) -> None:
        """Raise where a prompt exceeds max_prompt_tokens, or with its reply `most` positions."""
        limit, new = self.max_prompt_tokens, self.max_new_tokens
        for i, row in enumerate(prompts):
            over = limit is not None and len(row) > limit
            if not over and (most is None or len(row) + new <= most):
                continue
            end = row[-40:].tolist() if tokenizer is None else tokenizer.decode(row[-40:].tolist())
            if over:
                raise ValueError(
                    f"prompt {i} of the batch has {len(row)} tokens, policy.max_prompt_tokens is "
                    f"{limit}; raise it, or drop the row: {end!r}"
                )
            raise ValueError(
                f"prompt {i} of the batch has {len(row)} tokens, with policy.max_new_tokens={new} "
                f"more than the model's max_position_embeddings={most}; lower "
                "policy.max_new_tokens, or drop the row (policy.max_prompt_tokens is the bound "
                f"for it): {end!r}"
            )


_OWN = ("max_prompt_tokens", "num_return_sequences", "pad_token_id", "skip_special_tokens")


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the wishes under the names used here; one given under two names is a ValueError."""
    out: dict[str, Any] = {}
    for name, value in kwargs.items():
        known = ALIASES.get(name, name)
        if known in out:
            both = sorted(k for k in kwargs if ALIASES.get(k, k) == known)
            raise ValueError(f"expected {' or '.join(both)}, got both; drop one")
        out[known] = value
    return out


def _refuse(asked: dict[str, Any]) -> None:
    """Raise ValueError for the first wish that nothing here fulfils."""
    known = {k for k in vars(GenerationConfig()) if not k.startswith("_")} | {"logprobs"}
    for name, value in asked.items():
        if name in ALWAYS or value == NEUTRAL.get(name, ...):
            continue
        if name not in known and name not in NEUTRAL:
            offered = [*FILTERS, *HANDED_ON, *ALIASES, *_OWN, "temperature", "max_new_tokens"]
            near = get_close_matches(name, offered, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected names of {sorted(offered)}"
            raise ValueError(f"generate_kwargs has an unknown {name!r}; {hint}")
        topic = "beam" if name.startswith(BEAM) else name.rpartition("_")[2]
        raise ValueError(f"generate_kwargs has {name}={value!r}: {REASONS.get(topic, REASONS[''])}")
