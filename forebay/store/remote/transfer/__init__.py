"""Sealed caches to a store and back."""
