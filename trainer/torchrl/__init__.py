"""TorchRL's trainer classes under their names and keys, for programs written with them.

A run of train.py uses none of them: its losses are trainer/objectives.py, its rollouts
trainer/sources.py. Both stand on the same per-token functions.
"""
