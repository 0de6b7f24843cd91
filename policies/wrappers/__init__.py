"""The policy as a TensorDict module: the shared base, and one or two files per engine."""
