"""Sources of conversations over images: one file a kind."""
