"""Mixtures: several sources over the buckets of one plan."""
