"""Scoring by TransformersWrapper, and the KL transforms over it, of leash beside TorchRL's."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torch import Tensor

from benchmarks.cases import Case, both, pair
from envs.transforms import KLComputation, RetrieveKL, RetrieveLogProb
from policies import ChatHistory, History, Text, Tokens, TransformersWrapper
from policies.models import find_model, load_model, load_tokenizer

FULL, REF = ("log_probs", "full"), ("ref_log_probs", "full")
CHATS = [
    [
        {"role": "user", "content": f"Sort {'the digits ' * (i % 9)}{i} 3 1"},
        {"role": "assistant", "content": f"1 3 {i} " * (i % 5 + 1)},
    ]
    for i in range(16)
]


class World:
    """One tiny model and its chats, as the containers of each package."""

    def __init__(self, torchrl: ModuleType, dtype: torch.dtype) -> None:
        self.tokenizer = load_tokenizer(find_model("tiny"))
        self.model = load_model(find_model("tiny")).to(dtype).eval()
        self.other = load_model(find_model("tiny")).to(dtype).eval()
        with torch.no_grad():
            for weight in self.other.parameters():
                weight += 0.05 * torch.randn_like(weight)
        theirs = torchrl.modules.llm
        self.wrappers = pair(TransformersWrapper, theirs)
        ours, other = self.wrappers
        self.packages = {ours: (ChatHistory, History, Text, Tokens)}
        self.packages[other] = tuple(
            getattr(torchrl.data.llm if c is History else theirs, c.__name__)
            for c in (ChatHistory, History, Text, Tokens)
        )

    def wrap(self, cls: type, mode: str, padded: bool, key: str, model: Any = None) -> Any:
        """Return a scoring wrapper of one of the packages."""
        return cls(
            self.model if model is None else model,
            tokenizer=self.tokenizer,
            input_mode=mode,
            generate=False,
            return_log_probs=True,
            pad_output=padded,
            log_probs_key=key,
            chat_template_name="chatml_format",
        )

    @set_list_to_stack(True)
    def data(self, cls: type, mode: str) -> TensorDict:
        """Return the chats as the input of a scoring wrapper."""
        chat, history, text, tokens = self.packages[cls]
        made = history.from_chats(CHATS)
        if mode == "history":
            full = chat(full=made, batch_size=[len(CHATS)])
            return lazy_stack(list(TensorDict(history=full, batch_size=[len(CHATS)]).unbind(0)))
        texts = made.apply_chat_template(
            tokenizer=self.tokenizer,
            chat_template_name="chatml_format",
            add_generation_prompt=False,
        )
        if mode == "text":
            full = text(full=texts, batch_size=[len(CHATS)])
            return TensorDict(text=full, batch_size=[len(CHATS)])
        rows = [self.tokenizer(t, add_special_tokens=False).input_ids for t in texts]
        return lazy_stack([TensorDict(tokens=tokens(full=torch.tensor(row))) for row in rows])


def flat(td: TensorDict, *key: Any) -> Tensor:
    """Return the values of all rows at a key, without padding, one after the other."""
    return torch.cat([row.reshape(-1) for row in td.get(key, as_list=True)]).detach()


@set_list_to_stack(True)
def scoring(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare log-probs of whole chats, in every mode, padded and not, and as a distribution.

    Left out: packed scoring and generation, which are wrong there.
    """
    world = World(torchrl, dtype)
    for mode in ("history", "text", "tokens"):
        made = {cls: world.data(cls, mode) for cls in world.wrappers}
        for padded in (True, False):
            actors = {cls: world.wrap(cls, mode, padded, "log_probs") for cls in made}

            def score(cls, actors=actors, made=made, padded=padded):
                with torch.no_grad():
                    out = actors[cls](made[cls].copy())
                return out.get(FULL) if padded else flat(out, *FULL)

            works = {f"log_probs, {'padded' if padded else 'ragged'}": score}
            if padded and mode != "tokens":

                def dist(cls, actors=actors, made=made):
                    ids = actors[cls](made[cls].copy())["tokens"].full
                    with torch.no_grad():
                        return actors[cls]._get_generic_dist(made[cls].copy()).log_prob(ids)

                works["_get_generic_dist.log_prob"] = dist
            yield from both(works, *world.wrappers, f"{len(CHATS)} chats as {mode}")


@set_list_to_stack(True)
def kl_transforms(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare RetrieveLogProb, KLComputation and RetrieveKL on lazy stacks, all real tokens.

    Left out: dense data, which the original refuses; the assistant's tokens alone, whose mask has
    no end of turn there; and one reward per row, which it repeats at every token.
    """
    world = World(torchrl, dtype)
    theirs = torchrl.envs.llm.transforms
    wrap = dict(zip(pair(RetrieveLogProb, theirs), world.wrappers, strict=True))
    wrap |= dict(zip(pair(RetrieveKL, theirs), world.wrappers, strict=True))
    lengths = [len(row) for row in world.data(TransformersWrapper, "tokens").get(
        ("tokens", "full"), as_list=True)]  # fmt: skip
    rewards = [torch.randn(t, 1, dtype=dtype) for t in lengths]

    def stack(cls: type) -> TensorDict:
        td = world.data(wrap[cls], "history")
        for row, reward in zip(td.tensordicts, rewards, strict=True):
            row.set("next", TensorDict({"history": row["history"], "reward": reward}))
        return td

    def models(cls: type) -> list[Any]:
        kind = wrap[cls]
        return [
            world.wrap(kind, "history", False, key, model)
            for key, model in (("gen_log_probs", world.model), ("ref_log_probs", world.other))
        ]

    def retrieve(cls: type) -> Tensor:
        out = cls(models(cls)[1], assistant_only=False)(stack(cls))
        return flat(out, "next", *REF)

    def both_models(cls: type, key: str) -> Tensor:
        out = cls(*models(cls), assistant_only=False, coeff=0.3)(stack(cls))
        return flat(out, "next", key)

    values = [torch.randn(2, t, dtype=dtype) for t in lengths]

    def compute(cls: type, key: str) -> Tensor:
        td = lazy_stack(
            [
                TensorDict({"next": TensorDict({FULL: gen, REF: ref, "reward": reward})})
                for (gen, ref), reward in zip(values, rewards, strict=True)
            ]
        )
        return flat(cls(coeff=0.3)(td), "next", key)

    what = f"{len(CHATS)} ragged rows"
    yield from both({"ref_log_probs": retrieve}, *pair(RetrieveLogProb, theirs), what)
    for kind, work in ((KLComputation, compute), (RetrieveKL, both_models)):
        works = {
            key: lambda cls, work=work, key=key: work(cls, key) for key in ("kl_penalty", "reward")
        }
        yield from both(works, *pair(kind, theirs), what)
