"""A model card in the form that the hub reads: Markdown behind a YAML head.

It is for people on other machines: no place of this one is in it, numbers are rounded, and a
license only where it is known.
"""

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.modes.evaluate import table_rows
from trainer.modes.run_weights import Weights
from trainer.reports.markup import repeat_command
from trainer.runs.redact import redact
from trainer.runs.run_files import Run, dig, load_run, read_yaml

SHOWN = (  # settings that a reader asks for first
    *("policy.dtype", "policy.temperature", "policy.max_new_tokens", "policy.lora.r"),
    *("algorithm.objective._target_", "algorithm.group_size", "kl.coeff", "kl.estimator"),
    *("kl.where", "optimizer.lr", "trainer.num_iterations", "trainer.prompts_per_iteration"),
    *("env.task._target_", "env.dataset", "seed"),
)
RESULTS = {
    "eval/sampled_accuracy": "accuracy on held-out prompts, sampled",
    "eval/greedy_accuracy": "accuracy on held-out prompts, greedy",
    "reward/mean": "reward in training, mean of a batch",
    "loss/total": "loss",
    "kl/ref_sequence": "KL to the reference, nats a reply",
    "eval/kl_ref_sequence": "the same on held-out prompts",
    "response/length_mean": "length of a reply, tokens",
}
LICENSES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "apache-2.0",
    "Qwen/Qwen2.5-0.5B-Instruct": "apache-2.0",
}
VERSIONS = ("leash", "commit", "torch", "transformers")
USE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{name}"  # this one
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
chat = [{system}{{"role": "user", "content": "..."}}]
prompt = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
reply = model.generate(**prompt, max_new_tokens={most})[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(reply, skip_special_tokens=True))
```

vLLM: `vllm serve {name}`."""


def card(run: Run, chosen: Weights, *, name: str, curves: str = "") -> str:
    """Return the model card of the weights of a run, Markdown."""
    config = redact(run.config)
    start, *before = origins(str(dig(config, "policy", "model")))
    base = before[-1] if before else start
    objective = str(dig(config, "algorithm", "objective", "_target_"))
    by = objective.rpartition(".")[2].removesuffix("Objective")
    sha, machine = dig(run.status, "model", "sha256"), run.status.get("machine") or {}
    started = " <- ".join(f"`{origin}`" for origin in (start, *before))
    versions = ", ".join(f"{k} {machine[k]}" for k in VERSIONS if k in machine)
    system = dig(config, "policy", "system_prompt")
    system = f'{{"role": "system", "content": {json.dumps(system)}}}, ' if system else ""
    most = dig(config, "policy", "max_new_tokens") or 64
    settings = ((key, dig(config, *key.split("."))) for key in SHOWN)
    told = [(f"`{key}`", f"`{_placeless(v)}`") for key, v in settings if v is not None]
    words = [word.partition("=") for word in shlex.split(repeat_command(run))]
    command = shlex.join(f"{key}{sign}{_placeless(value)}" for key, sign, value in words)
    given = dig(config, "policy", "chat_template_kwargs")
    parts = [
        f"{_head(base, by)}\n# {name}",
        f"A chat model: `{base}` fine-tuned with leash (experiment {run.experiment}, {by}).",
        f"- weights: {chosen.short}\n- started from: {started}"
        + (f", sha256 `{sha}`" if sha else "")
        + (f"\n- versions: {versions}" if versions else ""),
        USE.format(name=name, system=system, most=most),
        f"Its chat template has `{json.dumps(given)}` set." if given else "",
        f"## Results\n\n{_results(run, chosen.iteration)}",
        curves,
        _evaluation(run.folder, chosen.iteration),
        f"## Settings\n\n{_table(('key', 'value'), told)}",
        f"Trained by:\n\n```\n{command}\n```" if command else "",
        f"The license and the limits of `{base}` hold for this model too." if "/" in base else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def origins(model: str) -> list[str]:
    """Return the name of a model and of those that it was trained from, without their places.

    A folder of the cache is experiment:<name>, that of a run says which run; others are a name.

    >>> origins("some/model"), origins("/a/b/my-model")
    (['some/model'], ['my-model'])
    """
    folder = Path(model).expanduser()
    if _placeless(model) == model and not folder.is_dir():
        return [model]
    home = folder.parent if folder.name == "model" else folder
    kept, run = read_yaml(home / "MANIFEST.json"), load_run(home)  # JSON is YAML
    config = dig(kept, "about", "config") or run.config
    cached, start = dig(kept, "about", "experiment"), dig(config, "policy", "model")
    if not config or not start:
        return [_placeless(str(folder))]
    named = f"experiment:{cached}" if cached else f"{home.name}, a run of {run.experiment}"
    return [named, *origins(start)]


def _placeless(value: Any) -> Any:
    """Return a setting without the folder of a file that it names; of a run's model its run."""
    if not isinstance(value, str) or not value.startswith(("/", "./", "../", "~")):
        return value
    path = Path(value)
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def _head(base: str, by: str) -> str:
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if "/" in base:  # an id of the hub
        head["base_model"] = base
    if base in LICENSES:
        head["license"] = LICENSES[base]
    head["tags"] = ["leash", by.lower()]
    return "---\n" + yaml.safe_dump(head, sort_keys=False) + "---\n"


def _results(run: Run, iteration: int | None) -> str:
    """Return the first value of the main metrics, and that of the weights."""
    rows = []
    for name, words in RESULTS.items():
        points = [v for i, v in run.series(name) if iteration is None or i <= iteration]
        if points and (name != "loss/total" or not run.series("reward/mean")):
            rows.append((words, f"`{name}`", f"{points[0]:z.3f}", f"{points[-1]:z.3f}"))
    return _table(("", "metric", "first", "these weights"), rows) if rows else "None were kept."


def _evaluation(folder: Path, iteration: int | None) -> str:
    """Return what mode=evaluate measured, if it was asked."""
    held = read_yaml(folder / "eval.json")  # JSON is YAML
    plans = {name: held[name] for name in ("sampled", "greedy") if name in held}
    if not plans:
        return ""
    when = held.get("iteration")
    which = "these weights" if when == iteration else f"the weights of iteration {when}"
    table = _table(("", *plans), table_rows(plans))
    return f"Held-out rows, by `mode=evaluate`, of {which}:\n\n{table}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
