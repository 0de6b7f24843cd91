"""Models: where they come from, their weights, adapters and shards."""
