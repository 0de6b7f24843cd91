"""The policy as a TensorDict module: what every engine shares, and one file or two per engine."""
