"""Trains low-rank adapters around frozen MXFP4 experts, on real text, and shows the loss falling.

The model is that of `tiny_moe_lm.py`. It learns for a while; then its experts go into MXFP4 and everything it has is frozen. What learns
on are LoRA adapters beside each expert layer: one before it, one around its router, and one from its input to its output. The gradient
of the first passes through the packed experts, and that of the second through the router weights.

    python examples/lora_adapters.py            about a minute on two cores
    python examples/lora_adapters.py --short    a few steps around a model that has learnt nothing; the same demands

Exit status 1, and a line for each reason, if the loss on held-out text has not fallen, if a frozen array has changed, or if an
adapter has learnt nothing. Lines `RESULT name value` are for programs.
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import numpy as np
import optax
import tiny_moe_lm as base
from flax import nnx

from jax_mxfp4_moe.layers import Mxfp4Moe, Quantized

RANK = 8
BASE_STEPS, STEPS, SHORT_STEPS = 60, 100, 10
LEARNING_RATE = 1e-2
BATCH = 4
HELD_OUT, SHORT_HELD_OUT = 64, 32  # windows


class AdaptedMoe(nnx.Module):
    """Frozen experts with adapters. Those add nothing at first, since one of their two matrices starts as zeros."""

    def __init__(self, moe: Mxfp4Moe, rngs: nnx.Rngs) -> None:
        moe.router = nnx.LoRA(base.HIDDEN, RANK, base.EXPERTS, base_module=moe.router, rngs=rngs)
        self.moe = moe
        self.before = nnx.LoRA(base.HIDDEN, RANK, base.HIDDEN, rngs=rngs)
        self.beside = nnx.LoRA(base.HIDDEN, RANK, base.HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [..., HIDDEN] of the same."""
        return self.moe(x + self.before(x)) + self.beside(x)


def adapt(model: base.LanguageModel, seed: int) -> base.LanguageModel:
    """The model with its experts in MXFP4 and adapters around them."""
    model = base.to_mxfp4(model)
    rngs = nnx.Rngs(seed)
    for block in model.blocks:
        block.moe = AdaptedMoe(block.moe, rngs)
    return model


def train_adapters(model: base.LanguageModel, learnt: np.ndarray, steps: int, seed: int) -> list[float]:
    """Trains what is a LoRAParam and nothing else; returns the bits per byte of each step."""
    optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model: base.LanguageModel, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
        def loss(model: base.LanguageModel) -> jax.Array:
            return base.cross_entropy(model, windows).mean()

        bits, gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, gradients)
        return bits

    rng = np.random.default_rng(seed)
    bits = []
    for i in range(steps):
        starts = rng.integers(0, len(learnt) - base.CONTEXT, BATCH)
        windows = np.stack([learnt[s : s + base.CONTEXT + 1] for s in starts]).astype(np.int32)
        bits.append(float(step(model, optimizer, windows)))
        if i % 10 == 9 or i == steps - 1:
            print(f"step {i + 1:3}: {np.mean(bits[-10:]):.3f} bits per byte, mean of the last {len(bits[-10:])} steps")
    return bits


def copy(state: nnx.State) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help=f"{SHORT_STEPS} steps around a model that has learnt nothing"
    )
    parser.add_argument("--steps", type=int, help=f"steps of the adapters (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps = options.steps or (SHORT_STEPS if options.short else STEPS)
    begin = time.perf_counter()

    learnt, windows = base.split_text(base.read_text())
    windows = windows[:: len(windows) // (SHORT_HELD_OUT if options.short else HELD_OUT)]
    model = (
        base.LanguageModel(nnx.Rngs(options.seed)) if options.short else base.train(learnt, BASE_STEPS, options.seed)
    )
    model.set_attributes(training=False)
    model = adapt(model, options.seed + 1)
    is_frozen = nnx.Not(nnx.LoRAParam)
    frozen, adapters = copy(nnx.state(model, is_frozen)), copy(nnx.state(model, nnx.LoRAParam))
    packed = copy(nnx.state(model, Quantized))

    before = base.bits_per_byte(model, windows)
    bits = train_adapters(model, learnt, steps, options.seed)
    after = base.bits_per_byte(model, windows)

    same = all(map(np.array_equal, copy(nnx.state(model, is_frozen)), frozen))
    same_bytes = all(map(np.array_equal, copy(nnx.state(model, Quantized)), packed))
    idle = sum(map(np.array_equal, copy(nnx.state(model, nnx.LoRAParam)), adapters))
    results = {
        "steps": steps,
        "seconds": round(time.perf_counter() - begin, 1),
        "bits_per_byte_before": round(before, 4),
        "bits_per_byte_after": round(after, 4),
        "bits_per_byte_first_step": round(bits[0], 4),
        "adapter_parameters": sum(a.size for a in adapters),
        "packed_bytes": sum(a.nbytes for a in packed),
        "packed_bytes_unchanged": same_bytes,
    }
    print(
        f"held-out text: {before:.3f} bits per byte before, {after:.3f} after; {results['adapter_parameters']:,} numbers trained "
        f"around {results['packed_bytes']:,} bytes of experts"
    )
    for name, value in results.items():
        print(f"RESULT {name} {value}")

    failures = []
    if not after < before:
        failures.append(f"bits per byte of held-out text: {after:.4f} found, expected less than {before:.4f}")
    if not (same and same_bytes):
        failures.append("frozen arrays: changed, expected every bit as it was")
    if idle:
        failures.append(f"adapters: {idle} of {len(adapters)} matrices as they were, expected that each has learnt")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
