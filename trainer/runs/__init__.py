"""Processes and run folders: who starts a run, where it lives, how it ends. Torch-free."""
