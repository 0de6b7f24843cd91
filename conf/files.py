"""What a configuration expects on disk: models, templates, places to write to. Torch-free."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policies.chats.templates import read_template
from policies.models import no_model
from trainer.runs.experiment_models import PREFIX


def findings(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield what a resolved configuration names that is not there, or is there already."""
    folder = cfg["output_dir"]
    if folder and not cfg["resume"] and holds_run(Path(folder).expanduser()):
        yield (
            f"output_dir={folder} already holds a run, or files that one would replace; go on with "
            f"it by resume={folder}, or name another folder"
        )
    for key, name in (
        ("policy.model", cfg["policy"]["model"]),
        ("kl.reference", cfg["kl"]["reference"]),
    ):
        if name is not None and not name.startswith(PREFIX) and (fault := no_model(name)):
            yield f"{key}: {fault}"
    yield from _experiments(cfg, "")
    if cfg["policy"]["_target_"] == "policies.load_policy":
        yield from _positions(cfg["policy"])
    if cfg["policy"]["chat_template"] is not None:
        try:
            read_template(cfg["policy"]["chat_template"])
        except ValueError as error:
            yield f"policy.chat_template: {error}"


def _experiments(node: Any, prefix: str) -> Iterator[str]:
    """Yield each `experiment:<name>` that is not a file of conf/experiment."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _experiments(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(node, str) and node.startswith(PREFIX):
        names = sorted(path.stem for path in (Path(__file__).parent / "experiment").glob("*.yaml"))
        if node.removeprefix(PREFIX) not in names:
            yield f"{prefix}={node}: there is no such experiment; there are {', '.join(names)}"


def _positions(policy: dict[str, Any]) -> Iterator[str]:
    """Yield that the longest sequence does not fit into a local model."""
    try:
        config = json.loads((Path(policy["model"]).expanduser() / "config.json").read_text())
        most = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # no local model, or one that load names broken
        return
    prompt, new = policy["max_prompt_tokens"], policy["max_new_tokens"]
    if isinstance(most, int) and (prompt or 1) + new > most:
        asked = f"policy.max_prompt_tokens={prompt} and " if prompt else ""
        yield (
            f"{asked}policy.max_new_tokens={new} make up to {(prompt or 1) + new} tokens, "
            f"{policy['model']} has max_position_embeddings {most}; lower one of them"
        )


RUN = "config.yaml status.json metrics.jsonl transcripts.jsonl report.html model errors checkpoints"


def holds_run(folder: Path) -> bool:
    """Return whether a run has begun in a folder, or something is there that one would replace."""
    return any((folder / name).exists() for name in RUN.split())


def make_writable(folder: str | Path, key: str) -> Path:
    """Make a folder unless it is there; ValueError if nothing can be written into it."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(_no_place(path, key, error.strerror)) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(_no_place(path, key, "it is read-only"))
    return path


def _no_place(path: Path, key: str, reason: str | None) -> str:
    return f"cannot write to {path.absolute()} ({reason}); give a folder with {key}=/path/to/it"
