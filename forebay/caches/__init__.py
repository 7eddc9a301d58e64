"""Everything under a cache root: what it is, what it takes, who uses it; how it goes, and nothing else with it."""
