"""What a caller may ask of the tokenizer."""

from typing import Any


def tokenizer_options(kwargs: dict[str, Any], input_mode: str) -> dict[str, Any]:
    """Return what of tokenizer_kwargs changes the ids of a text.

    Padding, masks and tensors are the wrapper's own business: it pads left, by lengths.
    """
    options = dict(kwargs)
    options.pop("padding", None)
    for name, only in (
        ("return_attention_mask", (True, None)),
        ("return_tensors", ("pt", None)),
        ("padding_side", ("left", None)),
    ):
        value = options.pop(name, None)
        if value not in only:
            raise ValueError(f"expected tokenizer_kwargs with {name}={only[0]!r}, got {value!r}")
    if options and input_mode != "text":
        raise ValueError(
            f"tokenizer_kwargs {sorted(options)} are for input_mode='text', got {input_mode!r}: a "
            "chat's ids come from its template, tokens are ids already"
        )
    return options
