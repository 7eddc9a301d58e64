"""`forebay lint`: what is wrong with the data of a config or a cache, before a model learns it."""
