"""The KL: estimators, leash, controllers, reference, hints, frontier, efficiency."""

FRONTIER_FILE = "frontier.json"  # the reference's samples, in the folder of a run or a sweep
