"""The parts of preflight=true, which trainer/modes/preflight.py puts together."""
