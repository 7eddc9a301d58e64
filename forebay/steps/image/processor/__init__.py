"""Any image processor of transformers as a step: how it is loaded and probed, and its values as codes."""
