"""The parts of preflight=true; trainer/modes/preflight.py puts them together."""
