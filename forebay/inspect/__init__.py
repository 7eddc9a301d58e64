"""Read-only reports on a cache."""
