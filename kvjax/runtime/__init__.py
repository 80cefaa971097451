"""Runs programs: compiled programs, modes of JAX, clocks, and flags of GPUs."""
