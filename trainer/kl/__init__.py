"""The KL to the reference: estimators, leash, controllers, reference, frontier."""
