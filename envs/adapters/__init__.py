"""Tasks of other libraries: reasoning-gym, verifiers, sentiment of reviews."""
