"""Who makes the shards of a build where it is not this machine alone."""
