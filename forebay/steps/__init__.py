"""What happens to a sample: each step in one file, above the cut and below it."""
