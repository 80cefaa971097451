"""Code that the Mosaic kernels for TPUs of all operations share."""
