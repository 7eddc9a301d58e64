"""Features that code of the user makes: a class of a file beside the config, or of an installed package."""
