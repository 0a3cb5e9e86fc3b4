"""Trains a small mixture-of-experts language model, puts its experts into MXFP4, and prints what that costs and saves.

The text is the documentation that every Python carries for `help()`; nothing is downloaded. What runs in MXFP4 runs inside `jax.jit`:
in plain JAX (`xla`) and in torch on XLA's own buffers, through the compiled bridge (`torch`).

    python examples/tiny_moe_lm.py            about 2 minutes on two cores
    python examples/tiny_moe_lm.py --short    about 1 minute; the same demands

Exit status 1, and a line for each reason, if the model has not learnt, if its experts do not matter, if MXFP4 costs too much, or if the
compiled bridge did not run. Lines `RESULT name value` are for programs.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jax_mxfp4_moe import MoeWeights, append_shared_experts, dequantize, mxfp4_moe, quantize_weights, topk_routing
from jax_mxfp4_moe.device import platforms
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS, PREFERENCE
from jax_mxfp4_moe.implementations.torch_call import bridge_state
from jax_mxfp4_moe.layers import Mxfp4Moe
from jax_mxfp4_moe.problem import MoeProblem

HIDDEN, INTERMEDIATE, LAYERS, HEADS = 128, 128, 2, 4
EXPERTS, TOP_K = 8, 2  # and one shared expert, whose weights stand behind those of the routed ones
CONTEXT, COUNTED, BATCH = 128, 96, 8
BYTES_SEEN = 4  # the embedding of a position is that of its own byte and of the three before it
STEPS, SHORT_STEPS = 400, 200

MAX_BITS_PER_BYTE = 2.5  # trigram counts of this text, measured on the text they were counted on, give 2.45
MAX_COST_WEIGHTS, MAX_COST_ACTIVATIONS = 0.01, 0.02
MIN_COST_WITHOUT_EXPERTS = 0.20

console = Console(width=None if sys.stdout.isatty() else 120)


# --- text -------------------------------------------------------------------------------------------------------------


def read_text() -> bytes:
    """Joins the topics of `help()`, each paragraph once: many stand in several topics, and would be both learnt and held out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        sys.exit(
            f"tiny_moe_lm: {sys.executable} has no pydoc_data.topics, the text to learn. It is part of the standard library; "
            "use a Python that was not stripped, such as that of a Linux distribution's full package or of python.org."
        )
    paragraphs = {}
    for name in sorted(topics):
        for paragraph in topics[name].strip().split("\n\n"):
            paragraphs.setdefault(paragraph.strip(), paragraph)
    return "\n\n".join(paragraphs.values()).encode()


