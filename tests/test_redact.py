"""Secrets in free text; what a tracker gets is in test_tracker.py."""

import pytest

from trainer.runs.redact import HIDDEN, redact_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "see https://h.example/x?token=leak1&page=2",
            f"see https://h.example/x?token={HIDDEN}&page=2",
        ),
        ("ValueError: token=leak4 bad", f"ValueError: token={HIDDEN} bad"),
        ("{'apiKey': 'leak6'}", "{'apiKey': " + HIDDEN + "}"),
        ("https://u:leak7@h/", f"https://u:{HIDDEN}@h/"),
    ],
)
def test_secrets_in_a_text_are_hidden_wherever_they_stand(text, shown):
    assert redact_text(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'a'",
        "policy.max_new_tokens=16",
        "monkey=banana, turkey: yes, in_keys=[tokens]",
        "pad_token=<pad> eos_token: </s>",
        "tokenizer: Qwen2TokenizerFast, note: all well, a=b:c",
    ],
)
def test_texts_without_a_secret_stay_as_they_are(text):
    assert redact_text(text) == text
