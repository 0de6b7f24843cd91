"""One optimiser step of leash and of its peers on the same table of logits (make test-peers).

The policy is a table of logits [B, T, V] in float64 behind leash's own TokenDistribution; the verbs
of after_rollout, the advantage, the objective and the Update are those that a configuration builds.
A peer's function is imported from its package as published; lines that stand inside a method of
TRL's trainers are executed as they are. B = 24 responses in groups of G = 4.
"""

import ast
import importlib.util
import inspect
import sys
import textwrap
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor, nn

from conf.compose import compose_checked
from conf.plan import plan
from policies.host import bare
from policies.scorer import Scores
from policies.token_distribution import Head, TokenDistribution
from support.updates import Record
from trainer.runtime import Runtime

G, T, V = 4, 14, 24
LENGTHS = (12, 3, 1, 8, 5, 2, 11, 4, 12, 7, 6, 2, 10, 9, 12, 1, 4, 8, 3, 12, 6, 3, 12, 2)
REWARDS = (1, 0.1, 0, 1, 0, 0.9, 0.1, 0.1, 0.5, 0, 0.25, 1, 1, 1, 0, 1, 0, 0, 0.2, 0, *[0.3] * 4)
MOST = max(LENGTHS)  # tokens of the longest response, which is truncated


@dataclass(frozen=True)
class Data:
    """Responses and the logits [B, T, V] of four policies; a response's first token is its prompt.

    curr is trained, old scored before the update, gen sampled, ref is the reference.
    """

    curr: Tensor
    old: Tensor
    gen: Tensor
    ref: Tensor
    values: Tensor  # [B, T] of the critic, now
    old_values: Tensor
    tokens: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool, the sampled tokens
    rewards: Tensor  # [B]

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-probs [B, T] of the tokens."""
        return logits.log_softmax(-1).gather(-1, self.tokens[..., None]).squeeze(-1)

    @property
    def truncated(self) -> Tensor:
        return self.mask.sum(-1) == MOST


def draw(*, move: float = 0.7, far_ref: float = 0.5, on_policy: bool = False) -> Data:
    """Draw responses; `move`, `far_ref`: the spread of the logits of gen and ref from curr."""
    generator = torch.Generator().manual_seed(0)
    size = len(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    curr = normal(size, T, V)
    spread = torch.linspace(0.1, 2, size, dtype=torch.float64)[
        torch.randperm(size, generator=generator)
    ]
    gen = curr + normal(size, T, V) * spread[:, None, None] * move
    tokens = torch.randint(0, V, (size, T), generator=generator)
    tokens[:, 0] = torch.arange(size)
    place = torch.arange(T)
    mask = (place >= 1) & (place <= torch.tensor(LENGTHS)[:, None])
    values = normal(size, T)
    return Data(
        curr=curr,
        old=gen,
        gen=curr if on_policy else gen,
        ref=curr + normal(size, T, V) * far_ref,
        values=values,
        old_values=values + 0.3 * normal(size, T),
        tokens=tokens,
        mask=mask,
        rewards=torch.tensor(REWARDS, dtype=torch.float64),
    )


class Table(nn.Module):
    """A scorer whose hidden states are the logits themselves; a row's first token is its number."""

    def __init__(self, logits: Tensor, values: Tensor | None = None, old: Tensor | None = None):
        super().__init__()
        self.logits = nn.Parameter(logits.clone())
        self.value_table = None if values is None else nn.Parameter(values.clone())
        self.old_values = old
        self.critic = None if values is None else object()

    def distribution(self, tokens: Tensor, keep: Tensor, temperature: Any) -> TokenDistribution:
        states = self.logits[tokens[:, 0]][keep]
        head = Head(torch.eye(V, dtype=torch.float64), None, None)
        return TokenDistribution(head, states, keep, temperature=temperature)

    def forward(
        self,
        tokens: Tensor,
        attention: Tensor,
        keep: Tensor,
        *,
        temperature: Any = 1.0,
        entropy: bool = False,
        learn_entropy: bool = False,
        reference: "Table | None" = None,
        **_: Any,
    ) -> Scores:
        tokens, keep, temperature = bare(tokens), bare(keep), bare(temperature)
        mine = self.distribution(tokens, keep, temperature)
        theirs = reference and reference.distribution(tokens, keep, temperature)
        out = mine.scores(tokens, entropy=entropy, learn=learn_entropy, reference=theirs)
        if self.value_table is not None:
            out = replace(out, values=self.value_table[tokens[:, 0]] * keep)
        return out

    def values(self, tokens: Tensor, attention: Tensor, keep: Tensor, **_: Any) -> Tensor:
        return self.old_values[bare(tokens)[:, 0]] * bare(keep)


