"""Manifests to one table of candidate samples, in two stages: listed at once, then looked into a file at a time."""
