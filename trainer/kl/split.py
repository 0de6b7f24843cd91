"""Split the KL of a policy to its reference into the part that its accuracy needs and three others.

At a prompt where the reference is right with probability p and the policy with a, the chain rule is

    KL = KL(Bernoulli(a) || Bernoulli(p)) + a KL(inside right) + (1 - a) KL(inside wrong)

where "inside right" is the KL between policy and reference, each given a right response. Averaged
over prompts, the first term is kl/needed, the smallest KL for the mean accuracy
(trainer/kl/frontier.py), plus kl/misallocated, the KL spent on the wrong prompts.

From m responses of the policy, k of them right, and n of the reference, s of them right, with the
harmonic numbers H:

    a log(a / p)         (k / m) (H(k - 1) - H(m - 1) - H(s) + H(n))
    a KL(inside right)   (sum of log policy - log reference over right responses) / m
                         - the first line

and likewise for wrong ones, so that the four parts add up to the measured KL. The first line uses
unbiased estimates of the series -log x = sum over j of (1 - x)^j / j, cut at j = m - 1 and j = n
(Zhang 2012, doi 10.1162/NECO_a_00266). Its bias is a (R(m, a) - R(n + 1, p)) with the rest
R(j, x) = sum over i >= j of (1 - x)^i / i. The plain estimate log((k / m) / (s / n)) would have a
bias of about 1 / (2 m) in the sum over right and wrong.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def split(right: Array, kl: Array, success: Array, needed: float) -> dict[str, float]:
    """Return the four parts of the mean KL, nats per response.

    `right` and `kl` [P, m] belong to the policy's responses, `success` [P, n] to the reference's.
    `needed` is the smallest KL for the mean accuracy. Noise may make a small part negative.

    >>> parts = split(np.array([[1.0, 1.0]]), np.array([[0.5, 0.5]]), np.array([[1.0, 1.0]]), 0.0)
    >>> parts["kl/in_right"], parts["kl/in_wrong"]
    (0.5, 0.0)
    """
    of_right = rate_term(right, success)  # [P]
    of_wrong = rate_term(1 - right, 1 - success)
    return {
        "kl/needed": needed,
        "kl/misallocated": float((of_right + of_wrong).mean()) - needed,
        "kl/in_right": float(((right * kl).mean(1) - of_right).mean()),
        "kl/in_wrong": float((((1 - right) * kl).mean(1) - of_wrong).mean()),
    }


def rate_term(policy: Array, reference: Array) -> Array:
    """Estimate a log(a / p) per prompt, [P], from events of 0 or 1, [P, m] and [P, n].

    >>> rate_term(np.array([[1.0, 0.0]]), np.array([[1.0, 1.0]])).tolist()
    [-0.5]
    """
    m, n = policy.shape[1], reference.shape[1]
    harmonic = np.append(0.0, np.cumsum(1 / np.arange(1, max(m, n) + 1)))  # [max + 1]
    k, s = policy.sum(1).astype(int), reference.sum(1).astype(int)  # [P]
    log_a = harmonic[np.maximum(k - 1, 0)] - harmonic[m - 1]  # any value where k is 0
    log_p = harmonic[s] - harmonic[n]
    return k / m * (log_a - log_p)
