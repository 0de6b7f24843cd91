"""Encode text with a tokenizer, with control tokens or without any.

A *control token* is a special token, or another added token with which the template marks turns
(`Outlines.find_markers`). Contents never encode to one; they may encode to other added tokens, such
as <think> and <tool_call> where these are not special.

Not supported: slow tokenizers, because they return no offsets.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

Span = tuple[int, int]  # [start, end) in characters


class Encoder:
    """Encode text as the tokenizer does, or with control tokens as plain text.

    Works on private copies, independent of the caller's padding and truncation settings.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"expected a fast tokenizer, got {type(tokenizer).__name__}")
        added = {i: t for i, t in tokenizer.added_tokens_decoder.items() if not t.content.isspace()}
        self.added = {i: token.content for i, token in added.items()}
        self.control = frozenset(i for i, token in added.items() if token.special)
        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.post_processor = None  # it may trim spaces off the offsets

    def encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of `text` and their spans, as `tokenizer(text)` does."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def find_control(self, ids: Sequence[int]) -> list[int]:
        """Return the control tokens among `ids`, in order."""
        return [i for i in ids if i in self.control]

    @cached_property
    def _content_tokenizer(self) -> tuple[Tokenizer, dict[int, int]]:
        """Return a tokenizer without control tokens, and the ids of its added tokens.

        It encodes parts of a text, so it must not insert a blank before the first word of each.
        """
        spec = json.loads(self._tokenizer.to_str())
        ordinary = [t for t in spec["added_tokens"] if t["id"] not in self.control]
        spec["added_tokens"] = ordinary
        _add_no_blank(spec["normalizer"])
        _add_no_blank(spec["pre_tokenizer"])
        copy = Tokenizer.from_str(json.dumps(spec))
        return copy, {copy.token_to_id(t["content"]): t["id"] for t in ordinary}

    def encode_content(self, text: str) -> list[int]:
        """Return the ids of `text` without control tokens."""
        tokenizer, added = self._content_tokenizer
        ids = [added.get(i, i) for i in tokenizer.encode(text, add_special_tokens=False).ids]
        if self.find_control(ids):
            raise ValueError(f"expected no control tokens in the data, got them in {text[:60]!r}")
        return ids


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
