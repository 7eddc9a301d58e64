"""Images as their processor gives them, and what stands beside them: what such builds have of their own."""
