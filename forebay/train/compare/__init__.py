"""A config's way beside others on the same samples, and two runs beside each other: `forebay compare`."""
