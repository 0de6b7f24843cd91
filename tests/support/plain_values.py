"""Values read off plain forwards."""

import torch
from contracts import close, make_policy, rollout
from torch import Tensor

from policies.critic import Critic


def plain_values(policy, ids: Tensor) -> Tensor:
    """Return V(tokens < t) of one sequence by a plain forward, [T]; entry 0 is not used."""
    critic = policy.scorer.critic
    body = policy.model.base_model if critic.body is None else critic.body.model
    states = body(input_ids=ids[None]).last_hidden_state[0]  # [T, H]
    states = states.detach() if critic.detach else states
    return torch.cat([torch.zeros(1), states[:-1] @ critic.head.weight[0] + critic.head.bias])


def values_are_those_of_a_plain_forward() -> None:
    """Raise AssertionError unless value[t] is read off the state that predicts token t."""
    policy = make_policy.__wrapped__()
    batch = rollout(policy, count=2)
    policy.scorer.critic = Critic(policy.scorer)
    torch.nn.init.normal_(policy.scorer.critic.head.weight)
    attended = batch["masks", "all_attention_mask"]
    with torch.no_grad():
        got = policy.scorer.values(batch["tokens", "full"], attended, batch["loss_mask"])
        for i in range(batch.batch_size[0]):
            want = plain_values(policy, batch["tokens", "full"][i][attended[i]])
            kept = batch["loss_mask"][i][attended[i]]
            close(got[i][attended[i]], want * kept, 1e-4, "values")
