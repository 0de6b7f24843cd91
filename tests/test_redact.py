"""Secrets in free text; what a tracker gets is in test_tracker.py."""

import json
import os
import textwrap
import time
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import yaml

from trainer.runs.redact import HIDDEN, redact_text

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("env.api_keys=leak1,leak2 secretkey=leak3 TS_AUTHKEY=tskey-leak4", None),
        ("auth=leak1 pw=12345678 SESSION_COOKIE=leak2; apiKeys: leak3", None),
        ("api_keys=['leak1', 'leak2'] x", f"api_keys={HIDDEN} x"),
        ("secrets: {'c': 'leak', 'd': 'leak two'} x", f"secrets: {HIDDEN} x"),
        ("token_2=leak API_KEY_1=leak keys=3 jwt=leak.leak", None),
        ("https://h/b?se=2026&sig=leak%3D&sp=r", f"https://h/b?se=2026&sig={HIDDEN}&sp=r"),
        ("https://h/b?X-Amz-Signature=leak&a=1", f"https://h/b?X-Amz-Signature={HIDDEN}&a=1"),
        ("redirect=https%3A%2F%2Fh%3Ftoken%3Dleak", None),
        ("Authorization: Basic leak=\nAccept: x", f"Authorization: {HIDDEN}\nAccept: x"),
        ("authorization: Token leak", f"authorization: {HIDDEN}"),
        ("curl -H 'Authorization: Token leak' http://h", None),
        ('Authorization: Digest a="leak", b="leak"', f"Authorization: {HIDDEN}"),
        ("{'Authorization': 'Basic leak leak', 'a': 1}", f"{{'Authorization': {HIDDEN}, 'a': 1}}"),
        ("Set-Cookie: id=leak; b=leak two", f"Set-Cookie: {HIDDEN}"),
        ("auth=Basic leak b=1", f"auth={HIDDEN} b=1"),
        ("Bearer  leakleak9 and bearer\tleakleak9", f"Bearer  {HIDDEN} and bearer\t{HIDDEN}"),
        ("token = leak1 b = 2", f"token = {HIDDEN} b = 2"),
        ("token := leak TOKEN => leak 'token' : 'leak'", None),
        ("run --token leak1 --seed 1", f"run --token {HIDDEN} --seed 1"),
        ("run --api-key leak --api-key 'leak two' -password leak", None),
        ("['curl', '--token', 'leak', 'http://h']", f"['curl', '--token', {HIDDEN}, 'http://h']"),
        ("token='leak two' b=1", f"token={HIDDEN} b=1"),
        ("token=b'leak two' api_key=\"leak's two\"", None),
        ("password='''leak two''' x", f"password={HIDDEN} x"),
        ("token='leak two, and here the text was cut", f"token={HIDDEN}"),
        ("os.environ['API_KEY'] = 'leak two'", f"os.environ['API_KEY'] = {HIDDEN}"),
        ("one\\npw=leak and%20auth=leak", None),
        ("login failed with password: leak for user bob", None),
        ("password: leak, secret: leak; passphrase = leak and so on", None),
        ("key=1234-5678-leak api_key=1a2b3c4leak token=4(leak) auth_token: 12+ableak", None),
        ("Cookie: leak=1; b=two", f"Cookie: {HIDDEN}"),
        ("session_cookie: leak cookie=leak {'Set-Cookie': 'leak'}", None),
        ("password: the-leak is long; secret: is_leak; password: a1leak is old", None),
    ],
)
def test_a_name_a_separator_and_a_value_are_read_however_they_are_written(text, shown):
    assert "leak" not in redact_text(text)
    assert "two" not in redact_text(text)
    assert shown in (None, redact_text(text))


def test_a_secret_in_json_in_json_is_hidden_with_its_blanks():
    said = {"token": "leak and more", "a": "shown"}
    for _ in range(3):
        said = json.dumps({"x": said}) if isinstance(said, str) else json.dumps(said)
        assert "leak" not in redact_text(said)
        assert "more" not in redact_text(said)
        assert "shown" in redact_text(said)


READ_DAILY = [
    "max_new_tokens=64, tokens: 123, pad_token_id: 0, stop_token_ids=[1, 2]",
    "policy.max_new_tokens = 64: 12 tokens: 1,234 (tokens: 12) tokens: 64; tokens=12/s",
    "perf/token/s: 1.2k tokens/s=3.4M tokens_per_second=12.5 tokens: {'prompt': 12, 'reply': 5}",
    "env.tokenizer=plain tokenizer: fast author=Ann authors: Ann, Bob, authored=yes",
    "pwd: /home/me pwd=/tmp/a signature: (a, b) session=3 sigma=0.5 design=new",
    "eos_token: </s> pad_token=<pad> mask_token='[MASK]' token: <|im_end|>",
    "expected key: value pairs; unknown key: 'reward', full_key: env.foo, all tokens: many",
    "sorted by key = name; token = read(path); token = tokens[0]",
    "it looks up key_variable=OPENAI_API_KEY, KeyError: 'a', PasswordError: too short",
    "python train.py --max-tokens 64 --tokenizer fast --author Ann -- token by token",
    "api_key: null, hf_token=none password: ''",
    "2.3 nats per token: the policy always says the same; api_key: a secret would lie there",
    "expected key=value; env.task.api_key='${oc.env:MY_KEY}' {'api_key': '${oc.env:MY_KEY}'}",
    "Secret: the model is good, password: is required; The secret: It's in the data",
    "Number of cookies: $5, Cookies = 2x + 5, cookies: $1,234 cookies = 3*4=12 or 1200/4",
    "cookies = 0.5x, cookies: \u20ac1.50*4 tokens = -3x+4 keys = 3\u00d74, keys = 2.5x - 1.5",
    "tokens = 4x, key: 3x+1, keys: 12+5 tokens = 2(x + 5) key: x^2-1 tokens=4*(3+2) tokens: 10-20",
    "The last cookie: it was eaten, cookies: chocolate chips, a cookie: sweet",
    "    best = max(scored, key=lambda s: s.place), max_new_tokens=self.max_new_tokens,",
    "    def f(max_tokens: int | None = None, data_key='question', text_key: str = 'text')",
]


