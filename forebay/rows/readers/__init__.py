"""Sources of clips: one file a kind."""
