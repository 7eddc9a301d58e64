"""The reference loop: `forebay train`."""
