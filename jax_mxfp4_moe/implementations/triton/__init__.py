"""`triton`: the five steps as Triton kernels. Start at `implementation.py`; only `pipeline.py` and its kernels import triton."""
