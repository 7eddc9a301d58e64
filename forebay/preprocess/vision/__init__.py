"""Images and conversations to samples: the processor, the lines of a build."""
