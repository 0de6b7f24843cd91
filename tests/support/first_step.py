"""The first optimiser step of a run on the tiny model, and an iteration of dynamic sampling.

Both are the same on any number of ranks. And four steps in half precision, after which the ranks
still hold the same weights.

Also a script for two ranks: rank 0 writes what `first_step` returns into a folder.
"""

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from envs.chat_env import ChatEnv
from envs.transforms.kl import RetrieveKL
from policies.layout import pack_rows
from policies.load import load_policy
from policies.scorer import Scorer
from support import contracts
from support.policies import dynamic_rollouts, leash, scaled
from support.tasks import Many
from support.updates import Record
from trainer.advantage import GroupAdvantage
from trainer.objectives import GRPOObjective, SFTObjective
from trainer.optimizer import make_optimizer
from trainer.runtime import Runtime, check_agreement, checksums
from trainer.sources import Rollouts
from trainer.update import Update

MICRO_BATCH = 50  # tokens; on two ranks the one has 4 micro-batches then, the other 6
CASES = {"micro_batches": (), "half_empty": (2, 3)}  # groups whose responses are not learnt from
HALF = {
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"dtype": "bfloat16", "lora": {"r": 4, "alpha": 8.0}},
    "autocast": {"autocast": "bfloat16"},
}
STEPS, LR = 4, 1e-3
TENSORS = ("gradients", "moved")


def first_step(runtime: Runtime) -> dict[str, Any]:
    """Roll out the first iteration on all ranks and return it with its whole gradients.

    `prompts`, `rows` (ids) and `drawn` (prompt, reward and draws of each row of dynamic sampling)
    are in the order of one rank; `micro_batches` and `rounds` are numbers of each rank. Of steps in
    half precision, by case: `norms` of the gradients and `sums` of the weights of each rank,
    `moved` is the change of the weights; `drift` is what `check_agreement` says of one bit.
    """
    policy, task = contracts.make_policy(), contracts.Words()
    env = ChatEnv(task, group_size=contracts.G)
    source = Rollouts(
        task=task, env=env, generator=policy, runtime=runtime, prompts_per_iteration=4
    )
    batch = RetrieveKL(scaled(policy, 0.9))(source(0))
    grpo = GroupAdvantage(group_size=contracts.G, leash=leash())(batch.clone())
    prompts = [row["messages"][-1]["content"] for row in source.prompts(0).get("row").tolist()]
    attended = batch["masks", "all_attention_mask"]
    rows = [ids[keep].tolist() for ids, keep in zip(batch["tokens", "full"], attended, strict=True)]
    drawn, rounds = drawn_again(runtime)
    half = {name: steps(batch.clone(), runtime, options) for name, options in HALF.items()}
    return {
        "norms": {name: runtime.gather(norms) for name, (norms, _, _) in half.items()},
        "sums": {name: runtime.gather(checksums(scorer)) for name, (_, scorer, _) in half.items()},
        "moved": {name: moved for name, (_, _, moved) in half.items()},
        "drift": drifted(runtime, half["bfloat16"][1]),
        "drawn": list(chain(*runtime.gather(drawn))),
        "rounds": runtime.gather(rounds),
        "prompts": list(chain(*runtime.gather(prompts))),
        "rows": list(chain(*runtime.gather(rows))),
        "micro_batches": runtime.gather(
            len(pack_rows(attended, MICRO_BATCH, group_id=batch["group_id"]))
        ),
        "gradients": {name: gradient(grpo, policy, runtime, left) for name, left in CASES.items()},
    }


def steps(batch, runtime: Runtime, options: dict) -> tuple[list[float], Scorer, torch.Tensor]:
    """Return gradient norms, scorer and weight changes of a few SFT steps in half precision."""
    torch.manual_seed(0)  # of the adapter
    scorer = load_policy("tiny", max_new_tokens=6, **options).scorer
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in scorer.parameters():
            if p.ndim > 1 and p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    before = trained(scorer)
    wrapped, optimizer = runtime.accelerator.prepare(scorer, make_optimizer(scorer, lr=LR))
    rate = {"lr": lambda step: LR, "leash": leash(0.0)}
    update = Update(wrapped, optimizer, SFTObjective(), runtime, **rate)
    norms = [update(batch.clone())["optim/grad_norm"] for _ in range(STEPS)]
    return norms, scorer, trained(scorer) - before


def trained(scorer: Scorer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in scorer.parameters() if p.requires_grad])


def drifted(runtime: Runtime, scorer: Scorer) -> str:
    """Return what is said when the last bit of one weight of the last rank is another."""
    if runtime.rank == runtime.ranks - 1:
        weight = next(p for p in scorer.parameters() if p.requires_grad)
        weight.data.view(torch.int16)[0, 0] ^= 1
    try:
        check_agreement(scorer, runtime, iteration=STEPS)
    except RuntimeError as error:
        return str(error)
    return ""


def drawn_again(runtime: Runtime) -> tuple[list[list], int]:
    """Return what each row of iteration 1 became by dynamic sampling, and how often it played."""
    source, played = dynamic_rollouts(runtime, Many()), []
    play = source.play
    source.play = lambda prompts: played.append(len(prompts)) or play(prompts)
    batch = source(1)
    draws = (batch["logged", "group/resampled"] + 1).tolist()
    texts, reward = map(str, batch["prompt"].tolist()), batch["reward_raw"].sum(-1).tolist()
    return [list(row) for row in zip(texts, reward, draws, strict=True)], len(played)


def gradient(batch, policy, runtime: Runtime, unlearnt: tuple[int, ...]) -> torch.Tensor:
    """Return what one step of the real update hands to its optimiser, flattened."""
    for p in policy.model.parameters():
        p.requires_grad_(True)
    optimizer = Record(policy.scorer.parameters())
    scorer, _ = runtime.accelerator.prepare(policy.scorer, optimizer)
    objective = GRPOObjective(leash=leash())
    options = {"micro_batch_tokens": MICRO_BATCH, "max_grad_norm": 0.0}
    options = {"lr": lambda step: 0.0, "leash": objective.leash, **options}
    update = Update(scorer, optimizer, objective, runtime, **options)
    batch = batch.clone()
    for group in unlearnt:
        batch["loss_mask"][batch["group_id"] == group] = False
    update(batch)
    return torch.cat(optimizer.grads)


if __name__ == "__main__":
    with Runtime(sys.argv[1]) as run:
        found = first_step(run)
        if run.is_main:
            for name in TENSORS:
                save_file(found.pop(name), Path(sys.argv[1], f"{name}.safetensors"))
            Path(sys.argv[1], "rows.json").write_text(json.dumps(found))
        run.accelerator.wait_for_everyone()
        run.accelerator.end_training()
