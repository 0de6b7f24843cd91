"""What is wrong with `trainer.stop_at`, before a model is loaded. Torch-free."""

import re
from collections.abc import Iterator
from typing import Any

from trainer.early_stopping import read_rule
from trainer.metric_names import unknown


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the rule; an objective of one's own may log anything."""
    try:
        name, _ = read_rule(cfg["trainer"]["stop_at"])
    except ValueError as error:
        yield str(error)
        return
    if (hint := unknown(name)) and not cfg["allow_targets"]:
        yield f"trainer.stop_at: there is no metric {name}{hint}"
    drawn, greedy = cfg["eval"]["num_samples"], cfg["eval"]["greedy"]
    made = {"sampled": drawn, "greedy": greedy, "pass": drawn > 1 and name == f"eval/pass@{drawn}"}
    kind = re.match(r"eval/([a-z]+)", name)
    if kind and not made.get(kind[1], drawn or greedy):
        got = f"eval.num_samples={drawn}, eval.greedy={str(greedy).lower()}"
        yield f"trainer.stop_at: evaluations of this run have no {name}, got {got}; change them"
    elif kind and not cfg["eval"]["every"]:
        yield f"trainer.stop_at: {name} is measured before and after training; give eval.every=5"
