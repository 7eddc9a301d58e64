"""Faults and doubts of raw data and of caches: `forebay lint`."""
