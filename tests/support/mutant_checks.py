"""Small checks of rooms that no contract is about, each with a mutant in tests/support/mutants.py.

One that fails raises. tests/house/test_mutants.py runs them on the code as it is, too.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh

from conf.compose import compose, compose_checked, set_up
from conf.resume import resumed, resumed_if_held
from envs.data import Table
from envs.rewards.functions import Function
from envs.rewards.rewarded import Rewarded
from envs.tasks.task import Response, Task
from envs.tools.sandbox import Sandbox
from envs.torchrl.tools import Tool
from policies.models import weights
from policies.models.sharding import shard
from policies.torchrl.transformers_wrapper import TransformersWrapper
from support.engines import Stale, beside
from support.policies import make_policy
from trainer.checkpoint import Checkpoints
from trainer.modes.preflight.checks import check_rewards
from trainer.modes.preflight.profile import Findings
from trainer.optimizer import make_optimizer
from trainer.pages.report import write_report
from trainer.pages.trackers.jsonl import JsonlTracker
from trainer.runs.launch import run
from trainer.runs.redact import redact
from trainer.runs.run_files import read_lines, read_status
from trainer.runtime import Runtime
from trainer.weight_sync import push_weights

TINY = "experiment=grpo_tiny"


def in_a_folder(check: Callable[[Path], None]) -> Callable[[], None]:
    """Return a check that hands itself an empty folder."""

    @wraps(check)
    def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))

    return whole


def targets() -> None:
    """Code of others needs a permission."""
    set_up()
    with pytest.raises(ValueError, match="allow_targets"):
        compose_checked([TINY, "algorithm.advantage._target_=os.system"])


@in_a_folder
def resume(folder: Path) -> None:
    """A resumed run keeps its leash."""
    set_up()
    OmegaConf.save(OmegaConf.create(compose_checked([TINY])), folder / "config.yaml")
    with pytest.raises(ValueError, match=r"kl\.coeff"):
        resumed(str(folder), compose([TINY, "kl.coeff=9"]), ["kl.coeff=9"])


@in_a_folder
def sweep(folder: Path) -> None:
    """A job of a sweep goes on by its own configuration."""
    set_up()
    config = compose_checked([TINY])
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    assert resumed_if_held(folder, config)["resume"] == str(folder)
    with pytest.raises(ValueError, match=r"kl\.coeff"):
        resumed_if_held(folder, config | {"kl": config["kl"] | {"coeff": 9.0}})


@in_a_folder
def launch(folder: Path) -> None:
    """A process that was killed leaves a run that failed."""
    (folder / "status.json").write_text(json.dumps({"state": "running"}))
    with pytest.raises(RuntimeError, match="SIGKILL"):
        run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], folder)
    assert read_status(folder)["state"] == "failed"


@in_a_folder
def checkpoint(folder: Path) -> None:
    """A checkpoint with another bit does not count."""
    policy = make_policy.__wrapped__()
    saved = Checkpoints(Runtime(folder), policy, make_optimizer(policy.model, lr=1e-3))
    for iteration in (1, 2):
        saved.save(iteration, {})
    with (saved.newest() / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([file.read()[0] ^ 1]))
    assert saved.newest().name == "iteration_000001"


@in_a_folder
def report(folder: Path) -> None:
    """A report escapes what a run says."""
    (folder / "metrics.jsonl").write_text('{"progress/iteration": 1, "reward/mean": 0.5}\n')
    status = {"state": "failed", "reason": "<img src=x onerror=alert(1)>"}
    (folder / "status.json").write_text(json.dumps(status))
    page = write_report(folder).read_text()
    assert "onerror=alert(1)" in page, "it is shown"
    assert "<img src=x" not in page


@in_a_folder
def tracker(folder: Path) -> None:
    """A resumed run logs each iteration once."""
    tracker = JsonlTracker(folder)
    for iteration in (1, 2, 3):
        tracker.log({}, iteration)
    tracker.resume(2, "", again=False, seconds=0.0)
    tracker.log({}, 3)
    assert [row["progress/iteration"] for row in read_lines(tracker.metrics)] == [1, 2, 3]


def secrets() -> None:
    """Secrets are hidden."""
    assert "sk-1" not in str(redact({"judge": {"api_key": "sk-1"}}))


def data() -> None:
    """A row without its text is an error."""
    table = Table("rows.jsonl", ["question"], [{"question": "2 + 2"}, {"question": ""}])
    with pytest.raises(ValueError, match="row 1, question"):
        table.text(1, "question")


def reward() -> None:
    """A reward that fails ends the run."""
    broken = Rewarded(task=Task(), rewards={"broken": Function(lambda row, response: 1 / 0)})
    with pytest.raises(RuntimeError, match="broken"):
        broken.rewards([{}], [Response("", True, [])])


def tool() -> None:
    """A policy cannot forge the state of a tool."""

    def look(_state: dict) -> str:
        return str(_state)

    with pytest.raises(TypeError):
        Tool.of(look)({"_state": {"messages": []}})


def sandbox() -> None:
    """Code in the sandbox has limits."""
    assert not Sandbox(file_size=1).run("open('big', 'wb').write(bytes(2 << 20))").ok


@torch.no_grad()
def move(policy: TransformersWrapper) -> None:
    for p in policy.model.parameters():
        p.mul_(1.1)


def stale_engine() -> None:
    """An engine that takes no weights is noticed."""
    policy = make_policy.__wrapped__()
    engine = beside(policy, Stale)
    last = push_weights(policy, engine)
    move(policy)
    with pytest.raises(RuntimeError, match="stale"):
        push_weights(policy, engine, last=last)


def fresh_engine() -> None:
    """An engine that was started again is noticed."""
    policy = make_policy.__wrapped__()
    engine = beside(policy)
    last = push_weights(policy, engine)
    move(engine)
    with pytest.raises(RuntimeError, match="lost"):
        push_weights(policy, engine, last=last)


def shards() -> None:
    """Weights that are restored reach the shards."""
    policy, want = make_policy.__wrapped__(), 0.25
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        shard(policy.scorer, init_device_mesh("cpu", (1,)))
        for p in policy.scorer.parameters():
            weights.put(p, torch.full(p.shape, want))
        assert all((p.full_tensor() == want).all() for p in policy.scorer.parameters())
    finally:
        torch.distributed.destroy_process_group()


def preflight() -> None:
    """Preflight finds groups that teach nothing."""
    findings = Findings(quiet=True)
    td = TensorDict({"reward_raw": torch.ones(4, 1), "group_id": torch.arange(4) // 2}, [4])
    check_rewards(td.set("loss_mask", torch.ones(4, 1, dtype=torch.bool)), findings)
    assert findings.finish() == 1