def leash_gradient(d: Data, *words: str) -> Tensor:
    """Return leash's gradient with respect to the logits, and to the values where it has them."""
    defaults = {"experiment": "grpo_tiny", "algorithm": "grpo", "kl.coeff": "0"}
    defaults |= {"algorithm.group_size": str(G), "algorithm.minibatches": "1"}
    defaults |= dict(word.split("=", 1) for word in words)
    cfg = OmegaConf.create(compose_checked([f"{k}={v}" for k, v in defaults.items()]))
    has_critic = "critic" in cfg.algorithm
    scorer = Table(d.curr, d.values, d.old_values) if has_critic else Table(d.curr)
    policy = SimpleNamespace(scorer=scorer if has_critic else Table(d.old))
    runtime = Runtime("/tmp")  # anew: a peer's TrainingArguments reset Accelerate's state
    parts = plan(OmegaConf.to_container(cfg, resolve=True))
    made = {"policy": policy, "runtime": runtime, "leash": parts.leash}
    batch = batch_of(d)
    for part in (*parts.after_rollout.values(), parts.advantage):
        batch = part(micro_batch_tokens=None, **made)(batch)
    update = parts.update(
        scorer=scorer,
        optimizer=(optimizer := Record(scorer.parameters())),
        objective=parts.objective(**made),
        runtime=runtime,
        leash=parts.leash,
        lr=lambda step: 0.0,
        max_tokens=MOST,
        max_grad_norm=0.0,
        reference=Table(d.ref),
    )
    update(batch)
    return optimizer.grads[0]


def batch_of(d: Data) -> TensorDict:
    """Return the batch as it is after the reference has scored it."""
    place = torch.arange(T)
    last = place == torch.tensor(LENGTHS)[:, None]
    gen, ref = d.log_probs(d.gen) * d.mask, d.log_probs(d.ref) * d.mask
    batch = TensorDict(batch_size=[len(LENGTHS)])
    batch["tokens", "full"] = d.tokens
    batch["masks", "all_attention_mask"] = place <= torch.tensor(LENGTHS)[:, None]
    batch["masks", "all_response_mask"] = batch["loss_mask"] = d.mask
    batch["log_probs", "full"], batch["ref_log_probs", "full"] = gen, ref
    batch["kl_penalty"] = gen - ref
    batch["reward_raw"] = d.rewards[:, None] * last
    batch["truncated"] = d.truncated
    batch["group_id"] = torch.arange(len(LENGTHS)) // G
    batch["temperature"] = torch.ones(len(LENGTHS))
    return batch.clone()


def peer_gradient(loss: Any, d: Data, *, values: bool = False) -> Tensor:
    """Return the gradient of loss(d with learnt logits and values), flat."""
    curr, value = d.curr.clone().requires_grad_(), d.values.clone().requires_grad_()
    inputs = (curr, value) if values else (curr,)
    found = torch.autograd.grad(loss(replace(d, curr=curr, values=value)), inputs)
    return torch.cat([part.flatten() for part in found])


# TRL


class Alone:
    """Accelerate, as TRL's trainers use it, on one process."""

    num_processes, sync_gradients, process_index, device = 1, True, 0, torch.device("cpu")

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def lines_of(method: Any, first: str, last: str, **names: Any) -> dict[str, Any]:
    """Execute the statements of a method from one that begins with `first` to one with `last`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        texts = [ast.unparse(each) for each in body] if isinstance(body, list) else []
        start = next((i for i, text in enumerate(texts) if text.startswith(first)), None)
        if start is not None:
            end = next(i for i, text in enumerate(texts) if i >= start and text.startswith(last))
            module = sys.modules[method.__module__]
            names = {**vars(module), "gather": lambda x: x, **names}
            exec(compile(ast.Module(body[start : end + 1], []), module.__file__, "exec"), names)
            return names
    raise ValueError(f"expected a statement that begins with {first!r} in {method}")


def trl_advantages(trainer_class: Any, d: Data, **settings: Any) -> Tensor:
    """Return the advantages [B] by the lines of TRL's own trainer."""
    me = SimpleNamespace(multi_objective_aggregation="sum_then_normalize", reward_clip_range=None)
    vars(me).update(settings, reward_weights=torch.ones(1))
    names = {"rewards_per_func": d.rewards[:, None].clone(), "num_generations": G, "self": me}
    names |= {"device": "cpu", "mode": "train", "completion_mask": d.mask.double()[:, 1:]}
    names["unscorable_mask"] = torch.zeros(len(d.rewards), dtype=torch.bool)
    names["old_per_token_logps"] = d.log_probs(d.gen)[:, 1:]
    names["ref_per_token_logps"] = d.log_probs(d.ref)[:, 1:]
    method = trainer_class._generate_and_score_completions
    grpo = trainer_class.__name__ == "GRPOTrainer"
    first = "if self.multi_objective_aggregation" if grpo else "rewards = (rewards_per_func"
    return lines_of(method, first, "advantages = torch.nan_to_num", **names)["advantages"]