@pytest.mark.parametrize("text", READ_DAILY)
def test_what_users_read_daily_stays_as_it_is(text):
    assert redact_text(text) == text


def test_the_pages_hide_nothing():
    """What leash itself writes about is no secret."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for line in path.read_text().splitlines():
            assert redact_text(line) == line, path


PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADAN/Bgkqh+kiG9w\n0BAQEFAASCBKcw/ggSjAgEA\nAoI=\n"
PEM += "-----END PRIVATE KEY-----\n"
WRITTEN = {
    "as it is": str,
    "repr": repr,
    "repr of repr": lambda text: repr(repr(text)),
    "json": json.dumps,
    "json of json": lambda text: json.dumps(json.dumps({"a": text})),
    "json of php": lambda text: json.dumps(text).replace("/", "\\/"),
    "indented": lambda text: textwrap.indent(text, "    "),
    "one line": lambda text: " ".join(text.split()),
    "a page": lambda text: yaml.safe_dump({"a": {"b": text}}, width=40),
    "a block": lambda text: yaml.safe_dump({"a": {"b": text}}, default_style="|"),
    "windows": lambda text: text.replace("\n", "\r\n"),
    "url": quote,
    "whole url": lambda text: quote(text, safe=""),
    "form": quote_plus,
    "lower url": lambda text: quote_plus(text).replace("%2F", "%2f").replace("%2B", "%2b"),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_variable_of_the_environment_is_hidden_however_it_is_written(how, monkeypatch):
    monkeypatch.setenv("SIGNING_KEY", PEM)
    monkeypatch.setenv("A_TOKEN", 'pl"ain/to\\ken+\u00e9')
    monkeypatch.setenv("A_PASSPHRASE", "correct horse's battery\tstaple")
    for name, parts in (
        ("SIGNING_KEY", ("MIIE", "kiG9w", "0BAQ", "AgEA")),
        ("A_TOKEN", ("ain", "ken")),
        ("A_PASSPHRASE", ("correct", "horse", "battery", "staple")),
    ):
        said = redact_text(f"it said {WRITTEN[how](os.environ[name])} there")
        assert [part for part in parts if part in said] == []
        assert said.startswith("it said ")
        assert said.endswith(" there")


def test_variables_of_the_environment_are_hidden_by_their_names(monkeypatch):
    names = ("A_PASS", "A_PWD", "A_PAT", "A_PASSPHRASE", "SLACK_WEBHOOK_URL", "A_TOKEN", "apiKey")
    for number, name in enumerate(names):
        monkeypatch.setenv(name, f"planted-{number}-value")
    monkeypatch.setenv("PWD", "/some/folder")
    said = " ".join(f"planted-{number}-value" for number in range(len(names)))
    assert redact_text(f"{said} in /some/folder") == " ".join([HIDDEN] * 7) + " in /some/folder"


PIECES = ["key", "key=", "1", "a", "=", ":", "a=", "a:", "token:", " ", "\n", "key: ", "://", "@"]
PIECES += ["a://", "a:/", "://a:", "hook", "://hook", "bearer ", "bearer", ",", "key=,", "key=a,"]
PIECES += ["key=a,b=", "'", "':", "a':", "api_key=sk-", "(", "[", "_", "-", ".", "/", "A", "aA"]
PIECES += ["aA_", "ACGT", "https://x.y/z?token=", "\u00e9", "pass_", "[\\d", "}", "&", "e", "1e"]
PIECES += [
    "tokens=1,",
    "tokens:1,",
    "key=[",
    "key=[1,",
    "key={tokens:1,",
    "key=(",
    "key='",
    'key="',
]
PIECES += [
    "key=\\'",
    "key='key=\"",
    "key='\\",
    "tokens='1\n",
    "\\",
    "\\'",
    "key\\",
    "a\\'",
    "a ",
    "a\t",
]
PIECES += [
    "--key ",
    "--key",
    "--tokens 1 ",
    "--a ",
    "cookie:",
    "cookie: 1 ",
    "cookie:1,",
    'cookie:="',
]
PIECES += [
    "auth=basic ",
    "key: basic ",
    "key= ",
    "key =",
    "bearer%20",
    "bearer\t",
    "%",
    "%3Dkey%3D",
]
PIECES += ["tokens=1x+", "tokens=2(", "tokens=1e+1e", "key: the ", "password: the ", "cookie: a "]
PIECES += ["tokens: \n", "tokens: {", "\\nkey=", "b'", "token=b\\\\\\'", "tokens=1 ", "key: a "]


def test_a_megabyte_of_any_kind_takes_linear_time():
    """A quadratic scan takes minutes for it, and many seconds for a part, which comes first.

    What seems slow may be a busy machine: twice the text then takes twice the time, not four times.
    """
    _cost("key=", 100)  # imports and compiles
    for size, pieces in ((30_000, PIECES), (1_000_000, ("a:", "key=", "tokens:1,"))):
        for piece in pieces:
            if _cost(piece, size) > size / 250_000:
                once, twice = (min(_cost(piece, n) for _ in range(4)) for n in (size, 2 * size))
                assert twice < 3 * once, (piece, size)


def _cost(piece: str, size: int) -> float:
    start = time.process_time()
    redact_text((piece * size)[:size] + "!")
    return time.process_time() - start
