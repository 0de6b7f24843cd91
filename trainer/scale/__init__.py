"""Several GPUs and nodes: shards, sampling ahead; dry_run/: memory of a cluster, by shapes."""
