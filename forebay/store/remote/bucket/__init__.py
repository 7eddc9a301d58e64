"""One place of a store: who is asked, as whom, and what goes wrong on the way."""
