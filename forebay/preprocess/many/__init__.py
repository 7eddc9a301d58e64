"""Caches made of caches: several as one, or some samples of one. Shards are linked, and nothing is decoded."""
