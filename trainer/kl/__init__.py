"""The KL: estimators, leash, controllers, reference, hints, frontier, efficiency."""

FRONTIER_FILE = "frontier.json"  # of a run or a sweep: samples of the reference
