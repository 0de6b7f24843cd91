"""An engine that samples beside the policy: what it gets, how that is proved, what is refused.

That one which lost its weights is noticed is a check of tests/support/mutant_checks.py.
"""

from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from support.engines import Stale, Wrong, beside
from support.fake_vllm import FakeVLLM, serve
from support.policies import make_policy
from support.runs import lines, metrics, refusal
from support.small_runs import IN_ITERATION_2, Counted, stop, train

from conf.compose import compose, compose_checked
from conf.plan import plan
from policies.engines.vllm_policy import VLLMPolicy, make_vllm_generator
from policies.engines.vllm_server import VLLMServer
from policies.models.weights import WeightStream
from trainer.importance_sampling import ImportanceSampling
from trainer.runs.failures import headline
from trainer.scale.dry_run.ledger import rank_of
from trainer.weight_sync import weight_sync

SERVED = "policy.engine.url=http://localhost:8000"
VLLM = ["experiment=grpo_tiny", "policy/engine=vllm"]


@pytest.fixture
def policy():
    return make_policy.__wrapped__()


@torch.no_grad()
def move(policy, by: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in policy.model.parameters():
        p.add_(torch.randn(p.shape, generator=generator) * by)


def responses_and_metrics(folder: Path) -> tuple[list, list]:
    """Return what a run said, and its metrics without those of the hand-over."""
    names, found = ("iteration", "prompt", "response"), lines(folder / "transcripts.jsonl")
    said = [tuple(row[name] for name in names) for row in found]
    rows = [{k: v for k, v in m.items() if not k.startswith("sync/")} for m in metrics(folder)]
    return sorted(said), rows


def test_a_hand_over_is_proved_by_a_probe_before_and_after(policy):
    engine = beside(policy)
    ids = torch.linspace(0, policy.model.config.vocab_size - 1, 32).long().reshape(2, 16)
    with torch.no_grad():
        before = policy.model(input_ids=ids).logits.double().log_softmax(-1)
        move(policy)
        after = policy.model(input_ids=ids).logits.double().log_softmax(-1)
    gap = (before - after)[:, :-1].gather(-1, ids[:, 1:, None]).abs().max().item()
    done = weight_sync(policy, engine)
    assert done.before == pytest.approx(gap, rel=1e-4)
    assert done.after == 0
    assert done.metrics() == {"sync/probe": 0.0, "sync/probe_before": done.before}
    assert engine.version == policy.version == 1
    assert weight_sync(policy, policy).metrics() == {}


def test_steps_too_small_to_tell_add_up_to_a_stale_engine_however_coarse_it_is(policy):
    engine = beside(policy, Stale)
    engine.tolerance = 1.0
    last = weight_sync(policy, engine)
    last = weight_sync(policy, engine, last=last)  # a step that was skipped
    with pytest.raises(RuntimeError, match="stale"):  # noqa: PT012
        for _ in range(200):
            move(policy, 1e-5)
            last = weight_sync(policy, engine, last=last)
    assert 3 < policy.version < 200


def test_an_engine_with_other_weights_is_not_the_policy(policy):
    with pytest.raises(RuntimeError, match="is not the policy"):
        weight_sync(policy, beside(policy, Wrong))


def test_a_half_precision_server_gets_matrices_in_its_dtype_but_none_that_is_wide_on_purpose():
    matrix, vector = torch.rand(3, 2), torch.rand(2)  # [3, 2], [2]
    every = WeightStream({"matrix": matrix, "vector": vector})
    routed = WeightStream({"matrix": matrix.bfloat16(), "router": matrix})
    for stream in (every, routed):
        stream.narrow(torch.bfloat16)
    assert torch.equal(dict(every)["matrix"], matrix.bfloat16())
    assert torch.equal(dict(every)["vector"], vector)
    assert torch.equal(dict(routed)["router"], matrix)


@pytest.mark.runs
def test_a_run_with_an_engine_is_the_run_without_one_and_resumes(tmp_path):
    train(tmp_path / "without")
    train(tmp_path / "whole", engine=beside)
    train(tmp_path / "cut", Counted(IN_ITERATION_2, stop), engine=beside)
    train(tmp_path / "cut", engine=beside, resume=True)
    said, rows = responses_and_metrics(tmp_path / "without")
    close = [pytest.approx(row, rel=1e-3, abs=1e-5) for row in rows]  # but for rounding
    for name in ("whole", "cut"):
        assert responses_and_metrics(tmp_path / name) == (said, close)
    rows = metrics(tmp_path / "whole")
    assert all(row["sync/probe"] == 0 < row["sync/probe_before"] for row in rows[1:])


def verbs(*words: str) -> list:
    """Return the verbs after a rollout that words compose."""
    parts = plan(compose_checked([*VLLM, SERVED, *words]))
    return [part(policy=make_policy()) for part in parts.after_rollout.values()]


def test_what_another_engine_samples_is_corrected_unless_it_is_switched_off():
    assert [type(verb) for verb in verbs()] == [ImportanceSampling]
    own = "{mine: {_target_: trainer.ImportanceSampling, level: sequence}}"
    (given,) = verbs(f"algorithm.after_rollout={own}")
    assert given.options["level"] == "sequence"
    assert verbs("algorithm.after_rollout={importance: null}") == []


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["policy/engine=vlm"], "policy/engine=vlm"),
        (["policy.engine=vllm"], "policy/engine=vllm"),
        ([*VLLM, "policy.top_k=5"], "policy.top_k=0"),
        (VLLM, "pip install -e '.[vllm]'"),
    ],
)
def test_what_does_not_go_with_an_engine_is_refused_before_the_run(words, key):
    assert key in refusal(*words)
    compose_checked([*VLLM, SERVED])  # a server has its own vLLM


