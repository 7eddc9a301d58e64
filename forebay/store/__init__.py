"""Bytes on disk: key and lookup, layout, shard writer and reader, cache, verify, tar index."""
