"""A build whose shards stand in a store until the cache is sealed there, so that its nodes need share no folder."""
