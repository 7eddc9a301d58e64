"""What lies under a cache root: what it is, what it takes, who uses it; and how it goes, without taking anything else."""
