"""Code that the backends in plain XLA of several operations share."""
