"""Images and conversations to samples: what builds of vision have of their own."""
