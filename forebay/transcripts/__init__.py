"""`forebay text`: what becomes of texts before they are learnt, one text or all of a source."""