def split_text(text: bytes, piece: int = 4096) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes to learn, and windows [n, CONTEXT + 1] of every tenth piece of the text, which are held out.

    Windows overlap, and their last COUNTED bytes are what counts: each is predicted from at least CONTEXT - COUNTED bytes before it.
    """
    pieces = [np.frombuffer(text[i : i + piece], np.uint8) for i in range(0, len(text), piece)]
    learnt = np.concatenate([p for i, p in enumerate(pieces) if i % 10 != 9])
    windows = [p[i : i + CONTEXT + 1] for p in pieces[9::10] for i in range(0, len(p) - CONTEXT, COUNTED)]
    return learnt, np.stack(windows).astype(np.int32)


# --- model ------------------------------------------------------------------------------------------------------------


class Attention(nnx.Module):
    """Causal attention with rotary positions."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.Linear(HIDDEN, 3 * HIDDEN, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs)
        self.norm_q = nnx.RMSNorm(HIDDEN // HEADS, rngs=rngs)
        self.norm_k = nnx.RMSNorm(HIDDEN // HEADS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, length, HIDDEN] of the same."""
        batch, length, _ = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(batch, length, 3 * HEADS, HIDDEN // HEADS), 3, axis=2)
        y = jax.nn.dot_product_attention(rotate(self.norm_q(q)), rotate(self.norm_k(k)), v, is_causal=True)
        return self.out(y.reshape(batch, length, HIDDEN))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [batch, length, heads, features]."""
    length, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(length)[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1)


class FloatMoe(nnx.Module):
    """The layer as it is trained: float32 experts, kernels [experts, in, out] as Flax has them, the shared expert last."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0)
        self.router = nnx.Linear(HIDDEN, EXPERTS, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Param(init(rngs.params(), (EXPERTS + 1, HIDDEN, 2 * INTERMEDIATE)))
        self.down = nnx.Param(0.5 * init(rngs.params(), (EXPERTS + 1, INTERMEDIATE, HIDDEN)))
        self.balance = nnx.Intermediate(jnp.zeros(()))
        self.training = True

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [..., HIDDEN] of the same; `Mxfp4Moe` is called the same way."""
        tokens = x.reshape(-1, HIDDEN)
        logits = self.router(tokens)
        topk_weights, topk_ids = topk_routing(logits, TOP_K)
        capacity = len(tokens)  # of which none has the same expert twice: enough in any case
        if self.training:
            capacity = 3 * topk_ids.size // (2 * EXPERTS)
            # Switch transformer's balance loss: 1 when the experts share the tokens evenly.
            share = jnp.bincount(topk_ids.reshape(-1), length=EXPERTS) / topk_ids.size
            self.balance[...] = EXPERTS * jnp.sum(share * jax.nn.softmax(logits).mean(axis=0))
        y = batched_moe(tokens, self.gate_up[...], self.down[...], topk_weights, topk_ids, capacity)
        return y.reshape(x.shape)


def swiglu(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def batched_moe(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, topk_weights: jax.Array, topk_ids: jax.Array, capacity: int
) -> jax.Array:
    """Batched products with room for `capacity` tokens an expert; tokens beyond it get nothing from that expert.

    Training leaves room for 1.5 times the average, which makes it 10 times faster than `plain_moe` on a CPU.
    """
    slots = topk_ids.size
    order = jnp.argsort(topk_ids.reshape(-1), stable=True)
    sizes = jnp.bincount(topk_ids.reshape(-1), length=EXPERTS)
    places = (jnp.cumsum(sizes) - sizes)[:, None] + jnp.arange(capacity)
    chosen = order[jnp.minimum(places, slots - 1)]
    factors = jnp.where(jnp.arange(capacity) < sizes[:, None], topk_weights.reshape(-1)[chosen], 0)
    h = swiglu(jnp.einsum("ecd,edf->ecf", x[chosen // TOP_K], gate_up[:EXPERTS])) * factors[..., None]
    routed = jnp.einsum("ecf,efd->ecd", h, down[:EXPERTS])
    shared = swiglu(x @ gate_up[EXPERTS]) @ down[EXPERTS]
    return shared.at[chosen // TOP_K].add(routed)


def plain_moe(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, topk_weights: jax.Array, topk_ids: jax.Array
) -> jax.Array:
    """The plain JAX way: float experts [E, in, out], rows sorted by expert, `jax.lax.ragged_dot`."""
    ids, token = topk_ids.reshape(-1), jnp.arange(topk_ids.size) // topk_ids.shape[-1]
    order = jnp.argsort(ids, stable=True)
    sizes = jnp.bincount(ids, length=gate_up.shape[0]).astype(jnp.int32)
    h = swiglu(jax.lax.ragged_dot(x[token[order]], gate_up, sizes))
    y = jax.lax.ragged_dot(h, down, sizes) * topk_weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[token[order]].add(y)


class Block(nnx.Module):
    """Attention, then experts."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = Attention(rngs)
        self.moe = FloatMoe(rngs)
        self.norm1 = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.norm2 = nnx.RMSNorm(HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, length, HIDDEN] of the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.moe(self.norm2(x))


class LanguageModel(nnx.Module):
    """Bytes [batch, length] to logits [batch, length, 256] of the next byte."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Param(0.5 * jax.random.normal(rngs.params(), (BYTES_SEEN, 256, HIDDEN)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, 256, use_bias=False, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns the logits."""
        length = ids.shape[1]
        x = sum(table[jnp.pad(ids, ((0, 0), (back, 0)))[:, :length]] for back, table in enumerate(self.embedding[...]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --- training ---------------------------------------------------------------------------------------------------------


def train(learnt: np.ndarray, steps: int, seed: int) -> LanguageModel:
    model = LanguageModel(nnx.Rngs(seed))
    peak, warmup = 4e-3, min(30, steps // 2)
    rate = optax.schedules.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, 0.02 * peak)
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)

    @nnx.jit
    def step(model: LanguageModel, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
        def loss(model: LanguageModel) -> tuple[jax.Array, jax.Array]:
            bits = cross_entropy(model, windows).mean()
            balance = sum(block.moe.balance[...] for block in model.blocks)
            return bits + 0.01 * balance, bits

        gradients, bits = nnx.grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return bits

    rng = np.random.default_rng(seed)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[bits]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, bits="")
        for i in range(steps):
            starts = rng.integers(0, len(learnt) - CONTEXT, BATCH)
            windows = np.stack([learnt[s : s + CONTEXT + 1] for s in starts]).astype(np.int32)
            bits = step(model, optimizer, windows)
            shown = {"bits": f"{float(bits):.2f} bits per byte"} if i % 10 == 9 or i == steps - 1 else {}
            progress.update(task, advance=1, **shown)
    model.set_attributes(training=False)
    return model


def cross_entropy(model: nnx.Module, windows: jax.Array) -> jax.Array:
    """Bits [batch, CONTEXT] that each next byte of windows [batch, CONTEXT + 1] costs."""
    nats = optax.softmax_cross_entropy_with_integer_labels(model(windows[:, :-1]), windows[:, 1:])
    return nats / np.log(2)


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def to_mxfp4(model: LanguageModel) -> LanguageModel:
    """The model with its expert layers in MXFP4, and everything else shared with `model`."""
    model = nnx.merge(*nnx.split(model))
    for block in model.blocks:
        # Blocks of 32 run along the contraction axis, which MoeWeights therefore has last.
        weights = quantize_weights(block.moe.gate_up[...].swapaxes(1, 2), block.moe.down[...].swapaxes(1, 2))
        block.moe = Mxfp4Moe.from_weights(
            weights, block.moe.router.kernel[...], num_experts_per_tok=TOP_K, num_shared_experts=1
        )
    return model


def without_routed_experts(model: LanguageModel) -> LanguageModel:
    """The model with all but the shared expert answering zero."""
    model = nnx.merge(*nnx.split(model))
    for block in model.blocks:
        block.moe.down = nnx.Param(block.moe.down[...].at[:EXPERTS].set(0))
    return model


def bits_per_byte(model: LanguageModel, windows: np.ndarray, batch: int = 32) -> float:
    graph, state = nnx.split(model)
    # The last batch is filled up with windows that are then left out, so that one compilation serves.
    padded = np.concatenate([windows, windows[:1].repeat(-len(windows) % batch, axis=0)])
    answers = [np.asarray(_counted_bits(graph, state, padded[i : i + batch])) for i in range(0, len(padded), batch)]
    return float(np.concatenate(answers)[: len(windows)].mean(dtype=np.float64))


@functools.partial(jax.jit, static_argnums=0)
def _counted_bits(graph: nnx.GraphDef, state: nnx.State, windows: jax.Array) -> jax.Array:
    return cross_entropy(nnx.merge(graph, state), windows)[:, -COUNTED:]


def sample(model: LanguageModel, prompt: np.ndarray, count: int, seed: int, temperature: float = 0.6) -> bytes:
    """Continues a prompt of CONTEXT bytes: `count` steps of a scan inside one jitted function."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state: nnx.State, window: jax.Array, keys: jax.Array) -> jax.Array:
        def step(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = nnx.merge(graph, state)(window[None])[0, -1]
            byte = jax.random.categorical(key, logits / temperature)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(step, window, keys)[1]

    keys = jax.random.split(jax.random.key(seed), count)
    return np.asarray(run(state, jnp.asarray(prompt), keys)).astype(np.uint8).tobytes()


# --- speed ------------------------------------------------------------------------------------------------------------


def why_not(name: str, tokens: int, weights: MoeWeights) -> str | None:
    """Why an implementation cannot compute this model's layers here, or None."""
    problem = MoeProblem(
        tokens, TOP_K + 1, weights.num_experts, weights.hidden_size, weights.intermediate_size, "float32", "float32"
    )
    return IMPLEMENTATIONS[name].why_not(problem, platforms()[0])


def time_layer(layer: Mxfp4Moe, names: list[str], tokens: int, seed: int, seconds: float) -> dict[str, float]:
    """Median microseconds of one call on `tokens` random rows, for the plain JAX way and each implementation, checked to agree."""
    weights = layer.weights
    x = jax.random.normal(jax.random.key(seed), (tokens, HIDDEN))
    routing = append_shared_experts(*topk_routing(layer.router(x), TOP_K), EXPERTS, 1)
    kernels = [dequantize(w, jnp.float32).swapaxes(1, 2).copy() for w in (weights.gate_up, weights.down)]
    calls: dict[str, Callable[[], jax.Array]] = {}
    plain = jax.jit(plain_moe)
    calls["ragged_dot"] = lambda: plain(x, *kernels, *routing)
    for name in names:
        ours = jax.jit(lambda *arrays, name=name: mxfp4_moe(*arrays, implementation=name))
        calls[name] = lambda ours=ours: ours(x, weights, *routing)

    expected = np.asarray(calls["ragged_dot"]())
    for name, call in calls.items():
        error = np.abs(np.asarray(call()) - expected).max() / np.abs(expected).max()
        if not error < 1e-4:
            sys.exit(
                f"tiny_moe_lm: {name} differs from ragged_dot by {error:.1e} of the largest value; expected 1e-4. A bug of ours."
            )

    medians = {}
    for name, call in calls.items():
        times, stop = [], time.perf_counter() + seconds
        while len(times) < 10 or (time.perf_counter() < stop and len(times) < 300):
            start = time.perf_counter()
            call().block_until_ready()
            times.append(time.perf_counter() - start)
        medians[name] = 1e6 * statistics.median(times)
    return medians


# --- all of it --------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help=f"{SHORT_STEPS} training steps; all demands stay")
    parser.add_argument("--steps", type=int, help=f"training steps (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--smoke", action="store_true", help="2 steps and little text: does it run? (it does not learn, and says so)"
    )
    options = parser.parse_args()
    steps = options.steps or (2 if options.smoke else SHORT_STEPS if options.short else STEPS)
    begin = time.perf_counter()

    text = read_text()
    learnt, windows = split_text(text)
    if options.smoke:
        windows = windows[:32]
    console.print(
        f"{len(text):,} bytes of Python {platform.python_version()}'s own documentation: {len(learnt):,} to learn, "
        f"{len(windows) * COUNTED:,} of the rest to predict"
    )
    model = train(learnt, steps, options.seed)
    train_seconds = time.perf_counter() - begin

    quantized = to_mxfp4(model)
    weights = quantized.blocks[0].moe.weights
    reasons = {name: why_not(name, BATCH * CONTEXT, weights) for name in PREFERENCE}
    names = [name for name, reason in reasons.items() if reason is None]

    with console.status("evaluating"):
        bits = {
            "float": bits_per_byte(model, windows),
            "without_experts": bits_per_byte(without_routed_experts(model), windows),
        }
        for name in names:
            for key, quant in (("weights", None), ("activations", "mxfp4")):
                quantized.set_attributes(implementation=name, activation_quant=quant)
                bits[f"{key}_{name}"] = bits_per_byte(quantized, windows)
    cost = {key: value / bits["float"] - 1 for key, value in bits.items()}

    through_bridge = "torch" in names
    with console.status("writing"):
        prompt = windows[len(windows) // 2][:CONTEXT]
        quantized.set_attributes(implementation="torch" if through_bridge else None, activation_quant=None)
        written = sample(quantized, prompt, 8 if options.smoke else 200, options.seed)
    with console.status("timing"):
        layer, seconds = quantized.blocks[0].moe, 0.0 if options.smoke else 0.4
        times = {tokens: time_layer(layer, names, tokens, options.seed, seconds) for tokens in (1, BATCH * CONTEXT)}

    state = bridge_state() if through_bridge else {"calls": 0, "why_not": f"torch {reasons['torch']}"}
    compiled = state.get("calls", 0) > 0
    if compiled:
        bridge = f"compiled XLA custom call, {state['calls']:,} calls into torch"
    else:
        bridge = (
            f"jax.pure_callback ({state['why_not'] or 'asked for'})" if through_bridge else f"none: {state['why_not']}"
        )

    floats = [kernel for block in model.blocks for kernel in (block.moe.gate_up[...], block.moe.down[...])]
    nbytes = {
        "float32": sum(kernel.nbytes for kernel in floats),
        "bfloat16": sum(kernel.astype(jnp.bfloat16).nbytes for kernel in floats),
        "mxfp4": sum(array.nbytes for block in quantized.blocks for array in jax.tree.leaves(block.moe.weights)),
    }

    start = prompt.astype(np.uint8).tobytes().decode(errors="replace")
    console.rule(f"the MXFP4 model goes on writing ({'torch, through the bridge' if through_bridge else 'xla'})")
    console.print(f"[dim]{escape(start)}[/dim]{escape(written.decode(errors='replace'))}", highlight=False)
    console.rule()
    print_table(bits, cost, nbytes, times, reasons, bridge)

    seconds = time.perf_counter() - begin
    results: dict[str, float | int | str] = {
        "steps": steps,
        "train_seconds": round(train_seconds, 1),
        "seconds": round(seconds, 1),
    }
    results |= {f"bits_per_byte_{key}": round(value, 4) for key, value in bits.items()}
    results |= {f"cost_percent_{key}": round(100 * value, 3) for key, value in cost.items() if key != "float"}
    results |= {f"expert_bytes_{key}": value for key, value in nbytes.items()}
    results |= {f"us_{name}_{tokens}_tokens": round(us, 1) for tokens, row in times.items() for name, us in row.items()}
    results |= {
        "bridge": ("compiled" if compiled else "callback") if through_bridge else "none",
        "bridge_calls": state.get("calls", 0),
    }
    for name, value in results.items():
        print(f"RESULT {name} {value}")

    failures = [
        f"{what}: {value:.4f} found, expected {relation} {bound}"
        for what, value, relation, bound, met in demands(bits, cost, names)
        if not met
    ]
    if not compiled:
        failures.append(f"the compiled bridge did not run: {bridge}")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def demands(bits: dict[str, float], cost: dict[str, float], names: list[str]):
    """(what, value, relation, bound, whether it is met) of each thing that the model has to do."""
    yield "bits per byte", bits["float"], "at most", MAX_BITS_PER_BYTE, bits["float"] <= MAX_BITS_PER_BYTE
    for name in names:
        for key, bound in (("weights", MAX_COST_WEIGHTS), ("activations", MAX_COST_ACTIVATIONS)):
            value = cost[f"{key}_{name}"]
            yield f"cost of MXFP4 {key} ({name})", value, "at most", bound, value <= bound
    value, bound = cost["without_experts"], MIN_COST_WITHOUT_EXPERTS
    yield "cost of zeroing the routed experts", value, "at least", bound, value >= bound


def print_table(bits, cost, nbytes, times, reasons, bridge) -> None:
    table = Table(title="MXFP4 experts in a small language model", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    table.add_row("bits per byte, held-out text: original", f"{bits['float']:.4f}", f"at most {MAX_BITS_PER_BYTE}")
    names = [name for name, reason in reasons.items() if reason is None]
    for key, words, bound in (
        ("weights", "MXFP4 weights", MAX_COST_WEIGHTS),
        ("activations", "MXFP4 weights and activations", MAX_COST_ACTIVATIONS),
    ):
        for name in names:
            value = bits[f"{key}_{name}"]
            table.add_row(f"  {words} ({name})", f"{value:.4f}", f"{cost[f'{key}_{name}']:+.2%}, at most {bound:+.0%}")
    table.add_row(
        "  original, routed experts zeroed",
        f"{bits['without_experts']:.4f}",
        f"{cost['without_experts']:+.1%}, at least {MIN_COST_WITHOUT_EXPERTS:+.0%}",
        end_section=True,
    )
    for key, words in (("float32", "expert bytes: float32"), ("bfloat16", "  bfloat16"), ("mxfp4", "  MXFP4")):
        table.add_row(
            words,
            f"{nbytes[key]:,}",
            f"{nbytes['mxfp4'] / nbytes[key]:.3f} of it remain" if key != "mxfp4" else "",
            end_section=key == "mxfp4",
        )
    table.add_row("bridge to torch", "", bridge)
    console.print(table)

    table = Table(title="Microseconds of one layer, median", title_justify="left")
    table.add_column("")
    for tokens in times:
        table.add_column(f"{tokens:,} token{'s' * (tokens > 1)}", justify="right")
    table.add_row(
        "plain JAX: dequantized float32, ragged_dot", *[f"{row['ragged_dot']:,.0f}" for row in times.values()]
    )
    for name, reason in reasons.items():
        cells = [reason] if reason else [f"{row[name]:,.0f}" for row in times.values()]
        table.add_row(f"mxfp4_moe ({name})", *cells)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
