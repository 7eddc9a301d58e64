"""The pages of a cache on this machine alone: read-only, by index, behind a random token."""
