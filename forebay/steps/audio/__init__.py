"""Steps over sound: a waveform to stored features, and these to what a model takes."""
