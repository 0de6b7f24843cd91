"""Transforms in a Ray actor, with real Ray: shared, correct, on their resources, and when they die.

For `make test-ray`; what must fail before Ray is asked stands in tests/trainer/kl/test_kl.py, and
the page's examples in tests/specification/test_s3_kl_reward.py.
"""

import copy
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support.wrappers import Collector, gen, generated, own_ray, ragged, ref, tokens_ref
from tensordict import TensorDict

from envs import ChatEnv, TransformedEnv
from envs.torchrl import ray as ray_module
from envs.torchrl.ragged import get_values
from envs.transforms import (
    KLRewardTransform,
    RayKLRewardTransform,
    RayRetrieveKL,
    RayTransform,
    RetrieveKL,
    Transform,
)

pytestmark = pytest.mark.ray


def traced(folder: Path):
    """Return a reference, and leave a trace of having been called."""
    with open(folder / "made", "a") as file:
        file.write(f"{os.getpid()}\n")
    return tokens_ref(pad_output=False)


@pytest.fixture(scope="module")
def ray():
    with own_ray():
        yield ray_module.start_ray()  # as a user's first shared transform does


def same(got: TensorDict, want: TensorDict, keys) -> None:
    """Check that two tds, dense or ragged, hold the same numbers at the keys."""
    for key in keys:
        for one, other in zip(get_values(key, got), get_values(key, want), strict=True):
            assert torch.allclose(one, other, atol=1e-5), key
            assert one.device == other.device


def wait_for(fact) -> None:
    end = time.monotonic() + 10  # Ray reports its resources about once a second
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.1)


SECOND_USER = """
import sys, torch
from envs.transforms import RayKLRewardTransform
def never():
    raise AssertionError("the model was made again")
shared = RayKLRewardTransform(ref_model_factory=never, coef=0.1, actor_name="reward", num_cpus=0.5)
td = torch.load(sys.argv[1] + "/td.pt", weights_only=False)
torch.save(shared(td)["next"], sys.argv[1] + "/out.pt")
"""


@pytest.mark.filterwarnings("ignore:.*KLRewardTransform is deprecated:DeprecationWarning")
def test_another_process_uses_the_actor_and_leaves_it_alive(ray, tmp_path, monkeypatch):
    factory, td = partial(traced, tmp_path), ragged()
    options = {"ref_model_factory": factory, "coef": 0.1}
    want = KLRewardTransform(**options)(td.copy())["next"]
    named = {"use_ray_service": True, "actor_name": "reward", "num_cpus": 0.5}
    free = ray.available_resources()["CPU"]
    shared = KLRewardTransform(**options, **named)
    assert type(shared) is RayKLRewardTransform
    weights = sum(p.numel() * p.element_size() for p in ref().parameters())
    assert 0 < shared.sent_bytes < weights / 20  # the factory alone
    with pytest.raises(ValueError, match="'reward'"):
        KLRewardTransform(ref_model_factory=factory, coef=0.2, **named)
    assert shared.out_keys == ["reward", "kl_penalty", "ref_log_prob"]
    same(shared(td.copy())["next"], want, shared.out_keys)
    torch.save(td, tmp_path / "td.pt")
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    command = [sys.executable, "-c", SECOND_USER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    same(torch.load(tmp_path / "out.pt", weights_only=False), want, shared.out_keys)
    same(shared(td.copy())["next"], want, shared.out_keys)
    # One model, in one process that is not this one.
    made = (tmp_path / "made").read_text().split()
    assert len([pid for pid in made if pid != str(os.getpid())]) == 1
    wait_for(lambda: free - ray.available_resources()["CPU"] == 0.5)
    shared.close()
    wait_for(lambda: ray.available_resources()["CPU"] == free)


def test_from_collector_scores_with_the_weights_that_the_policy_has_now(ray):
    td = generated().copy()
    alike = partial(gen, log_probs_key="ref_log_probs")
    shared = RayRetrieveKL(ref_model_factory=alike, num_cpus=0.5)
    env = TransformedEnv(ChatEnv(), shared)
    out = env.step(td.copy())["next"]  # with the log-probs of the generation
    assert torch.equal(out["log_probs", "full"], td["log_probs", "full"])
    assert float(out["kl_penalty"].abs().max()) < 1e-5  # the same weights
    bare = td.exclude("log_probs")
    with pytest.raises(ValueError, match="The collector is not set"):
        env.step(bare.copy())
    moved = copy.deepcopy(ref().model)
    collector = Collector(gen(model=moved, generate=True, log_probs_key="log_probs"))
    env.register_collector(collector)
    assert env.full_observation_spec["ref_log_probs", "full"].shape == (-1, -1)
    first = env.step(bare.copy())["next"]
    want = RetrieveKL(gen(model=moved), alike())
    same(first, TransformedEnv(ChatEnv(), want).step(bare.copy())["next"], ["kl_penalty"])
    with torch.no_grad():
        for weight in moved.parameters():
            weight.zero_()
    uniform = env.step(bare.copy())["next", "log_probs", "full"]
    kept = td["masks", "all_response_mask"]
    assert torch.allclose(uniform[kept], -torch.tensor(float(moved.config.vocab_size)).log())


class Scale(Transform):
    """A user's own transform."""

    def __init__(self, factor: float, broken: bool = False) -> None:
        super().__init__(["total"], ["scaled"])
        if broken:
            raise ValueError("cannot be made")
        self.register_buffer("factor", torch.tensor(factor))

    def _apply_transform(self, value):
        return value * self.factor


def test_a_users_transform_is_shared_dies_and_is_made_again(ray):
    make = partial(RayTransform, Scale, factor=3.0, actor_name="scale", num_cpus=0.5, device="cpu")
    shared = make()
    td = TensorDict({"total": torch.ones(2, requires_grad=True)}, batch_size=[2])
    assert shared(td)["scaled"].tolist() == [3.0, 3.0]
    assert "scaled" not in td
    assert copy.deepcopy(shared)(td)["scaled"].tolist() == [3.0, 3.0]  # the same actor
    with pytest.raises(KeyError, match="'total'"):
        shared._step(TensorDict(batch_size=[2]), TensorDict(batch_size=[2]))
    make().close()  # another user ends it
    with pytest.raises(RuntimeError, match=r"actor_name='scale'.* is dead"):
        wait_for(lambda: shared(td) is None)  # it may answer for a moment
    assert make()(td)["scaled"].tolist() == [3.0, 3.0]
    make().close()


def test_what_fails_in_the_actor_fails_here_and_frees_the_name(ray):
    named = ray.util.list_named_actors
    with pytest.raises(ValueError, match="cannot be made"):
        RayTransform(Scale, factor=1.0, broken=True, actor_name="x", num_cpus=0.5)
    wait_for(lambda: {"name": "x", "namespace": "leash"} not in named(all_namespaces=True))
