"""What builds of speech and of text have of their own."""
