"""What a coefficient comes to: where training ends, against the optimum, both by enumeration.

    python -m benchmarks.coefficients

A model of six tokens answers one prompt with one or two of them: 31 replies, each with a reward,
so the optimum of E[r] - c KL is known exactly. leash's own advantage, leash, objective and update
train it on sampled replies, and the end is measured over all 31. Two numbers for each c:

    nominal      the coefficient at whose optimum this much reward is, over c: 1 is what was asked
    efficiency   the least KL for this much reward / that which was spent: 1 is no waste

Prints the table of docs/kl.md ("What a coefficient comes to"); about two minutes of one core.
"""

import copy
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.once import markdown
from policies.scorer import Scorer
from trainer import (
    BudgetKLController,
    ConstantKLController,
    GroupAdvantage,
    GRPOObjective,
    Leash,
    Runtime,
)
from trainer.losses import kl_term
from trainer.update import Update

V, REPLIES = 6, 256
PROMPT = END = 0  # no reply goes on after it: [0, 0] would be to the model what [0] is
IDS = torch.tensor(
    [[PROMPT, a, b] for a, b in itertools.product(range(V), repeat=2) if a != END or b == END]
)  # [31, 3]; a reply that begins with END is over
MASK = torch.stack([torch.zeros(len(IDS)) > 0, torch.ones(len(IDS)) > 0, IDS[:, 1] != END], -1)
REWARD = torch.randn(len(IDS), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
COEFFS = (0.3, 1.0, 3.0)
WAYS: dict[str, dict[str, Any]] = {  # `kl.*` and `algorithm.*` that are not those of RLOO's kind
    "k1 in the reward": {},
    "k1 in the reward, `sequence_mean`": {"aggregation": "sequence_mean"},
    "k1 in the reward, `constant`": {"aggregation": "constant"},
    "k1 in the reward, `scale_by_std`": {"scale_by_std": True},
    "k2 in the loss": {"estimator": "k2"},
    "full in the loss": {"estimator": "full"},
    "k3 in the loss": {"estimator": "k3"},
    "k3 in the loss, `scale_by_std` (GRPO)": {"estimator": "k3", "scale_by_std": True},
}


@dataclass(frozen=True)
class End:
    """Where a policy is: reward and KL (nats), exact means; `start` [31] is the reference."""

    reward: float
    kl: float
    start: Tensor

    def optimum(self, coeff: float) -> tuple[float, float]:
        """Return reward and KL of ref * exp(r / coeff) / Z."""
        raised = self.start + REWARD / coeff
        log_z = float(raised.logsumexp(0))
        reward = float(((raised - log_z).exp() * REWARD).sum())
        return reward, reward / coeff - log_z

    def nominal(self) -> float:
        """Return the coefficient whose optimum has this reward."""
        low, high = 1e-3, 1e3
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.optimum(middle)[0] < self.reward else (middle, high)
        return low


def log_probs(model: torch.nn.Module) -> Tensor:
    """Return those of the tokens of every reply, [31, 3] float64; 0 outside."""
    table = model(input_ids=IDS).logits[:, :-1].double().log_softmax(-1)
    chosen = table.gather(-1, IDS[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(len(IDS), 1), chosen], -1) * MASK


def six_tokens(width: int, seed: int) -> Qwen2ForCausalLM:
    """Return a model of one layer over six tokens, its weights so large that tokens differ."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=V,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape))
    return model


def small(width: int = 32) -> Qwen2ForCausalLM:
    """Return a model that can give the 31 replies any probabilities."""
    model = six_tokens(width, 0)
    with torch.no_grad():
        model.lm_head.weight.mul_(width**-0.5)
    return model


def train(
    coeff: float,
    runtime: Runtime,
    *,
    estimator: str = "k1",
    scale_by_std: bool = False,
    aggregation: str = "token_mean",
    target: float | None = None,
    steps: int = 200,
    lr: float = 0.01,
) -> End:
    """Train on `REPLIES` fresh replies a step, the rate falling to 0; k1 acts in the reward.

    With a `target` (nats) `kl.controller=budget` steers the coefficient.
    """
    model = small()
    with torch.no_grad():
        ref = log_probs(model)
    where = "reward" if estimator == "k1" else "loss"
    constant = ConstantKLController(kl_coef=coeff)
    control = BudgetKLController(coeff, target=target) if target else constant
    leash = Leash(control, estimator, where)
    advantage = GroupAdvantage(group_size=REPLIES, scale_by_std=scale_by_std, leash=leash)
    update = Update(
        Scorer(model),
        torch.optim.Adam(model.parameters()),
        GRPOObjective(leash=leash),
        runtime,
        lr=lambda step: lr * (1 - step / steps),
        aggregation=aggregation,
        max_tokens=2,
        max_grad_norm=0.0,
        reference=Scorer(copy.deepcopy(model)),
    )
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        with torch.no_grad():
            own = log_probs(model)
        picked = own.sum(-1).exp().multinomial(REPLIES, replacement=True, generator=draw)
        batch = _batch(picked, own, ref)
        update(advantage(batch))
        measured = batch["kl_penalty"], kl_term(own[picked], ref[picked], "k3")
        k1, k3 = (float(kl.sum(-1).mean()) for kl in measured)
        seen = {"kl/ref": k1, "kl/ref_sequence": k1, "kl/ref_k3": k3}  # a reply as one token
        leash.follow(seen, replies=REPLIES)
    with torch.no_grad():
        own = log_probs(model)
    chance = own.sum(-1).exp()
    return End(float(chance @ REWARD), float(chance @ (own - ref).sum(-1)), ref.sum(-1))


def _batch(picked: Tensor, own: Tensor, ref: Tensor) -> TensorDict:
    """Return the picked replies as a rollout with the reference's log-probs, [256, 3]."""
    mask, rows = MASK[picked], torch.arange(len(picked))
    td = TensorDict({"loss_mask": mask, "temperature": torch.ones(len(picked))}, [len(picked)])
    td["tokens", "full"] = IDS[picked]
    td["masks", "all_attention_mask"] = mask | (torch.arange(3) == 0)
    td["log_probs", "full"], td["ref_log_probs", "full"] = own[picked].float(), ref[picked].float()
    td["kl_penalty"] = td["log_probs", "full"] - td["ref_log_probs", "full"]
    raw = torch.zeros(mask.shape)
    raw[rows, mask.sum(-1)] = REWARD[picked].float()  # at the last token
    return td.set("reward_raw", raw)


def table(runtime: Runtime) -> str:
    """Return Markdown: a row for each way, nominal and efficiency for each coefficient."""
    rows = []
    for way, keys in WAYS.items():
        ends = [(c, train(c, runtime, **keys)) for c in COEFFS]
        cells = [
            f"{end.nominal() / c:.2f}, {end.optimum(end.nominal())[1] / end.kl:.2f}"
            for c, end in ends
        ]
        rows.append([way, *cells])
    return markdown(["", *(f"c = {c:g}" for c in COEFFS)], rows)


def main() -> None:
    """Print the table."""
    with TemporaryDirectory() as folder, Runtime(Path(folder)) as runtime:
        print(table(runtime))


if __name__ == "__main__":
    main()
