"""What users of a checkout run."""
