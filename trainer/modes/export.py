"""mode=export: a run's model as a folder for others, with a model card and its curves.

The folder holds an ordinary model, an adapter merged into it: AutoModelForCausalLM and vLLM load
it. README.md is a model card in the form that the hub reads.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from trainer.checkpoint import save_model
from trainer.modes import weights
from trainer.redact import redact
from trainer.report import run_svg
from trainer.run_files import Run, dig, load_run, write_text
from trainer.show import about
from trainer.trainer import Trainer

SHOWN = (  # settings that a reader asks for first
    *("policy.model", "policy.dtype", "policy.temperature", "policy.max_new_tokens"),
    *("policy.lora.r", "algorithm.objective._target_", "algorithm.group_size", "kl.coeff"),
    *("kl.estimator", "kl.where", "kl.reference", "optimizer.lr", "trainer.num_iterations"),
    *("trainer.prompts_per_iteration", "env.task._target_", "env.dataset", "seed"),
)
RESULTS = (
    *("eval/sampled_accuracy", "eval/greedy_accuracy", "eval/reward", "reward/mean"),
    *("kl/ref_sequence", "policy/entropy", "response/length_mean", "loss/total"),
)


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Write the model folder; it is there whole or not at all."""
    what = weights.take(loop, settings)
    target = Path(settings["output_dir"]).expanduser()
    part = target.with_name(f".part-{target.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    save_model(loop.policy, part)
    done = load_run(Path(settings["resume"]))
    try:
        write_text(part / "curves.svg", run_svg(done.folder))
    except ValueError:  # no metrics to draw: a run of which only a checkpoint is left
        curves = ""
    else:
        curves = "![reward and KL over the iterations](curves.svg)"
    write_text(part / "README.md", card(done, what=what, name=target.name, curves=curves))
    if target.is_dir():  # an empty one: the parent has looked
        target.rmdir()
    part.rename(target)
    print(f"exported   {what}\nmodel      {target}\nmodel card {target / 'README.md'}", flush=True)
    return 0.0


def card(run: Run, *, what: str, name: str, curves: str = "") -> str:
    """Return the model card of a run's model, Markdown."""
    config = _homeless(redact(run.config))
    model = str(dig(config, "policy", "model"))
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if model.count("/") == 1 and model[0] not in "./~":  # a hub id, not a folder of this machine
        head["base_model"] = model
    head["tags"] = ["leash", _last(dig(config, "algorithm", "objective", "_target_"))]
    start = "---\n" + yaml.safe_dump(head, sort_keys=False) + "---\n"
    base = f"`{model}`, sha256 `{dig(run.status, 'model', 'sha256') or '?'}`"
    machine = run.status.get("machine") or {}
    versions = ", ".join(f"{k} {v}" for k, v in machine.items() if k in VERSIONS)
    parts = [
        f"{start}\n# {name}",
        f"A chat model trained with leash ({run.experiment}) on a leash, its KL to the model that "
        f"it started from.\n\n- weights: {what}\n- base model: {base}\n- versions: {versions}",
        USE.format(name=name),
        f"## Results\n\n{_results(run)}",
        curves,
        _evaluation(run.folder),
        f"## Settings\n\n{_settings(config)}",
        f"```\n{repeat}\n```" if (repeat := about.command(run)) else "",
        "The license and the limits of the base model hold for this one too.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _homeless(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the name of the home folder: a card is for others."""
    return json.loads(json.dumps(config).replace(str(Path.home()), "~"))


VERSIONS = ("leash", "torch", "transformers", "commit")
USE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
chat = [{{"role": "user", "content": "..."}}]
prompt = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
```"""


def _results(run: Run) -> str:
    """Return the first and the last value of the main metrics, of a line an iteration."""
    rows = []
    for name in RESULTS:
        if points := run.series(name):
            rows.append((f"`{name}`", f"{points[0][1]:.4g}", f"{points[-1][1]:.4g}"))
    return _table(("metric", "first", "last"), rows) if rows else "No metrics were kept."


def _evaluation(folder: Path) -> str:
    """Return what mode=evaluate measured, if it was asked."""
    path = folder / "eval.json"
    if not path.is_file():
        return ""
    held = json.loads(path.read_text())
    plans = {name: held[name] for name in ("sampled", "greedy") if name in held}
    names = dict.fromkeys(name for plan in plans.values() for name in plan)
    rows = [
        (n, *("" if (v := p.get(n)) is None else f"{v:.4g}" for p in plans.values())) for n in names
    ]
    return f"Evaluated: {held['weights']}.\n\n{_table(('', *plans), rows)}"


def _settings(config: dict[str, Any]) -> str:
    held = {key: dig(config, *key.split(".")) for key in SHOWN}
    return _table(
        ("key", "value"), [(f"`{k}`", f"`{v}`") for k, v in held.items() if v is not None]
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _last(target: Any) -> str:
    return str(target).rpartition(".")[2].removesuffix("Objective").lower()
