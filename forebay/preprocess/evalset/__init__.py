"""Evaluation sets: for each language a tar of recordings and transcripts, drawn from the raw data of a config."""
