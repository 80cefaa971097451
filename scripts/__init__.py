"""Programs for users of a checkout."""
