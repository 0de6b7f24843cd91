"""The Dockerfile says what Makefile, pyproject.toml and .gitignore say; no image is built here."""

import re
import tomllib

from runs import ROOT

LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


def said(word: str) -> list[str]:
    return [line.removeprefix(word).strip() for line in LINES if line.startswith(f"{word} ")]


def test_the_image_has_the_python_that_the_project_asks_for():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    (image,) = said("FROM")
    version = re.findall(r"^python:(3\.\d+)", image)[0]
    assert wanted == f">={version}"
    assert f"python{version}" in (ROOT / "Makefile").read_text()
    assert f"python{version} -m venv .venv" in "".join(said("RUN"))


def test_what_it_makes_and_copies_is_there():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    made = [name for line in said("RUN") for name in re.findall(r"(?:^|&& )make (\S+)", line)]
    assert made == ["setup"]
    assert set(made) <= set(targets)
    for line in said("COPY"):
        assert all((ROOT / name).exists() for name in line.split()[:-1])
    (pin,) = re.findall(r"grep '(.+?)'", "".join(said("RUN")))
    found = re.findall(pin.replace("$", r"\$"), (ROOT / "constraints.txt").read_text(), re.M)
    assert len(found) == 1
    (entry,) = said("ENTRYPOINT")
    assert entry == '[".venv/bin/python", "train.py"]'
    assert (ROOT / "train.py").is_file()


def test_what_git_ignores_stays_out_of_the_image():
    kept_out = {line.strip("/*") for line in (ROOT / ".dockerignore").read_text().split()}
    ignored = {line.strip("/*") for line in (ROOT / ".gitignore").read_text().split()}
    assert ignored <= kept_out
    assert ".git" in kept_out
