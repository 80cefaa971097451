"""How programs run: compiled programs, modes of JAX, clocks, and flags of GPUs."""
