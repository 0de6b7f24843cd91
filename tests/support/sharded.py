"""Runs of three iterations of which each rank holds a part of every weight, and what they equal.

Also a script for torchrun, see `start`. A folder has model/, many/<case> of several ranks, and on/,
see `prepare`.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

import train as script
from conf.build import make_tracker
from conf.compose import compose_checked, set_up
from envs.tasks.task import Response, Reward
from policies.models.shard_files import ShardFiles
from support import invariance
from support.checkpoints import make_checkpoint
from support.invariance import ALGORITHMS, WORDS, Pairs
from support.policies import make_policy
from support.runs import PATH, environment
from trainer.checkpoint import save_model
from trainer.observer import Observer, Observers
from trainer.runtime import Runtime

KINDS = ("gemma", "gpt2")
SILENT = ("sft", "minor_sft", "reward")  # of several ranks one alone has a row to sample for
SMALL = (
    "allow_targets=true",
    "trainer.num_iterations=3",
    "trainer.prompts_per_iteration=4",
    "trainer.micro_batch_tokens=120",
    "policy.max_new_tokens=6",
    "optimizer.lr=1e-3",
    "optimizer.eps=1e-2",  # no step is the sign of rounding where a gradient is nothing
    "eval.num_samples=1",
    "eval.greedy=false",
    "checkpoint.every=1",
    "checkpoint.keep_last=9",
    "tracker=none",
)
RESPONSES = ("algorithm.group_size=4", "kl.coeff=0.1")
STEPS = ("algorithm.minibatches=2", "algorithm.epochs=2")
MANY_STEPS = ("ppo", "cispo", "dapo", "dppo", "gspo")
FULL, LORA = "kl.estimator=full", "policy.lora.r=4"
REFRESH, LAYERS = "kl.refresh_every=1", "policy.gradient_checkpointing=true"
COMPILED = "policy.compile=true"
CORRECTED = "algorithm.after_rollout={importance: {_target_: trainer.ImportanceSampling}}"
MORE = {
    "ppo, one step": ("ppo", "algorithm.epochs=1", "algorithm.minibatches=1"),
    "ppo, head": ("ppo", "algorithm.critic.kind=head"),
    "grpo_full, by layers": ("grpo_full", LAYERS),
    "grpo_full, compiled": ("grpo_full", COMPILED, LAYERS),
    "grpo, LoRA, compiled": ("grpo", COMPILED, LORA),
    "grpo, LoRA": ("grpo", LORA, FULL, LAYERS),
    "grpo, LoRA, refresh": ("grpo", LORA, REFRESH, "kl.refresh_decay=0.5"),
    "grpo, refresh": ("grpo", REFRESH, "kl.refresh_decay=0.5"),
    "grpo, target KL": ("grpo", "algorithm.target_kl=0.001", "algorithm.epochs=3"),
    "grpo, importance": ("grpo", CORRECTED),
    "grpo, engine": ("grpo",),
    "grpo, frontier": ("grpo", "eval.frontier=8", "eval.forward_kl=2"),
    "distil, teachers": ("distil", "kl.estimator=k3_ratio", "teacher.estimator=full"),
    "grpo, a rank without rows": ("grpo",),
    "grpo, LoRA, a rank without rows": ("grpo", LORA, "eval.forward_kl=2"),
    "grpo, bfloat16": ("grpo", "policy.dtype=bfloat16", REFRESH),
    "grpo, autocast": ("grpo", "policy.autocast=bfloat16"),
    "grpo_full, autocast": ("grpo_full", "policy.autocast=bfloat16"),
    "grpo, offload": ("grpo", "launch.offload=true"),
    "sft, packed": ("sft", "algorithm.packing=true"),
    "sft, bfloat16": ("sft", "policy.dtype=bfloat16"),
    "sft, gemma": ("sft",),
    "sft, gpt2": ("sft",),
}
CASES = {name: (name,) for name in ALGORITHMS} | MORE
ROUNDED = [name for name in CASES if "bfloat16" in name or "autocast" in name]
FEW = ("ppo", "ppo, head", "grpo, engine", "grpo, LoRA, a rank without rows", "sft, packed")
FEW += ("distil, teachers",)  # a rank has no row of some
RESUMED = "ppo, head"  # of these


class OnlyOne(Pairs):
    """Responses to all prompts but one are not judged, so that one rank has none to learn from."""

    def reward(self, row: dict, response: Response) -> Reward:
        return replace(super().reward(row, response), dropped=row["answer"] != "Write")


def make_models(folder: Path, kinds: Sequence[str] = KINDS) -> None:
    """Write models by which tokens differ and responses end now and then."""
    policy = make_policy.__wrapped__()  # not the one that tests share: it is scaled below
    save_model(policy, folder / "tiny")
    save_model(invariance.scaled(policy, 0.9), folder / "teacher")
    for kind in kinds:
        make_checkpoint(folder / kind, kind)


def compose(name: str, model: Path, *, ranks: int, launch: str = "fsdp2") -> dict[str, Any]:
    """Return the configuration of a case on a number of ranks; one alone has no shards."""
    launch = launch if ranks > 1 else "ddp"
    algorithm, *words = CASES[name]
    words += (*WORDS[algorithm], *SMALL, f"launch={launch}", f"launch.num_processes={ranks}")
    words += ("eval.max_rows=1",) if algorithm in SILENT else (*RESPONSES, "eval.max_rows=3")
    words += ("eval.num_samples=0",) if algorithm == "reward" else ()  # it writes no responses
    words += (f"kl.reference={model / 'teacher'}",) if algorithm == "distil" else ()
    words += STEPS if algorithm in MANY_STEPS and "one step" not in name else ()
    kind = name.rpartition(", ")[2]
    words += [f"policy.model={model / (kind if kind in KINDS else 'tiny')}"]
    if launch == "ddp" and "launch.offload=true" in words:
        words.remove("launch.offload=true")
    config = compose_checked(words)
    task = "support.sharded.OnlyOne" if "without rows" in name else "support.invariance.Pairs"
    config["env"] |= {"task": {"_target_": task}, "rewards": {}}
    if kind == "teachers":
        texts = [row["answer"] for row in Pairs().rows("train")]
        models = {text: str(model / ("tiny", "teacher")[i % 2]) for i, text in enumerate(texts)}
        config["teacher"] |= {"reference": models, "column": "answer"}
    if kind == "engine":
        config["policy"]["engine"] = {"_target_": "support.engines.beside"}
    return config


def run(
    name: str,
    folder: Path,
    model: Path,
    *,
    ranks: int,
    launch: str = "fsdp2",
    resume: bool = False,
) -> None:
    """Train a case in this process, which is one of the ranks; it shows metrics.jsonl alone."""
    set_up()
    torch.set_num_threads(1)
    config = compose(name, model, ranks=ranks, launch=launch)
    config["resume"] = str(folder) if resume else None
    with patch("conf.build.make_observers", only_metrics):
        script.train(OmegaConf.create(config), folder)


def only_metrics(cfg: Any, runtime: Any, more: Any = (), **_: Any) -> Observer:
    return Observers([make_tracker(cfg, runtime.folder)] if runtime.is_main else [])


def prepare(source: Path, place: Path, names: Sequence[str], *, of: str) -> None:
    """Copy runs of somebody to go on with after two iterations, as on/<case> of <who>."""
    for name in names:
        there = place / "on" / f"{name} of {of}"
        shutil.copytree(source / name, there)
        shutil.rmtree(there / "checkpoints" / "iteration_000003")


def resume(place: Path, model: Path, *, ranks: int, launch: str = "fsdp2") -> None:
    """Go on with prepared runs."""
    for folder in sorted((place / "on").glob("*")):
        case = folder.name.partition(" of ")[0]
        run(case, folder, model, ranks=ranks, launch=launch, resume=True)


def linked(at: Path, name: str) -> Path:
    """Return a new folder there with the models."""
    (at / name).mkdir()
    (at / name / "model").symlink_to(at / "model")
    return at / name


def ranks_of(way: str) -> tuple[int, str]:
    """Return the ranks and the launch of "2 fsdp2"."""
    ranks, _, launch = way.partition(" ")
    return int(ranks), launch


def start(
    place: Path,
    ranks: int,
    launch: str,
    names: Sequence[str],
    script: Sequence[str] = ("-m", "support.sharded"),
) -> None:
    """Train cases in a folder with model/ on several ranks, and go on with what is prepared."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    words = [*(words if ranks > 1 else []), *script, str(place), str(ranks), launch, *names]
    command = [sys.executable, *words]
    env = environment(PYTHONPATH=PATH)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all that a checkpoint or a model holds, by file and name.

    What ranks saved in parts has the files and names of a single rank.
    """
    paths = [path for path in folder.rglob("*.safetensors") if path.parent.name != "shards"]
    files = {path.relative_to(folder): load_file(path) for path in paths}
    for shards in folder.rglob("shards"):
        at = shards.parent.relative_to(folder)
        for name, tensor in joined(shards).items():
            for file, named in ordinary(name, tensor).items():
                files.setdefault(at / file, {}).update(named)
    return {f"{file}:{name}": t for file, named in files.items() for name, t in named.items()}


def joined(folder: Path) -> dict[str, Tensor]:
    """Return the full tensors of parts."""
    files = ShardFiles(folder)
    full = {name: torch.empty_like(like, device="cpu") for name, like in files.shapes.items()}
    for group in ("weights", "critic", "reference", "optimizer"):
        mine = {n.removeprefix(f"{group}/"): t for n, t in full.items() if n.startswith(group)}
        files.read(group, mine)
    return full


def ordinary(name: str, tensor: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return a tensor of parts by the file and the name that one rank has for it."""
    group, _, name = name.partition("/")
    plain = name.removeprefix("model.")
    if group == "weights" and ".lora_" in name:
        plain = f"base_model.model.{plain.replace('.default.', '.')}"
        return {"adapter/adapter_model.safetensors": {plain: tensor}}
    if group == "weights":
        return {"model/model.safetensors": {plain: tensor}}
    found = {f"{group}.safetensors": {name: tensor}}
    if name.startswith("model.") and name.endswith("/master"):
        weight = plain.removesuffix("/master")
        found["model/model.safetensors"] = {weight: tensor.bfloat16()}
    return found


