"""What scored sequences say; a scoring of ids alone, as training has it, does without."""

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from policies.chats.containers import Text
from policies.wrappers.inputs import InputReader, Sequences

if TYPE_CHECKING:
    from policies.wrappers.wrapper import LLMWrapperBase


def scored_texts(
    wrapper: "LLMWrapperBase", td: TensorDictBase, seq: Sequences, reader: InputReader
) -> Text:
    """Return the texts of whole sequences; the response is without the token that ends it.

    A text that was read stays as it was given.
    """
    parts, decode = seq.parts(), wrapper._decode
    texts = {"full": decode(seq.tokens, seq.attention)}
    if wrapper.input_mode == "text" and td.get(reader.key, None) is not None:
        texts["full"] = reader.texts(td)
    if "prompt" in parts:
        after = parts["response"]
        last = after & (after.flip(-1).cumsum(-1).flip(-1) == 1)
        ends = last & torch.isin(seq.tokens, seq.tokens.new_tensor(sorted(wrapper.stop_ids)))
        texts["prompt"] = decode(seq.tokens, parts["prompt"])
        texts["response"] = decode(seq.tokens, after & ~ends)
    return Text(**texts, batch_size=td.batch_size)
