"""A model on a new tokenizer: `forebay warm-start`."""
