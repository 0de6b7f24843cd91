"""Distributions over classes and over the tokens of a sequence, masked or sparse."""
