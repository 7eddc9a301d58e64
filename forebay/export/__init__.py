"""Sealed caches as files that other tools read."""
