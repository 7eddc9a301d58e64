"""Reports as lines for a terminal."""
