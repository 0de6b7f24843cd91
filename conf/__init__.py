"""The configuration: YAML groups and their schema."""
