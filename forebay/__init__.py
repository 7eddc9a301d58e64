"""forebay: precompute speech and vision-language training data once, into a hash-keyed, memory-mapped tensor cache."""
