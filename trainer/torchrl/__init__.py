"""TorchRL's trainer classes with TorchRL's names and keys, for porting programs.

train.py imports none of them: its losses are in trainer/objectives.py, its rollouts in
trainer/sources.py, on the same per-token functions. docs/coming_from_torchrl.md lists the names and
the intended differences.
"""
