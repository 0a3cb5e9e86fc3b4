"""`aiter`: AMD's two-stage MXFP4 mixture-of-experts kernels on XLA's buffers."""
