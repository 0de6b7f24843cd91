"""mode=export: write a run's model as a folder to share, with a model card and its curves.

AutoModelForCausalLM and vLLM load the folder; an adapter is merged into the model. `hub` pushes it
to the hub. The card is read on other machines, so it names no local folder.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData

from policies.files import write_text
from trainer.checkpoint import remove, save_model
from trainer.modes.evaluate import table_rows
from trainer.modes.run_weights import Weights, take_weights
from trainer.pages.report import run_svg
from trainer.runs.redact import redact
from trainer.runs.run_files import Run, dig, load_run, read_yaml
from trainer.trainer import Trainer

SETTINGS = (  # in the order of the card
    *("policy.dtype", "policy.temperature", "policy.max_new_tokens", "policy.lora.r"),
    *("policy.system_prompt", "policy.chat_template_kwargs", "env.task._target_", "env.dataset"),
    *("algorithm.objective._target_", "algorithm.group_size", "kl.coeff", "kl.estimator"),
    *("kl.where", "optimizer.lr", "trainer.num_iterations", "trainer.prompts_per_iteration"),
    "seed",
)
RESULTS = ("eval/sampled_accuracy", "eval/greedy_accuracy", "reward/mean", "loss/total",
           "kl/ref_sequence", "eval/kl_ref_sequence", "response/length_mean")  # fmt: skip
CARD = """\
---
{{ card_data }}
---
# {{ name }}

A chat model: `{{ base }}` fine-tuned with leash (experiment {{ experiment }}).

- weights: {{ weights }}
- started from: `{{ start }}`{% if sha256 %}, sha256 `{{ sha256 }}`{% endif %}

`AutoModelForCausalLM.from_pretrained` and `vllm serve` load this folder. Its chat template has the
generation prompt: `tokenizer.apply_chat_template(chat, add_generation_prompt=True)`.
{% for title, head, rows in tables if rows %}
## {{ title }}

| {{ head | join(" | ") }} |
|{% for _ in head %} --- |{% endfor %}
{% for row in rows %}| {{ row | join(" | ") }} |
{% endfor %}{% endfor %}
{% if curves %}![reward and KL over the iterations](curves.svg){% endif %}

The license and the limits of `{{ base }}` hold for this model too.
"""


def run(loop: Trainer, settings: dict[str, Any]) -> float:
    """Write the model folder, completely or not at all."""
    chosen = take_weights(loop, settings)
    target = Path(settings["output_dir"]).expanduser()
    part = target.with_name(f".part-{target.name}")
    remove(part)
    part.parent.mkdir(parents=True, exist_ok=True)
    trained = load_run(Path(settings["resume"]))
    try:
        save_model(loop.policy, part)
        if trained.metrics:
            write_text(part / "curves.svg", run_svg(trained.folder))
        write_text(part / "README.md", card(trained, chosen, name=target.name))
        part.rename(target)  # replaces an empty folder; the parent has checked it
    except BaseException:  # remove the partial model, e.g. on a full disk
        shutil.rmtree(part, ignore_errors=True)
        raise
    print(f"exported   {chosen.label}\nmodel      {target}", flush=True)
    if settings["hub"]:
        print(f"hub        {push(target, settings['hub'])}", flush=True)
    return 0.0


def card(run: Run, chosen: Weights, *, name: str) -> str:
    """Render the model card of a run's weights as Markdown."""
    config, last = redact(run.config), chosen.iteration
    base = hub_name(str(dig(config, "policy", "model")))
    settings = {key: dig(config, *key.split(".")) for key in SETTINGS}
    results = {key: [v for i, v in run.series(key) if last is None or i <= last] for key in RESULTS}
    scores = read_yaml(run.folder / "eval.json")  # JSON is YAML
    plans = {plan: scores[plan] for plan in ("sampled", "greedy") if plan in scores}
    tables = [
        ("Results", ("metric", "first", "these weights"),
         [(f"`{key}`", f"{v[0]:z.3f}", f"{v[-1]:z.3f}") for key, v in results.items() if v]),
        (f"mode=evaluate, iteration {scores.get('iteration')}", ("", *plans), table_rows(plans)),
        ("Settings", ("key", "value"),
         [(f"`{key}`", f"`{json.dumps(_without_folder(value))}`")
          for key, value in settings.items() if value not in (None, {})]),
    ]  # fmt: skip
    on_hub = {"base_model": base} if "/" in base else {}
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["leash"], **on_hub
    )
    about = {"name": name, "base": base, "experiment": run.experiment, "weights": chosen.short}
    about |= {"start": _without_folder(str(dig(config, "policy", "model")))}
    about |= {"sha256": dig(run.status, "model", "sha256"), "tables": tables}
    about |= {"curves": bool(run.metrics)}
    return ModelCard.from_template(data, template_str=CARD, **about).content


def hub_name(model: str) -> str:
    """Find the model that training started from, through intermediate runs and warm-ups."""
    folder = Path(model).expanduser()
    home = folder.parent if folder.name == "model" else folder
    config = dig(read_yaml(home / "MANIFEST.json"), "about", "config") or load_run(home).config
    before = dig(config, "policy", "model")
    return hub_name(str(before)) if before else str(_without_folder(model))


def _without_folder(value: Any) -> Any:
    """Return a path setting as its file name, <run>/model for a run's model; others unchanged."""
    if not isinstance(value, str) or not value.startswith(("/", "./", "../", "~")):
        return value
    path = Path(value)
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def push(folder: Path, name: str) -> str:
    """Push a folder to a repository of the hub, private if it is new; return its address."""
    repository = HfApi().create_repo(name, private=True, exist_ok=True)
    HfApi().upload_folder(repo_id=repository.repo_id, folder_path=folder)
    return str(repository)