def far(got: dict[str, Tensor], want: dict[str, Tensor], part: str = "") -> float:
    """Return how far tensors are apart, relative to their norm; `part` is in their names."""
    assert got.keys() == want.keys()
    names = [name for name in want if part in name]
    assert names, f"no tensor of {part}"
    gap = sum(((got[name].double() - want[name].double()) ** 2).sum() for name in names)
    size = sum((want[name].double() ** 2).sum() for name in names)
    return float((gap / size) ** 0.5)


def of_two_ranks(place: Path) -> None:
    """Write the gradients of invariance.py, and train the few runs of `make test-runs`."""
    with Runtime(place) as both:
        invariance.write(place, both)
        for case in FEW:
            run(case, place / "many" / case, place / "model", ranks=2)
        both.accelerator.wait_for_everyone()
        both.accelerator.end_training()


def main(place: str, ranks: str, launch: str, *names: str) -> None:
    """Do in one rank what `start` asks for."""
    at, how = Path(place), {"ranks": int(ranks), "launch": launch}
    for case in names:
        run(case, at / "many" / case, at / "model", **how)
    resume(at, at / "model", **how)
    if how["ranks"] > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[2:]:
        main(*sys.argv[1:])
    else:  # started by runs.on_two_ranks
        of_two_ranks(Path(sys.argv[1]))
