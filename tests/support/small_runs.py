"""A run of four iterations in this process, and tasks that stop it at a given response."""

import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envs.chat_env import ChatEnv
from envs.tasks.task import Response, Reward
from policies.load import load_reference
from support.policies import G, make_policy
from support.tasks import Words
from trainer.advantage import GroupAdvantage
from trainer.checkpoint import Checkpoints
from trainer.evaluation import Evaluate
from trainer.kl.controllers import ConstantKLController, KLControllerBase
from trainer.kl.leash import Leash
from trainer.kl.reference import Reference
from trainer.objectives import GRPOObjective
from trainer.observer import Observers
from trainer.optimizer import make_optimizer
from trainer.pages.display import Display
from trainer.pages.live import LiveReport
from trainer.pages.trackers.jsonl import JsonlTracker
from trainer.runtime import Runtime
from trainer.sources import Rollouts
from trainer.stopping import EarlyStopping, Stopped
from trainer.trainer import Trainer
from trainer.update import Update

# Of 4 rows: 12 responses an evaluation (2 samples, 1 greedy), 16 an iteration (4 samples).
IN_ITERATION_2, IN_EVALUATION_2, IN_ITERATION_4 = 36, 46, 80


class Counted(Words):
    """Do something when the response of a given number is rewarded."""

    def __init__(self, at: int = 0, action: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.at, self.action, self.count = at, action, 0

    def reward(self, row: dict, response: Response) -> Reward:
        self.count += 1
        if self.count == self.at:
            self.action()
        return super().reward(row, response)


class Unjudged(Words):
    """Drop every response."""

    def reward(self, row: dict, response: Response) -> Reward:
        return Reward(total=0.0, parts={}, success=False, dropped=True)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def crash() -> None:
    raise ZeroDivisionError("boom")


def train(
    folder: Path,
    task: Words | None = None,
    *,
    resume: bool = False,
    every: int = 1,
    refresh: int = 0,
    control: KLControllerBase | None = None,
    enough: EarlyStopping | None = None,
    frontier: int = 0,
    train_rows: int = 0,
    change: Callable[[Trainer], object] = lambda loop: None,
    engine: Callable[[Any], Any] = lambda policy: policy,
    **steps: object,
) -> str:
    """Train four iterations, evaluating after the second and the last; return what was shown.

    `refresh` says when the reference follows the policy, `steps` are of the update. `engine` makes
    what samples of the policy, `change` may put other parts into the loop.
    """
    task, shown = task or Words(), io.StringIO()
    with Runtime(folder, seed=3, device="cpu") as runtime:
        policy, env = make_policy.__wrapped__(), ChatEnv(task, group_size=G)
        retrieve = Reference(policy, load_reference(policy), every=refresh)
        leash = Leash(control or ConstantKLController(kl_coef=0.1))
        objective = GRPOObjective(leash=leash)
        optimizer = make_optimizer(policy.model, lr=1e-2)
        scorer, optimizer = runtime.accelerator.prepare(policy.scorer, optimizer)
        generator = engine(policy)
        parts = {"task": task, "env": env, "generator": generator, "runtime": runtime}
        display = Display(4, title="words", folder=folder, file=shown)
        options = {"num_samples": 2, "prompts_per_batch": 2, "every": 2, "frontier": frontier}
        options |= {"retrieve_kl": retrieve, "train_rows": train_rows} if frontier else {}
        loop = Trainer(
            runtime=runtime,
            policy=policy,
            generator=generator,
            source=Rollouts(**parts, prompts_per_iteration=4),
            retrieve_kl=retrieve,
            advantage=GroupAdvantage(group_size=G, leash=leash),
            update=Update(
                scorer, optimizer, objective, runtime, leash=leash, lr=lambda _: 1e-2, **steps
            ),
            evaluate=Evaluate(**parts, **options),
            checkpoints=Checkpoints(
                runtime, policy, optimizer, every=every, keep_last=0, reference=retrieve
            ),
            num_iterations=4,
            early_stopping=enough or EarlyStopping(),
            observers=Observers([JsonlTracker(folder, resume=resume), LiveReport(folder), display]),
        )
        change(loop)
        try:
            loop.run(resume=resume)
        except Stopped:
            shown.write("stopped\n")
        except ZeroDivisionError as error:
            shown.write(f"{error}\n")
    return shown.getvalue()
