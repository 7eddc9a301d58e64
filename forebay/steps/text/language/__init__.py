"""The language of a text, by its script and its words."""
