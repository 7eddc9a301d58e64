"""Plans of buckets: batches of samples of like length."""
