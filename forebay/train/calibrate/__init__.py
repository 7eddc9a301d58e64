"""The largest batch of every bucket, or the largest pack, that trains within the memory of a device."""
