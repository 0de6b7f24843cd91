"""Secrets in free text; what a tracker gets is in test_tracker.py."""

import time

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
        ("https://u:pa:leak@h/x", f"https://u:{HIDDEN}@h/x"),
        ("https://u:p@leak@h and ftp://leak:@h", f"https://u:{HIDDEN}@h and ftp://{HIDDEN}@h"),
        ("no file https:/u:leak7@h/x", f"no file https:/u:{HIDDEN}@h/x"),  # as a Path has it
        ("env.api_key=leak1,leak2,seed=3", f"env.api_key={HIDDEN},seed=3"),
        ("DB_PASS=leak, MYSQL_PWD=leak GH_PAT: leak", None),
        ("passphrase='leak' SLACK_WEBHOOK=leak; note: my_secret=leak", None),
        ("https://hooks.slack.com/services/T0/leak", f"https://hooks.slack.com/{HIDDEN}"),
        ("https://discord.com/api/webhooks/12/leak", f"https://discord.com/api/webhooks/{HIDDEN}"),
    ],
)
def test_secrets_in_a_text_are_hidden_wherever_they_stand(text, shown):
    assert "leak" not in redact_text(text)
    assert shown in (None, redact_text(text))


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'a'",
        "policy.max_new_tokens=16",
        "monkey=banana, turkey: yes, in_keys=[tokens]",
        "pad_token=<pad> eos_token: </s>",
        "PWD=/home/me OLDPWD=/tmp pass: 3, compass=north eval/pass@8=0.5 first_pass=0.5",
        "max_tokens=16,32, stop: no",
        "https://hub.example/phook and shook/x",
        "tokenizer: Qwen2TokenizerFast, note: all well, a=b:c",
    ],
)
def test_texts_without_a_secret_stay_as_they_are(text):
    assert redact_text(text) == text


def test_variables_of_the_environment_are_hidden_by_their_names(monkeypatch):
    names = ("A_PASS", "A_PWD", "A_PAT", "A_PASSPHRASE", "SLACK_WEBHOOK_URL", "A_TOKEN", "apiKey")
    for number, name in enumerate(names):
        monkeypatch.setenv(name, f"planted-{number}-value")
    monkeypatch.setenv("PWD", "/some/folder")
    said = " ".join(f"planted-{number}-value" for number in range(len(names)))
    assert redact_text(f"{said} in /some/folder") == " ".join([HIDDEN] * 7) + " in /some/folder"


PIECES = ["key", "key=", "1", "a", "=", ":", "a=", "a:", "token:", " ", "\n", "key: ", "://", "@"]
PIECES += ["a://", "a:/", "://a:", "hook", "://hook", "bearer ", "bearer", ",", "key=,", "key=a,"]
PIECES += [
    "key=a,b=",
    "'",
    "':",
    "a':",
    "api_key=sk-",
    "(",
    "[",
    "_",
    "-",
    ".",
    "/",
    "A",
    "aA",
    "aA_",
]
PIECES += [
    "ACGT",
    "https://x.y/z?token=",
    "\u00e9",
    "pass_",
    "[\\d",
    "}",
    "&",
    "e",
    "1e",
    "tokens=1,",
]


def test_a_megabyte_of_any_kind_takes_linear_time():
    """A quadratic scan takes minutes for it, and many seconds for a part, which comes first."""
    for size, pieces in ((30_000, PIECES), (1_000_000, ("a:", "key=", "1"))):
        for piece in pieces:
            start = time.process_time()
            redact_text((piece * size)[:size] + "!")
            assert time.process_time() - start < size / 250_000, (piece, size)
