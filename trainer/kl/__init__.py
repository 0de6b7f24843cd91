"""The KL: estimators, leash, controllers, reference, hints, frontier, efficiency."""
