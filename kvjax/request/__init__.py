"""Checks what a user may pass: prompts, seeds, end tokens, and the cache to continue."""
