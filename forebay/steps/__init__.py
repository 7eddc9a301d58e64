"""Steps, each in one file: what they do to a sample above the cut and below it."""
