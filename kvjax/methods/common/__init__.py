"""Parts that several methods use."""
