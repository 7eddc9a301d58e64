"""Any feature extractor of transformers as a step: its folder, its call, the probe of its form."""
