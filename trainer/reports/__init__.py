"""What people look at: terminal, trackers, report.html, sweep.html, diagnosis. Torch-free."""