def test_ranks_with_an_engine_each_share_none(policy, tmp_path):
    with rank_of(2), pytest.raises(ValueError, match="tensor_parallel_size=1"):
        make_vllm_generator(policy, folder=tmp_path, tensor_parallel_size=2)


def test_weights_for_a_server_lie_where_it_sees_runs_also_in_a_preflight(tmp_path, monkeypatch):
    """Not in the folder for temporary files, which a node has for itself."""
    monkeypatch.chdir(tmp_path)
    preflight = ["experiment=grpo_tiny", "policy.model=tiny", "preflight=true"]
    served = [*preflight, "policy/engine=vllm", SERVED]
    for words, home in (served, "outputs"), ([*served, "output_dir=named"], "named"):
        folder = Path(compose(words, with_hydra=True).hydra.run.dir)
        assert folder.parent == tmp_path / home
    assert Path(compose(preflight, with_hydra=True).hydra.run.dir).parent != tmp_path


# Servers, by a stand-in that answers in this process.


@pytest.fixture
def servers(policy):
    with serve(policy.files.folder) as one, serve(policy.files.folder) as two:
        yield one, two


def served(policy, folder: Path, *servers: FakeVLLM) -> VLLMPolicy:
    """Return an engine of these servers, with the policy's weights."""
    engine = make_vllm_generator(policy, folder=folder, url=[server.url for server in servers])
    weight_sync(policy, engine)
    return engine


def responses(engine: VLLMPolicy, *, rows: int = 5) -> tuple[list, list]:
    """Return ids and log-probs of responses to different prompts."""
    prompts = torch.arange(5, 5 + 3 * rows).reshape(rows, 3)  # [B, P]
    done = engine._draw(prompts, torch.ones_like(prompts).bool(), 7 * torch.arange(rows))
    return done.ids.tolist(), done.log_probs.tolist()


def test_two_servers_say_what_one_does_to_the_bit_and_divide_the_responses(
    policy, servers, tmp_path
):
    one, two = servers
    alone = responses(served(policy, tmp_path, one))
    engine = served(policy, tmp_path, one, two)
    one.sampled.clear()
    assert responses(engine) == alone
    assert [len(server.sampled) for server in servers] == [3, 2]
    move(policy)
    weight_sync(policy, engine)
    moved = responses(engine)
    assert moved != alone
    assert responses(served(policy, tmp_path, two)) == moved
    assert [server.loads for server in servers] == [3, 3]


def test_each_of_several_servers_has_to_take_new_weights(policy, servers, tmp_path):
    engine = served(policy, tmp_path, *servers)
    servers[1].takes_weights = False
    move(policy)
    with pytest.raises(RuntimeError, match="stale"):
        weight_sync(policy, engine)


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/collective_rpc"])
def test_a_server_that_resets_connections_is_told_as_that_server(path, policy, servers, tmp_path):
    engine = served(policy, tmp_path, *servers)
    servers[1].dies_at = path
    with pytest.raises(ConnectionError) as lost:
        weight_sync(policy, engine)
    line = headline(lost.value)
    assert line.startswith(f"the vLLM server at {servers[1].url} failed: ")
    assert f"--port {servers[1].url.rpartition(':')[2]} " in line


@pytest.mark.parametrize("version", ["", "0.9.1", "0.32.0"])  # none, too old, not in dev mode
def test_a_url_without_a_fitting_server_is_refused(version, policy, tmp_path, monkeypatch):
    def answer(request: httpx.Request) -> httpx.Response:
        there = request.url.path == "/version"
        return httpx.Response(200 if there else 404, json={"version": version})

    if version:
        patched = partial(httpx.Client, transport=httpx.MockTransport(answer))
        monkeypatch.setattr("policies.engines.vllm_server.httpx.Client", patched)
    where = {"folder": tmp_path, "exchange": tmp_path}
    with pytest.raises(ValueError, match=r"policy\.engine\.url"):
        VLLMServer(["http://127.0.0.1:9"], policy.model, **where, dtype="float32")
