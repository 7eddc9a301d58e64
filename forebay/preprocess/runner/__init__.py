"""Who makes the shards of a build where it is not this process alone, and what its parts say of themselves."""
