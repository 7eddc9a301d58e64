"""Plans of packs: several samples in one row of tokens."""
