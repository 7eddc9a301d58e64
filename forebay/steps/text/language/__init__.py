"""Which language a text is in: by its script where one language alone has that script, else by py3langid."""
