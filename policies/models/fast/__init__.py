"""Faster layers, products and attention for models of transformers."""
