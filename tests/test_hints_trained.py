"""Keys of TRL and what hints say in their place are trained both ways: the same steps."""

import torch
from contracts import G, leash, one_process
from steps import COEFF, Record, double_policy, gradient, prepared

from conf.hints import known_elsewhere
from trainer.objectives import GRPOObjective
from trainer.update import Update

OURS = {"algorithm.group_size": G, "algorithm.epochs": 1, "algorithm.minibatches": 1}


def told(key, value):
    """Return key and number that a hint gives for a number of TRL."""
    words = known_elsewhere(key, value, look_up=OURS.get).partition(f"{key}={value} is ")[2]
    name, _, number = words.partition(" here")[0].partition("=")
    return name, int(number)


def test_accumulated_replies_are_one_step_of_more_prompts_and_memory_is_another_key():
    policy = double_policy()
    batch, _ = prepared(policy)
    objective = GRPOObjective(leash=leash(COEFF))
    # gradient_accumulation_steps=2 of G replies: a backward each, divided by the tokens of both.
    parts = batch.split(G)
    assert told("generation_batch_size", 2 * G) == ("trainer.prompts_per_iteration", len(parts))
    tokens = [int(part["loss_mask"].sum()) for part in parts]
    grads = [gradient(policy, objective, part)[0] for part in parts]
    want = sum(grad * n for grad, n in zip(grads, tokens, strict=True)) / sum(tokens)
    for micro in (10_000, 1):  # trainer.micro_batch_tokens: all at once, a reply at a time
        got, _ = gradient(policy, objective, batch, micro_batch_tokens=micro)
        assert (got - want).norm() / want.norm() < 1e-5
    assert "algorithm.minibatches" not in known_elsewhere("gradient_accumulation_steps", 2)


def test_iterations_of_a_batch_and_its_slices_are_epochs_and_minibatches():
    key, epochs = told("num_iterations", 3)
    assert key == "algorithm.epochs"
    assert told("max_steps", 6) == ("trainer.num_iterations", 6)
    for slices in (1, 2):  # steps_per_generation / gradient_accumulation_steps
        policy = double_policy()
        batch, _ = prepared(policy)
        optimizer = Record(policy.model.parameters())
        objective, process = GRPOObjective(leash=leash(COEFF)), one_process()
        split = {"epochs": epochs, "minibatches": slices, "max_grad_norm": 0.0}
        update = Update(policy.scorer, optimizer, objective, process, lr=lambda step: 0.0, **split)
        update(batch.clone())
        # TRL steps once a slice, and goes through the slices num_iterations times.
        assert len(optimizer.grads) == epochs * slices
        for step, grad in enumerate(optimizer.grads):  # at rate 0 each pass is the first again
            torch.testing.assert_close(grad, optimizer.grads[step % slices])
