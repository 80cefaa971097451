"""Code that the Mosaic kernels for GPUs of all operations share."""
