"""Timings as ratios to a floor measured in the same run."""
