"""An image from its encoded bytes to uint8 patches and back, as a Qwen2-VL processor cuts them. Loads nothing heavy."""
