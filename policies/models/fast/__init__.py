"""Faster layers, matmuls and attention for models of transformers."""
