"""A model card in the form that the hub reads: Markdown behind a YAML head.

It is for people on other machines: no place of this one is in it, numbers are rounded, and a
license only where it is known.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.modes.evaluate import table_rows
from trainer.modes.weights import Weights
from trainer.reports.summary import repeat_command
from trainer.runs.redact import redact
from trainer.runs.run_files import Run, dig, load_run, number, read_yaml

SHOWN = (  # settings that a reader asks for first
    *("policy.model", "policy.dtype", "policy.temperature", "policy.max_new_tokens"),
    *("policy.lora.r", "algorithm.objective._target_", "algorithm.group_size", "kl.coeff"),
    *("kl.estimator", "kl.where", "kl.reference", "optimizer.lr", "trainer.num_iterations"),
    *("trainer.prompts_per_iteration", "env.task._target_", "env.dataset", "seed"),
)
RESULTS = {
    "eval/sampled_accuracy": "accuracy on held-out prompts, sampled",
    "eval/greedy_accuracy": "accuracy on held-out prompts, greedy",
    "reward/mean": "reward in training, mean of a batch",
    "kl/ref_sequence": "KL to the reference, nats a reply",
    "policy/entropy": "entropy, nats a token",
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


def card(run: Run, taken: Weights, *, name: str, curves: str = "") -> str:
    """Return the model card of the weights of a run, Markdown."""
    config = redact(run.config)
    start, *before = origins(str(dig(config, "policy", "model")))
    base = before[-1] if before else start
    by = _last(dig(config, "algorithm", "objective", "_target_"))
    sha = dig(run.status, "model", "sha256")
    machine = run.status.get("machine") or {}
    facts = {
        "weights": taken.short,
        "started from": " <- ".join(f"`{origin}`" for origin in (start, *before))
        + (f", sha256 `{sha}`" if sha else ""),
        "versions": ", ".join(f"{k} {machine[k]}" for k in VERSIONS if k in machine),
    }
    use = {"most": dig(config, "policy", "max_new_tokens") or 64, "system": _system(config)}
    parts = [
        f"{_head(base, by)}\n# {name}",
        f"A chat model: `{base}` fine-tuned with leash (experiment {run.experiment}, {by}).",
        "\n".join(f"- {key}: {value}" for key, value in facts.items() if value),
        USE.format(name=name, **use),
        f"## Results\n\n{_results(run, taken.iteration)}",
        curves,
        _evaluation(run.folder, taken.iteration),
        f"## Settings\n\n{_settings(config)}",
        _command(run),
        f"The license and the limits of `{base}` hold for this model too." if "/" in base else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def origins(model: str) -> list[str]:
    """Return the name of a model and of those that it was trained from, without their places.

    A folder of the cache is its experiment, that of a run its experiment too; others are a name.

    >>> origins("some/model"), origins("/a/b/my-model")
    (['some/model'], ['my-model'])
    """
    folder = Path(model).expanduser()
    if not (_is_place(model) or folder.is_dir()):
        return [model]
    home = folder.parent if folder.name == "model" else folder
    kept, run = read_yaml(home / "MANIFEST.json"), load_run(home)  # JSON is YAML
    config = dig(kept, "about", "config") or run.config
    named = dig(kept, "about", "experiment") or (run.experiment if config else None)
    start = dig(config, "policy", "model")
    return [f"experiment:{named}", *origins(start)] if named and start else [folder.name]


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("/", "./", "../", "~"))


def _placeless(value: Any) -> Any:
    """Return a setting without the folder of a file that it names."""
    return Path(value).name if _is_place(value) else value


def _head(base: str, by: str) -> str:
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if "/" in base:  # an id of the hub
        head["base_model"] = base
    if base in LICENSES:
        head["license"] = LICENSES[base]
    head["tags"] = ["leash", by.lower()]
    return "---\n" + yaml.safe_dump(head, sort_keys=False) + "---\n"


def _system(config: dict[str, Any]) -> str:
    """Return the system prompt that the model was trained with, as Python."""
    text = dig(config, "policy", "system_prompt")
    return f'{{"role": "system", "content": {json.dumps(text)}}}, ' if text else ""


def _results(run: Run, iteration: int | None) -> str:
    """Return the first value of the main metrics and that of the weights; the loss of SFT."""
    names = RESULTS if run.series("reward/mean") else {**RESULTS, "loss/total": "loss"}
    rows = []
    for name, words in names.items():
        points = [p for p in run.series(name) if iteration is None or p[0] <= iteration]
        if points:
            rows.append((words, f"`{name}`", _short(points[0][1]), _short(points[-1][1])))
    if not rows:
        return "No metrics were kept."
    return _table(("", "metric", "first", "these weights"), rows)


def _evaluation(folder: Path, iteration: int | None) -> str:
    """Return what mode=evaluate measured, if it was asked."""
    held = read_yaml(folder / "eval.json")  # JSON is YAML
    plans = {name: held[name] for name in ("sampled", "greedy") if name in held}
    if not plans:
        return ""
    when = held.get("iteration")
    which = "these weights" if when == iteration else f"the weights of iteration {when}"
    return f"Held-out rows, by `mode=evaluate`, of {which}:\n\n" + _table(
        ("", *plans), table_rows(plans)
    )


def _settings(config: dict[str, Any]) -> str:
    held = {key: dig(config, *key.split(".")) for key in SHOWN}
    for key in ("policy.model", "kl.reference"):
        held[key] = held[key] and origins(held[key])[0]
    if not held["policy.lora.r"]:
        del held["policy.lora.r"]
    rows = [(f"`{k}`", f"`{_placeless(v)}`") for k, v in held.items() if v is not None]
    return _table(("key", "value"), rows)


def _command(run: Run) -> str:
    """Return the command that repeats the run, with files by their name alone."""
    words = [word.partition("=") for word in shlex.split(repeat_command(run))]
    told = shlex.join(f"{key}{sign}{_placeless(value)}" for key, sign, value in words)
    return f"Trained by:\n\n```\n{told}\n```" if told else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(value: float) -> str:
    return f"{number(value) or 0.0:z.3f}"


def _last(target: Any) -> str:
    return str(target).rpartition(".")[2].removesuffix("Objective")
