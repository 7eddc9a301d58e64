"""Caches made of caches."""
