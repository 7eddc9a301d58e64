"""Steps over text: transcripts and conversations to tokens, and these to what a model takes."""
