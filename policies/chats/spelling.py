"""Ids of a text without control tokens: what a message wrote stays what a message wrote."""

import json
from typing import Any

from tokenizers import Tokenizer


class Spelling:
    """Encode text with a copy of a tokenizer that knows only white space among its added tokens.

    It encodes parts of a text, so it must not put the blank of a text's first word before each.
    """

    def __init__(self, whole: Tokenizer) -> None:
        spec = json.loads(whole.to_str())
        blanks = [t for t in spec["added_tokens"] if t["content"].isspace()]
        spec["added_tokens"] = blanks
        _add_no_blank(spec["normalizer"])
        _add_no_blank(spec["pre_tokenizer"])
        self._tokenizer = Tokenizer.from_str(json.dumps(spec))
        # what a copy keeps of the added tokens gets new ids
        self._ids = {self._tokenizer.token_to_id(t["content"]): t["id"] for t in blanks}

    def __call__(self, text: str) -> list[int]:
        """Return the ids of `text` as the whole tokenizer numbers them."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self._ids.get(i, i) for i in ids]


def _add_no_blank(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("type") == "Metaspace":
            node["prepend_scheme"] = "never"
        elif node.get("type") == "Prepend":
            node["prepend"] = ""
        elif node.get("type") == "ByteLevel" and "add_prefix_space" in node:
            node["add_prefix_space"] = False
        node = list(node.values())
    for value in node if isinstance(node, list) else []:
        _add_no_blank(value)
