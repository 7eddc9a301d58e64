"""A cache as a page for a browser: one self-contained file, or the same over all samples on this machine alone."""
