"""Conversations to tokens: for packs of the Qwen-VL family, and by any processor of transformers."""
