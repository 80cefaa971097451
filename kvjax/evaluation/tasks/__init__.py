"""Where prompts with known answers come from."""
