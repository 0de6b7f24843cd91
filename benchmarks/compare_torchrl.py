"""leash beside TorchRL, system by system, on the same random inputs, where the original is right.

    python -m venv /tmp/torchrl && /tmp/torchrl/bin/pip install torch==2.13.0 torchrl transformers
    OMP_NUM_THREADS=1 /tmp/torchrl/bin/python -m benchmarks.compare_torchrl [system ...]

Prints the largest absolute difference (inputs in float64) and the time of TorchRL over that of
leash (float32; above 1 leash is faster). TorchRL is a dependency of nothing here, hence the
environment of its own. A new system is a function that yields cases, and its line in SYSTEMS. What
the original gets wrong is left out; docs/coming_from_torchrl.md names the tests that hold it.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.cases import Case, both, difference, gradient
from benchmarks.compare_losses import losses, mc_advantage
from benchmarks.compare_rollout import controllers, reward_model, rollout_from_model
from benchmarks.compare_wrapper import kl_transforms, scoring
from benchmarks.measure import seconds
from policies import (
    History,
    LLMMaskedCategorical,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
)
from policies.models import find_model, load_tokenizer


def llm_masked_categorical(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare at valid positions and for valid tokens."""
    batch, length, vocabulary = 2, 64, 50_000
    logits = torch.randn(batch, length, vocabulary, dtype=dtype)
    tokens = torch.randint(0, vocabulary, (batch, length))
    position = torch.rand(batch, length) < 0.8
    token = torch.rand(logits.shape) < 0.8
    token.scatter_(-1, tokens.unsqueeze(-1), True)
    for kind, mask in (("positions", position), ("tokens", token)):
        keep = position if kind == "positions" else torch.ones_like(position)

        def make(cls, x=logits, mask=mask):
            return cls(logits=x, mask=mask)

        def entropy(cls, x=logits, make=make, keep=keep):
            return make(cls, x).entropy()[keep]

        def log_prob(cls, x=logits, make=make):
            return make(cls, x).log_prob(tokens)

        works = {
            "log_prob": log_prob,
            "log_prob, gradient": lambda cls, f=log_prob: gradient(partial(f, cls), logits),
            "entropy": entropy,
            "entropy, gradient": lambda cls, f=entropy: gradient(partial(f, cls), logits),
            "mode": lambda cls, make=make, keep=keep: make(cls).mode[keep],
            "sample": lambda cls, make=make, keep=keep: make(cls).sample()[keep],
            "probs": lambda cls, make=make: make(cls).probs,
        }
        theirs = torchrl.modules.LLMMaskedCategorical
        yield from both(works, LLMMaskedCategorical, theirs, kind)


