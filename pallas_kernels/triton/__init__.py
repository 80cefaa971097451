"""Code that the Triton kernels of all operations share. Pallas compiles them for NVIDIA GPUs."""
