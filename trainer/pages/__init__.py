"""Output for people: terminal, trackers, report.html, sweep.html, diagnosis. Torch-free."""
