"""TorchRL's trainer classes under their names and keys. Who ports a program goes here.

A run of train.py imports none of them: its losses are trainer/objectives.py, its rollouts
trainer/sources.py. Both stand on the same per-token functions. docs/coming_from_torchrl.md lists
the names and what is different on purpose.
"""
