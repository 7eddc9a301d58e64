"""Steps that are models: frozen, run over the data once, known by the content of their weights."""
