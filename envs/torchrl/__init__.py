"""TorchRL's environment, reward parsers, tools and other transforms, for porting programs.

A run's tasks are in envs/tasks/, its tools in envs/tools/, its KL in trainer/kl/ and
envs/transforms/; of conf/ only env=verifiers uses a part of this folder. `envs`,
`envs.rewards` and `envs.transforms` export the names; docs/coming_from_torchrl.md lists them and
the intended differences.
"""
