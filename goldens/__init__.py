"""The programs that make tests/golden, in an environment with kvpress; README.md lists it."""
