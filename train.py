"""Train a chat model: python train.py [experiment=...] [key=value ...] [-m] [resume=<run folder>].

preflight=true runs two iterations and keeps nothing. mode=chat, evaluate, export or frontier works
on a trained policy, resume=<run folder>. The parent process checks the configuration, starts one
process per rank and imports no torch.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

for name in ("conf", "envs", "policies", "trainer"):
    origin = Path(getattr(find_spec(name), "origin", None) or name).resolve()
    if origin != Path(__file__).resolve().parent / name / "__init__.py":  # a folder here
        sys.exit(f"error: {name} is {origin}, not that of leash; rename yours")
try:
    from conf.run import train as train  # for scripts
    from conf.run import worker
except ModuleNotFoundError as missing:  # probably not the Python of .venv
    sys.exit(f"error: {missing}; use .venv/bin/python, which `make setup` creates")


def main() -> int:
    """Run the command line of `python train.py` or `leash`; return the exit code."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:  # closed, so that a file could get number 0, 1 or 2
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        if mode == "w":  # reconfigure fails on a stdin that pdb has read
            getattr(sys, name).reconfigure(errors="replace")  # for unprintable characters
    sys.path.append(os.getcwd())  # the user's modules come last
    if sys.argv[1:2] == ["--worker"]:
        return worker(*sys.argv[2:])
    if sys.argv[1:2] == ["--check"]:
        from conf.plan import check

        return check(sys.stdin)
    from conf.cli import cli  # only the command line needs it

    return cli()


if __name__ == "__main__":
    sys.exit(main())
