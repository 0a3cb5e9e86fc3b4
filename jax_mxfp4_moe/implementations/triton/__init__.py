"""`triton`: the five steps as Triton kernels on XLA's buffers. Start at `implementation.py`; only `pipeline.py` and what it uses import triton."""
