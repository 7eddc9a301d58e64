"""Samples made on the fly by the very steps of a build: the fallback without a cache, bit for bit the same values.

The only part of `train` that reaches `preprocess`.
"""
