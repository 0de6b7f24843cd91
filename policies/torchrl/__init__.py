"""TorchRL's policy wrappers, distributions and specs, for porting programs.

A run's policy is policies/chat_policy.py with an engine; the wrappers stand on it. `policies` and
`envs` export the names; docs/coming_from_torchrl.md lists them and the intended differences.
"""
