"""Steps over images: encoded bytes to patches, as a processor of transformers cuts them."""
