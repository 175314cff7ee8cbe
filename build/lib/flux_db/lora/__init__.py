"""LoRA files: read, write, convert, merge, draw."""
