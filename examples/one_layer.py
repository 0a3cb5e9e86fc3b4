"""What to paste first: one mixture-of-experts layer whose experts stay in 4 bits."""

import jax

from jax_mxfp4_moe import mxfp4_moe, quantize_weights, topk_routing

experts, hidden, intermediate, tokens = 8, 256, 512, 16
gate_up, down, x, logits = (
    jax.random.normal(jax.random.key(i), shape) * shape[-1] ** -0.5
    for i, shape in enumerate(
        [(experts, 2 * intermediate, hidden), (experts, hidden, intermediate), (tokens, hidden), (tokens, experts)]
    )
)
weights = quantize_weights(gate_up, down)
topk_weights, topk_ids = topk_routing(logits, num_experts_per_tok=2)
y = jax.jit(mxfp4_moe)(x, weights, topk_weights, topk_ids)
print(f"y {y.shape} {y.dtype}; {weights.nbytes:,} bytes of experts instead of {gate_up.nbytes + down.nbytes:,}")
