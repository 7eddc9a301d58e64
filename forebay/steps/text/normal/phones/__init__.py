"""Texts to phones: by the program espeak-ng in a process of its own, or by a lexicon."""
