"""Reads and writes mixture-of-experts checkpoints in MXFP4. Start with `load`; `describe` says what a checkpoint holds."""

from jax_mxfp4_moe.checkpoint.files import Checkpoint, open_checkpoint
from jax_mxfp4_moe.checkpoint.load import Description, Router, describe, load, load_router
from jax_mxfp4_moe.checkpoint.write import save

__all__ = ["Checkpoint", "Description", "Router", "describe", "load", "load_router", "open_checkpoint", "save"]
