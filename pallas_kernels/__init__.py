"""Attention and selection kernels in Pallas; they know of no model and no policy. Import as `kvjax.pallas_kernels`.

One folder a kernel: a plain `reference.py`, one file per backend, and the dispatch between them in `__init__.py`.
"""
