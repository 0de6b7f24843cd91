"""The policy as a TensorDict module: of a run, with TorchRL's options, and on each engine."""
