"""Draw docs/kl_estimators.svg: bias, spread and tail of the KL estimators.

    python docs/kl_estimators.py

Policy N(0, 1) and reference N(m, 1), whose KL is m^2 / 2, so that mean and standard deviation of
one sample are closed forms of the KL: log(policy / reference) of a sample is normal with mean KL
and variance 2 KL. The exact KL (full) is drawn as that of one state: no bias and no spread.
"""

import math
from pathlib import Path

from trainer.pages.chart import Series, line_chart, standalone

SIZE = {"width": 330, "height": 240}
HUES = {"k1": 0, "k2": 1, "k3": 2, "full": 3}


def moments(kl: float) -> dict[str, tuple[float, float]]:
    """Return (mean, standard deviation) of one sample of each estimator."""
    variance = 2 * kl
    return {
        "k1": (kl, math.sqrt(variance)),
        "k2": (kl + kl**2 / 2, math.sqrt(variance**2 / 2 + kl**2 * variance)),
        "k3": (kl, math.sqrt(max(math.expm1(variance) - variance, 0.0))),
        "full": (kl, 0.0),
    }


def of_one_token(log_ratio: float) -> dict[str, float]:
    """Return what a token with this log(policy / reference) reads."""
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": math.expm1(-log_ratio) + log_ratio}


def picture() -> str:
    """Return the three charts as one SVG document."""
    kls = [(i / 16, moments(i / 16)) for i in range(33)]  # 0 to 2 nats
    ratios = [(i / 5, of_one_token(i / 5)) for i in range(-15, 21)]  # -3 to 4 nats
    titled = {
        "Mean: k2 reads too much": [_curve(name, kls, 0) for name in HUES],
        "Spread: k3 beats k1 below 0.63": [_curve(name, kls, 1) for name in HUES],
    }
    drawn = [
        line_chart(curves, title=title, unit="nats", x_label="true KL, nats", **SIZE)
        for title, curves in titled.items()
    ]
    curves = [
        Series(name, [(x, values[name]) for x, values in ratios], HUES[name])
        for name in ("k1", "k2", "k3")
    ]
    title, x_label = "One token: k3 has a tail", "log(policy / reference), nats"
    drawn.append(line_chart(curves, title=title, unit="nats", x_label=x_label, **SIZE))
    return standalone([drawn], **SIZE)


def _curve(name: str, kls: list, which: int) -> Series:
    """Return the means (0) or standard deviations (1) of an estimator against the KL."""
    return Series(name, [(kl, values[name][which]) for kl, values in kls], HUES[name])


if __name__ == "__main__":
    path = Path(__file__).with_suffix(".svg")
    path.write_text(picture())
    print(path)
