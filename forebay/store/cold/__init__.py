"""The cold form of a cache: one zarr v3 hierarchy, which others read and a pull makes the cache's own bytes again."""
