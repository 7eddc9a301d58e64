"""Named objects brought from one place to another: resumable, counted, proven by their hashes or etags."""
