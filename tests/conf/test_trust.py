"""The three rules of SECURITY.md."""

import os

import pytest
import yaml
from omegaconf import OmegaConf
from support.runs import asked, refusal

from conf.compose import compose_checked, hide_secrets
from trainer.pages.trackers.jsonl import JsonlTracker
from trainer.runs.redact import HIDDEN, redact, redact_text
from trainer.runs.run_files import read_lines, read_yaml

OWN = "env.transforms.a={_target_: envs.transforms.Compose, b: [{_target_: os.system}]}"


def test_code_from_elsewhere_needs_allow_targets():
    line = refusal(OWN)
    assert "env.transforms.a.b[0]._target_=os.system" in line
    assert "allow_targets=true" in line
    assert compose_checked([OWN, "allow_targets=true"])["allow_targets"]
    for module in ("os", "policies.cache.os", "tests.refusals", "conf.compose"):
        assert "allow_targets=true" in refusal(f"env.task._target_={module}.system")


def test_a_users_own_file_may_allow_its_code_and_a_resume_follows(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [grpo_tiny, _self_]\nallow_targets: true\n"
    node = "{_target_: envs.rewards.Function, function: {_target_: operator.eq, _partial_: true}}"
    text += f"policy: {{model: tiny}}\nenv: {{rewards: {{mine: {node}}}}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    config = compose_checked([f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert asked([f"resume={tmp_path}"])["env"]["rewards"] == config["env"]["rewards"]


def test_yaml_makes_no_objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("a: !!python/object/apply:os.mkdir [made]\n")
    assert read_yaml(tmp_path / "config.yaml") == {}
    with pytest.raises(ValueError, match=r"config\.yaml"):
        asked([f"resume={tmp_path}"])
    assert not (tmp_path / "made").exists()


def test_a_text_from_the_environment_is_looked_up_again_and_not_saved(monkeypatch):
    monkeypatch.setenv("MY_PROMPT", "planted-secret")
    config = compose_checked(["policy.system_prompt=${oc.env:MY_PROMPT}", "policy.model=tiny"])
    assert config["policy"]["system_prompt"] == "${oc.env:MY_PROMPT}"
    assert OmegaConf.create(config).policy.system_prompt == "planted-secret"


def test_a_secret_that_is_typed_reaches_the_run_and_no_file(tmp_path):
    word = "+policy.chat_template_kwargs.api_key=planted-secret"
    config = compose_checked([word, "policy.model=tiny"])
    assert "planted" not in str(config)
    assert OmegaConf.create(config).policy.chat_template_kwargs.api_key == "planted-secret"
    (tmp_path / "overrides.yaml").write_text(yaml.safe_dump([word]))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"a": {"api_key": "planted-secret"}}))
    hide_secrets(tmp_path)
    assert "planted" not in "".join(path.read_text() for path in tmp_path.iterdir())
    (name,) = [name for name in os.environ if name.startswith("LEASH_POLICY")]
    del os.environ[name]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match="api_key"):
        asked([f"resume={tmp_path}"])


@pytest.mark.parametrize("name", ["token", "SECRET", "db_password", "API-KEY", "passphrase"])
def test_values_of_secret_names_are_hidden(name):
    assert redact({name: "planted-secret"}) == {name: HIDDEN}
    assert redact_text(f"env.{name}=planted-secret") == f"env.{name}={HIDDEN}"


VARIABLES = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "API_KEY_2", "DB_PASS", "GH_PAT", "MYSQL_PWD")


@pytest.mark.parametrize("name", [*VARIABLES, "my_passphrase", "SIGNING_KEY"])
def test_values_of_secret_variables_are_in_no_text_and_no_transcript(name, monkeypatch, tmp_path):
    monkeypatch.setenv(name, "planted-secret")
    assert redact_text("a planted-secret in prose") == f"a {HIDDEN} in prose"
    said = {"system": "it is planted-secret", "prompt": "p", "response": "a planted-secret"}
    row = {**said, "kind": "train", "pieces": {"text": ["a ", "planted", "-secret"]}}
    JsonlTracker(tmp_path).responses([row], 1, kind="train")
    (line,) = read_lines(tmp_path / "transcripts.jsonl")
    assert (line["system"], line["response"]) == (f"it is {HIDDEN}", f"a {HIDDEN}")
    assert "planted" not in str(line)


@pytest.mark.parametrize("name", ["HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "PWD", "KEYBOARD"])
def test_values_of_other_variables_stay(name, monkeypatch):
    monkeypatch.setenv(name, "/some/place")
    monkeypatch.setenv("MY_TOKEN", "short")
    assert redact_text("short: /some/place") == "short: /some/place"


@pytest.mark.parametrize("slashes", ["/", "//"])  # one in the folder of a sweep's job
def test_passwords_of_addresses_are_hidden(slashes):
    assert redact_text(f"at https:{slashes}me:pw@hub/a") == f"at https:{slashes}me:{HIDDEN}@hub/a"


def test_what_is_no_secret_stays():
    plain = {"max_new_tokens": 16, "token": "${oc.env:T}", "tokenizer": "a", "keyword": "b"}
    assert redact(plain) == plain
    text = "nats per token: policy.max_new_tokens=16 policy.max_prompt_tokens=choice(128,256)"
    assert redact_text(text) == text
