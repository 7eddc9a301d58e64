"""Caches of images as their processor gives them."""