def trl_weights(d: Data, mode: str, low: float | None, high: float) -> Tensor:
    """Return TRL's weights of responses of vLLM, [B, T - 1] or [B, 1], by its own lines."""
    from trl import GRPOTrainer

    me = SimpleNamespace(use_vllm=True, vllm_importance_sampling_correction=True)
    me.vllm_importance_sampling_mode = mode
    me.vllm_importance_sampling_clip_min, me.vllm_importance_sampling_clip_max = low, high
    names = {"self": me, "tool_mask": None, "completion_mask": d.mask[:, 1:].double()}
    names["old_per_token_logps"] = d.log_probs(d.old)[:, 1:]
    names["sampling_per_token_logps"] = d.log_probs(d.gen)[:, 1:]
    first = "if self.use_vllm and self.vllm_importance_sampling_correction:\n    mask ="
    done = lines_of(GRPOTrainer._generate_and_score_completions, first, first, **names)
    return done["vllm_importance_sampling_ratio"]


def trl_loss(
    d: Data,
    *,
    importance: tuple | None = None,
    mask_truncated: bool = False,
    rloo: bool = False,
    penalty: float = 0.0,
    normalize_advantages: bool = False,
    **settings: Any,
) -> Tensor:
    """Return the loss of TRL's own _compute_loss; `settings` are GRPOConfig's.

    `importance`: mode and bounds of vLLM's weights; `penalty`: RLOO's beta.
    """
    from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

    here = {"output_dir": "/tmp/leash-peers", "use_cpu": True, "bf16": False, "report_to": "none"}
    sizes = {"per_device_train_batch_size": len(LENGTHS), "max_completion_length": MOST}
    sizes |= {"steps_per_generation": 1, "num_generations": G}
    args = GRPOConfig(**{"beta": 0.0, "loss_type": "dapo", **here, **sizes, **settings})
    table, ids = d.curr[:, 1:].log_softmax(-1), d.tokens[:, 1:]

    def score(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        log_probs = table.gather(-1, ids[..., None]).squeeze(-1)
        return log_probs, -(table.exp() * table).sum(-1), None

    me = SimpleNamespace(**vars(args))
    me.args, me.model, me.accelerator = args, SimpleNamespace(training=True), Alone()
    me._get_per_token_logps_and_entropies, me.aux_loss_enabled = score, False
    me.epsilon_low = args.epsilon
    me.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    me.use_vllm = me.vllm_importance_sampling_correction = importance is not None
    me.current_gradient_accumulation_steps = 1
    me._metrics = {"train": defaultdict(list)}
    me._entropy_bonus_enabled = args.entropy_coef != 0
    trainer_class = RLOOTrainer if rloo else GRPOTrainer
    own = {"beta": penalty, "normalize_advantages": normalize_advantages}
    advantage = trl_advantages(trainer_class, d, scale_rewards=args.scale_rewards, **own)
    kept = d.mask & ~d.truncated[:, None] if mask_truncated else d.mask
    mask, old = kept[:, 1:].double(), d.log_probs(d.old)[:, 1:]
    inputs = {
        "prompt_ids": d.tokens[:, :1],
        "prompt_mask": torch.ones_like(d.tokens[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantage,
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": old,
        "old_logps": (d.log_probs(d.gen)[:, 1:] * mask).sum(1),
        "ref_per_token_logps": d.log_probs(d.ref)[:, 1:],
        "importance_sampling_ratio": trl_weights(d, *importance) if importance else None,
    }
    return trainer_class._compute_loss(me, me.model, inputs)


# verl and OpenRLHF: what their loss functions import beside torch is left out.


def load(name: str, path: Path) -> ModuleType:
    """Import one file of a package under its name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def empty(name: str, **attributes: Any) -> None:
    """Stand in for a package that a loss function's file imports and does not need."""
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module


def package_folder(name: str) -> Path:
    return Path(importlib.util.find_spec(name).origin).parent


class ActorConfig(SimpleNamespace):
    """verl's ActorConfig, whose own class needs Ray; the defaults are those of its actor.yaml."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
        self.global_batch_info = {}
        vars(self).update(settings)

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)


def import_peers() -> tuple[ModuleType, ModuleType, ModuleType, ModuleType]:
    """Return verl's core_algos and rollout_corr_helper, OpenRLHF's loss and utils."""
    folder = package_folder("verl")
    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        empty(name)
    empty("verl.utils", as_torch_index=None, group_mean_std=None)
    empty("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu)
    empty("verl.utils.import_utils", deprecated=lambda *_, **__: lambda function: function)
    empty("verl.trainer.config", AlgoConfig=type("AlgoConfig", (SimpleNamespace,), {}))
    empty("verl.trainer.config.algorithm", RolloutCorrectionConfig=None)
    empty("verl.workers.config", ActorConfig=ActorConfig)
    empty("verl.workers.config.actor", PolicyLossConfig=None)
    empty("verl.protocol", DataProto=None)
    functional = load("verl.utils.torch_functional", folder / "utils/torch_functional.py")
    sys.modules["verl.utils"].torch_functional = functional
    core = load("verl.trainer.ppo.core_algos", folder / "trainer/ppo/core_algos.py")
    weights = load("verl.rollout_corr_helper", folder / "trainer/ppo/rollout_corr_helper.py")
    models = package_folder("openrlhf") / "models"
    empty("deepspeed")
    for name in ("openrlhf", "openrlhf.models"):
        empty(name)
    utils = load("openrlhf.models.utils", models / "utils.py")
    return core, weights, load("openrlhf.models.loss", models / "loss.py"), utils
