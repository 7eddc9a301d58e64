"""Evaluation: loss, and what a model writes, on sets of their own."""
