"""Holds one module for each way to keep tensors on disk; `python -m benchmarks.formats` compares them."""
