"""An engine that samples beside the policy: what it gets, how that is proved, what is refused."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from contracts import make_policy
from engines import Blunt, Stale, Wrong, beside
from omegaconf import OmegaConf
from refusals import refusal
from runs import lines, metrics
from small_runs import IN_ITERATION_2, Counted, stop, train

from conf.build import make_source
from conf.compose import compose, compose_checked
from policies.wrappers.vllm_server import VLLMServer
from trainer.importance_sampling import ImportanceSampling
from trainer.weight_sync import weight_sync

SERVED = "policy.vllm.url=http://localhost:8000"
VLLM = ["experiment=grpo_tiny", "policy.engine=vllm"]


@pytest.fixture
def policy():
    return make_policy.__wrapped__()


@torch.no_grad()
def move(policy, by: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in policy.model.parameters():
        p.add_(torch.randn(p.shape, generator=generator) * by)


def alike(folder: Path, other: Path) -> bool:
    """Return whether two runs have the same replies, and metrics but for rounding."""
    both = [(lines(path / "transcripts.jsonl"), metrics(path)) for path in (folder, other)]
    said = [sorted((r["iteration"], r["prompt"], r["response"]) for r in told) for told, _ in both]
    mine, theirs = (
        [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in rows]
        for _, rows in both
    )
    close = [pytest.approx(row, rel=1e-3, abs=1e-5) for row in theirs]
    return said[0] == said[1] and all(a == b for a, b in zip(mine, close, strict=True))


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    train(folder)
    return folder


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


def test_an_engine_that_takes_no_weights_is_stale_however_coarse_it_is(policy):
    engine = beside(policy, Blunt)
    last = weight_sync(policy, engine)
    last = weight_sync(policy, engine, last=last)  # a step that was skipped
    move(policy, 1e-3)
    with pytest.raises(RuntimeError, match=r"the engine is stale: .* did not change"):
        weight_sync(policy, engine, last=last, tolerance=1.0)
    assert engine.version == 2


def test_what_is_too_small_to_tell_adds_up(policy):
    engine = beside(policy, Blunt)
    last = weight_sync(policy, engine)
    with pytest.raises(RuntimeError, match="the engine is stale"):  # noqa: PT012
        for _ in range(200):
            move(policy, 1e-5)
            last = weight_sync(policy, engine, last=last, tolerance=1.0)
    assert 3 < policy.version < 200


def test_an_engine_that_begins_anew_between_two_hand_overs_is_found_out(policy):
    engine = beside(policy)
    start = {name: value.clone() for name, value in policy.model.state_dict().items()}
    last = weight_sync(policy, engine)
    for _ in range(2):
        move(policy)
        last = weight_sync(policy, engine, last=last)
    engine.load_weights(start.items())  # as a server that was started again has them
    move(policy)
    with pytest.raises(RuntimeError, match=r"the engine lost its weights"):
        weight_sync(policy, engine, last=last)
    assert engine.version == 3


def test_an_engine_with_other_weights_is_not_the_policy(policy):
    with pytest.raises(RuntimeError, match=r"is not the policy: .*Give policy.vllm.dtype=float32"):
        weight_sync(policy, beside(policy, Wrong))


def test_a_run_with_an_engine_is_the_run_without_one_and_resumes(straight, tmp_path):
    train(tmp_path / "whole", engine=beside)
    rows = metrics(tmp_path / "whole")
    assert alike(tmp_path / "whole", straight)
    assert all(row["sync/probe"] == 0 < row["sync/probe_before"] for row in rows[1:])
    train(tmp_path / "cut", Counted(IN_ITERATION_2, stop), engine=beside)
    train(tmp_path / "cut", engine=beside, resume=True)
    assert alike(tmp_path / "cut", tmp_path / "whole")


def test_a_run_whose_engine_is_stale_stops_and_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="the engine is stale: after a hand-over"):
        train(tmp_path / "run", engine=lambda policy: beside(policy, Stale))
    assert [row["progress/iteration"] for row in lines(tmp_path / "run" / "metrics.jsonl")] == [0]
    train(tmp_path / "cut", Counted(IN_ITERATION_2, stop))

    def deaf(policy):  # after a resume it would sample with the weights of the start
        engine = beside(policy, Stale)
        engine.taken = 1
        return engine

    with pytest.raises(RuntimeError, match="the engine is stale"):
        train(tmp_path / "cut", engine=deaf, resume=True)


def verbs(*words: str) -> list:
    """Return the verbs after a rollout that words compose."""
    cfg = OmegaConf.create(compose_checked(["experiment=grpo_tiny", *words]))
    OmegaConf.update(cfg, "policy.engine", "vllm")
    parts = {"policy": make_policy(), "runtime": None, "generator": None}
    return make_source(cfg, task=Rows(), env=None, **parts).after_rollout


class Rows:
    def rows(self, split: str) -> list[dict]:
        return [{}]


def test_what_another_engine_samples_is_corrected_unless_it_is_told_not_to():
    assert [type(verb) for verb in verbs()] == [ImportanceSampling]
    own = "{mine: {_target_: trainer.ImportanceSampling, level: sequence}}"
    (given,) = verbs(f"algorithm.after_rollout={own}")
    assert given.options["level"] == "sequence"
    assert verbs("algorithm.after_rollout={importance: null}") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["policy.vllm.max_num_seqs=4"], "policy.vllm.max_num_seqs is for policy.engine=vllm"),
        (["policy.engine=vlm"], "expected policy.engine to be one of transformers, vllm"),
        ([*VLLM, "policy.top_k=5"], "expected policy.top_k=0 in training"),
        ([*VLLM, "policy.vllm.dtype=int8"], "expected policy.vllm.dtype to be one of null"),
        *(
            ([*VLLM, f"policy.vllm.url={url}"], "policy.vllm.url to be http://<host>:<port>")
            for url in ("localhost:8000", "http://", "ftp://h:1")
        ),
    ],
)
def test_what_does_not_go_with_an_engine_is_refused(words, said):
    assert said in refusal(*words)


def test_weights_for_a_server_lie_where_it_sees_runs_also_in_a_preflight(tmp_path, monkeypatch):
    """Not in the folder for temporary files, which a node has for itself."""
    monkeypatch.chdir(tmp_path)
    preflight = ["experiment=grpo_tiny", "policy.model=tiny", "preflight=true"]
    served = [*preflight, "policy.engine=vllm", SERVED]
    for words, home in (served, "outputs"), ([*served, "output_dir=named"], "named"):
        folder = Path(compose(words, with_hydra=True).hydra.run.dir)
        assert folder.parent == tmp_path / home
    assert Path(compose(preflight, with_hydra=True).hydra.run.dir).parent != tmp_path


class Answer(BaseHTTPRequestHandler):
    """Answer as its path says: a page, a version, or what a server without dev mode says."""

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        known = kind in ("page", "old") or (kind == "plain" and self.path.endswith("/version"))
        self.send_response(200 if known else 404)
        self.end_headers()
        said = {"page": "<html>", "old": '{"version": "0.9.1"}', "plain": '{"version": "0.32.0"}'}
        self.wfile.write(said.get(kind, "").encode())

    def log_message(self, *given: object) -> None:
        """Say nothing."""


def test_an_address_without_a_server_that_fits_is_told_with_the_line_that_starts_one(
    policy, tmp_path
):
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        cases = {
            "http://127.0.0.1:9": "a vLLM server, got ConnectError",
            f"{here}/none": "a vLLM server, got /version: 404",
            f"{here}/page": "vLLM 0.32.x or 0.33.x, got None",
            f"{here}/old": "vLLM 0.32.x or 0.33.x, got 0.9.1",
            f"{here}/plain": "one that takes weights, got one without VLLM_SERVER_DEV_MODE=1",
        }
        for url, told in cases.items():
            with pytest.raises(
                ValueError, match="start it by: VLLM_SERVER_DEV_MODE=1 vllm"
            ) as line:
                VLLMServer(url, policy.model, folder=tmp_path, share=tmp_path, dtype="float32")
            assert f"policy.vllm.url={url}: expected {told}" in str(line.value)
        server.shutdown()


def test_a_missing_vllm_is_told_before_the_run_with_the_command_that_installs_it():
    assert "policy.engine=vllm needs vllm: pip install -e '.[vllm]'" in refusal(*VLLM)
    compose_checked([*VLLM, SERVED])  # which has its own
