"""Several threads on one wrapper: whose rows run together, when, and who hears of a failure."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.chats import prompts, same, scoring, spoken
from support.policies import make_wrapper

from policies.torchrl.batching import BatchQueue
from policies.torchrl.transformers_wrapper import TransformersWrapper

SOON = 30  # seconds; nothing here takes as long


class Recorder:
    """Double numbers, keep the batches, fail at negative ones."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        if min(items) < 0:
            raise ValueError(f"negative: {items}")
        return [2 * item for item in items]


def together(queue: BatchQueue, run, calls) -> list:
    """Return the futures of calls by as many threads, entered into the queue in their order."""
    pool, futures = ThreadPoolExecutor(len(calls)), []
    for i, call in enumerate(calls):
        futures.append(pool.submit(queue, run, call))
        until(lambda n=i: len(queue._waiting) > n or run.batches)
    return futures


def until(condition) -> None:
    limit = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_rows_of_several_callers_run_together_up_to_the_largest_batch():
    run, queue = Recorder(), BatchQueue(min_size=4, max_size=4, timeout=SOON)
    futures = together(queue, run, [[1, 2], [3], [4]])
    assert [f.result(SOON) for f in futures] == [[2, 4], [6], [8]]
    assert run.batches == [[1, 2, 3, 4]]
    assert queue(run, list(range(8))) == list(range(0, 16, 2))
    assert run.batches[1:] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_too_few_rows_run_when_the_time_is_up():
    run, queue = Recorder(), BatchQueue(min_size=5, timeout=0.5)
    start = time.monotonic()
    assert [f.result(SOON) for f in together(queue, run, [[1], [2]])] == [[2], [4]]
    assert time.monotonic() - start >= 0.5
    assert run.batches == [[1, 2]]


def test_a_failure_reaches_its_caller_and_leaves_nothing_behind():
    run, queue = Recorder(), BatchQueue(min_size=4, timeout=SOON)
    futures = together(queue, run, [[1], [-2, 5], [3]])
    assert futures[0].result(SOON) == [2]
    assert futures[2].result(SOON) == [6]
    with pytest.raises(ValueError, match=r"negative: \[-2, 5\]"):
        futures[1].result(SOON)
    assert not queue._waiting
    assert queue(run, [1, 1, 1, 1]) == [2] * 4


def batched(policy, **more) -> tuple[TransformersWrapper, list[int]]:
    """Return a batching version of a policy, and the list of the batch sizes of its model."""
    version = policy.get_new_version(batching=True, inplace=False, **more)
    sizes: list[int] = []
    for name in ("_draw", "_log_probs"):
        inner = getattr(version, name)

        def spy(rows, *rest, inner=inner):
            sizes.append(len(rows))
            return inner(rows, *rest)

        setattr(version, name, spy)
    return version, sizes


def each(policy_call, inputs) -> list:
    with ThreadPoolExecutor(len(inputs)) as pool:
        return [f.result(SOON) for f in [pool.submit(policy_call, td) for td in inputs]]


@pytest.mark.parametrize("padded", [True, False])
def test_generating_threads_get_what_they_would_alone(padded):
    alone = make_wrapper().get_new_version(inplace=False, pad_output=padded)
    policy, sizes = batched(alone, min_batch_size=3)
    inputs = prompts().split(1)
    for got, td in zip(each(policy, inputs), inputs, strict=True):
        same(got, alone(td))
    assert sizes == [3]


def test_scoring_threads_share_forwards_unless_they_need_a_gradient():
    alone = scoring(inplace=False, pad_output=True)
    policy, sizes = batched(alone, max_batch_size=2, min_batch_size=2)
    tds = [spoken()[i % 3][None].set("temperature", torch.tensor([0.5 + i])) for i in range(4)]
    for got, td in zip(each(torch.no_grad()(policy.forward), tds), tds, strict=True):
        want = alone(td)["log_probs"].full
        torch.testing.assert_close(got["log_probs"].full, want, atol=1e-5, rtol=0)
    assert sizes == [2, 2]
    sizes.clear()
    for got in each(policy.log_prob, tds):
        got.sum().backward()
    assert sizes == [1] * 4
    make_wrapper().model.zero_grad()