def masked_categorical(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare dense and sparse masks, classes and one-hots; every row has a valid class, no ties.

    Left out: the gradient of RelaxedOneHot. The original overwrites the relaxed sample that its
    backward reads; tests/test_masked_categorical.py checks ours against the formula.
    """
    rows, classes, given = 64, 5_000, 20
    logits = torch.randn(rows, classes, dtype=dtype)
    indices = torch.rand(rows, classes).topk(given).indices.sort(-1).values
    mask = torch.rand(rows, classes) < 0.8
    value = indices[:, 0]
    mask.scatter_(-1, value.unsqueeze(-1), True)
    hot, w = torch.nn.functional.one_hot(value, classes), torch.randn(rows, classes, dtype=dtype)
    pairs = [(MaskedCategorical, value), (MaskedOneHotCategorical, hot), (OneHotCategorical, hot)]
    for ours, right in pairs:
        hows = {"dense": {"mask": mask}, "sparse": {"indices": indices}}
        for kind, how in hows.items() if ours is not OneHotCategorical else [("all", {})]:

            def make(cls, x=logits, how=how):
                return cls(x, **how)

            works = {
                "log_prob": lambda cls, make=make, v=right: make(cls).log_prob(v),
                "log_prob of probs": lambda cls, how=how, v=right: cls(
                    probs=logits.softmax(-1), **how
                ).log_prob(v),
                "entropy": lambda cls, make=make: make(cls).entropy(),
                "mode": lambda cls, make=make: make(cls).mode,
                "sample": lambda cls, make=make: make(cls).sample((3,)),
            }
            if right is hot:
                works["rsample"] = lambda cls, make=make: make(cls).rsample((3,))
                works["rsample, gradient"] = lambda cls, make=make: gradient(
                    lambda x: w * make(cls, x).rsample(), logits
                )
            yield from both(works, ours, getattr(torchrl.modules, ours.__name__), kind)


def chats(torchrl: ModuleType, dtype: torch.dtype) -> Iterator[Case]:
    """Compare chats made, grown, rendered and read, as text.

    Left out: contents with blanks at their ends, and the parsers that strip, merge or raise.
    """
    tokenizer = load_tokenizer(find_model("tiny"))
    prompts = [
        [{"role": "system", "content": "Be kind"}, {"role": "user", "content": f"What is\n\n{i}?"}]
        for i in range(64)
    ]
    whole = [
        [*prompt, {"role": "assistant", "content": f"It is {i}"}]
        for i, prompt in enumerate(prompts)
    ]
    written = History.from_chats(whole).apply_chat_template(
        tokenizer=tokenizer, chat_template_name="chatml", add_generation_prompt=False
    )

    def letters(texts: Any) -> Tensor:
        return torch.tensor([ord(c) for text in texts for c in str(text)])

    def said(history: Any) -> Tensor:
        return letters(row.content for row in history.unbind(0))

    def render(cls: Any, name: str) -> Tensor:
        made = cls.from_chats(whole)
        return letters(made.apply_chat_template(tokenizer=tokenizer, chat_template_name=name))

    works: dict[str, Callable[[Any], Tensor]] = {
        "from_chats": lambda cls: said(cls.from_chats(whole)),
        "extend": lambda cls: said(
            cls.from_chats(prompts).extend(cls.from_chats(prompts), inplace=False, dim=0)
        ),
        **{
            f"apply_chat_template, {name}": partial(render, name=name)
            for name in ("chatml_format", "qwen", "llama", "deepseek")
        },
        **{
            f"from_text, {name}": lambda cls, name=name: said(cls.from_text(written, name))
            for name in ("chatml_format", "qwen")
        },
    }
    yield from both(works, History, torchrl.data.llm.History, "64 chats")


# Each takes the torchrl package and the dtype of its inputs, and makes them from the global seed.
SYSTEMS: dict[str, Callable[[ModuleType, torch.dtype], Iterator[Case]]] = {
    "llm_masked_categorical": llm_masked_categorical,
    "masked_categorical": masked_categorical,
    "chats": chats,
    "losses": losses,
    "mc_advantage": mc_advantage,
    "scoring": scoring,
    "kl_transforms": kl_transforms,
    "rollout_from_model": rollout_from_model,
    "reward_model": reward_model,
    "controllers": controllers,
}


def main() -> None:
    """Print a table of the systems asked for, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", nargs="*", help=f"of {', '.join(SYSTEMS)}; default: all")
    wanted = parser.parse_args().system or list(SYSTEMS)
    try:
        import torchrl.data.llm
        import torchrl.envs.llm.transforms
        import torchrl.modules.llm
        import torchrl.modules.models.llm
        import torchrl.objectives.llm
    except ModuleNotFoundError:
        sys.exit(
            "expected torchrl beside leash, found none; make an environment of its own with "
            "'pip install torch==2.13.0 torchrl transformers' and run this file with its python"
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"torchrl {torchrl.__version__}, torch {torch.__version__}")
    print(f"{'system':72} {'max abs difference':>18} {'time ratio':>10}")
    for system in wanted:
        torch.manual_seed(1)
        exact = {c.name: difference(c) for c in SYSTEMS[system](torchrl, torch.float64)}
        for case in SYSTEMS[system](torchrl, torch.float32):
            ratio = seconds(case.theirs, 7) / seconds(case.ours, 7)
            print(f"{case.name:72} {exact[case.name]:18.1e} {ratio:10.2f}")


if __name__ == "__main__":
    main()
