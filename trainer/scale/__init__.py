"""Several GPUs and nodes: shards, sampling ahead, the dry run of a cluster."""
