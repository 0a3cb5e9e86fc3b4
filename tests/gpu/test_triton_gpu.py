"""`triton` on a GPU: its PTX, a thousand random problems, sizes that are a danger, buffers full of garbage, transformations, memory.

Kernels are compiled beforehand on all cores, which takes most of the time of the first run; slow cases have the mark `slow`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl
from gpu_problems import ROUTINGS, Job, compile_all, draw, evaluate, layer, random_problem, why_not, wrong

from jax_mxfp4_moe import moe, mxfp4_moe, prepare, testing
from jax_mxfp4_moe.device import arch, platforms
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.base import Config, Operands
from jax_mxfp4_moe.implementations.triton import layout
from jax_mxfp4_moe.implementations.triton import pipeline as launches
from jax_mxfp4_moe.implementations.triton.decode import shuffled_to_e4m3, spread, to_e4m3
from jax_mxfp4_moe.mxfp4 import E2M1_VALUES, PACKED
from jax_mxfp4_moe.problem import MoeProblem

FAMILIES, DRAWS = 50, 20
TOKEN_COUNTS = range(1, 131)
SMALL = MoeProblem(48, 4, 16, 256, 160, has_gate_up_bias=True, has_down_bias=True)
MANY_EXPERTS = MoeProblem(64, 8, 4096, 64, 32)
MANY_TOKENS = MoeProblem(65536, 2, 8, 64, 32)
# problem, prepared, changes of the config: every way to multiply
WAYS = {
    "float8": Job(SMALL),
    "bfloat16": Job(SMALL, False, (("product", "bits"),)),
    "shuffled": Job(SMALL, True),
    "one column tile a program": Job(SMALL, True, (("span", 1),)),
    "expanded": Job(SMALL, True, (("expand", 1),)),
    "specialized": Job(SMALL, True, (("specialize", 64),)),
    "specialized, mxfp4": Job(MoeProblem(48, 4, 16, 256, 160, activation_quant="mxfp4"), True, (("specialize", 128),)),
    "wide": Job(SMALL, True, (("product", "bits"),)),
    "float32": Job(MoeProblem(48, 4, 16, 256, 160, "float32", "float32")),
    "mxfp4": Job(MoeProblem(48, 4, 16, 256, 160, activation_quant="mxfp4"), True),
    "fp8": Job(MoeProblem(48, 4, 16, 256, 160, activation_quant="fp8", has_activation_scale=True), True),
}
RECORDED = [MoeProblem(24, 4, 16, 256, 160, activation_quant=quant) for quant in (None, "mxfp4")]
DIFFERENTIATED = [
    MoeProblem(24, 3, 8, 128, 96, dtype, dtype, has_gate_up_bias=True, has_down_bias=True)
    for dtype in ("bfloat16", "float32")
]


def family(number: int) -> MoeProblem:
    return random_problem(number + 1)


def changes_of(number: int) -> tuple:
    """What differs from the default config of a family: half of the prepared ones that can go through the kernel for Hopper."""
    config = dict(IMPLEMENTATIONS["triton"].configs(family(number), platforms()[0])[0].items)
    if number % 4 != 3 or config["product"] != "e4m3":
        return ()
    return (("specialize", 64 if number % 8 == 3 else 128),)


def with_tokens(tokens: int) -> MoeProblem:
    return MoeProblem(tokens, 4, 16, 256, 160)


def has_float8() -> bool:
    """Whether `prepare` has a layout of its own here."""
    return arch(platforms()[0]) == "sm_90"


@pytest.fixture(scope="module")
def compiled():
    """Compiles what the tests below run, all at once; what could not be compiled, in words."""
    if (reason := why_not(SMALL)) is not None:
        pytest.skip(reason)
    both = [False, True] if has_float8() else [False]
    problems = [SMALL, with_tokens(8), *RECORDED, *DIFFERENTIATED, MANY_EXPERTS, MANY_TOKENS]
    jobs = [Job(problem, prepared) for problem in problems for prepared in both]
    jobs += [Job(family(number), has_float8() and bool(number % 2), changes_of(number)) for number in range(FAMILIES)]
    jobs += [Job(with_tokens(tokens), has_float8()) for tokens in TOKEN_COUNTS]
    jobs += [job for job in WAYS.values() if job.prepared in both and why_not(job.problem) is None]
    return compile_all(jobs)


def test_everything_compiles(compiled):
    assert not compiled, "\n".join(compiled)


@triton.jit
def _decode(codes, d, out, MODE: tl.constexpr, PTX: tl.constexpr):
    """Rows of 64 bytes, 16 a program, with an exponent for each of four blocks; out: both halves of a row behind each other."""
    r = tl.program_id(0) * 16 + tl.arange(0, 16)
    i = tl.arange(0, 64)
    c = tl.load(codes + r[:, None] * 64 + i[None, :])
    f = tl.load(d + r[:, None] * 4 + tl.arange(0, 4)[None, :])
    if MODE == 3:
        a, b = shuffled_to_e4m3(c, f, 16, 4, PTX)
    else:
        a, b = to_e4m3(c, spread((f * 8).to(tl.int8), 16, 4), 16, 64, PTX)
    tl.store(out + r[:, None] * 128 + i[None, :], a.to(tl.uint8, bitcast=True))
    tl.store(out + 64 + r[:, None] * 128 + i[None, :], b.to(tl.uint8, bitcast=True))


@pytest.mark.parametrize(("mode", "exponents"), [(2, 12), (3, 13)], ids=["packed", "shuffled"])
def test_inline_ptx_equals_portable_arithmetic(mode, exponents):
    """All 65536 values of either half of a word, with every exponent, bit by bit; both equal code * 2 ** (d - 5) in E4M3.

    Four bytes decode to two words, of which each depends on one half of the four and on the exponent.
    """
    if not launches.has_ptx() or not has_float8():
        pytest.skip("has no inline PTX for this GPU")
    low = torch.arange(65536, device="cuda")
    high = low * 40503 % 65536  # odd: all values once more, in another order
    words = low | high << 16
    codes = torch.stack([words >> 8 * i & 255 for i in range(4)], dim=-1).byte().view(4096, 64).contiguous()
    nibble = torch.stack([words >> 4 * i & 15 for i in range(8)], dim=-1)
    if mode == 3:  # magnitudes in place, signs of the first four in bit 7 of each byte, of the second four in bit 3
        sign = torch.stack([words >> bit & 1 for bit in (7, 15, 23, 31, 3, 11, 19, 27)], dim=-1)
        nibble = nibble & 7 | sign << 3
    value = torch.tensor(E2M1_VALUES, device="cuda", dtype=torch.float32)[nibble].view(4096, 16, 2, 4)
    # The block of each word of a row.
    block = torch.arange(16, device="cuda") % 4 if mode == 3 else torch.arange(16, device="cuda") // 4
    for k in range(exponents):
        d = ((torch.arange(4096, device="cuda")[:, None] + torch.arange(4, device="cuda") + k) % exponents).int()
        out = [torch.zeros(4096, 2, 16, 4, dtype=torch.uint8, device="cuda") for _ in range(2)]
        for ptx in (False, True):
            _decode[(256,)](codes, d, out[ptx], mode, ptx)
        assert torch.equal(*out)
        exponent = d[:, block].float()
        want = (value * torch.exp2(exponent - 5)[..., None, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        kept = exponent <= 11  # 12 marks a block of zeros
        assert torch.equal(out[1].transpose(1, 2)[kept], want[kept])


@pytest.mark.parametrize("number", range(FAMILIES))
def test_random_problems(compiled, number):
    """1000 problems: 50 random sets of sizes, types and options (`random_problem`), each with 20 random arguments.

    Sizes and options are what kernels are compiled for, so that they vary 50 times, with packed weights for one half and prepared ones for
    the other; x, weights and their scales, routing, router weights and the bridge vary 1000 times. Every element of y is compared with a
    float64 evaluation, which is itself compared with `testing.reference` once for each set.
    """
    problem, prepared = family(number), bool(number % 2)
    config = dict(changes_of(number)) or None
    layers = [layer(problem, bridge=bridge, config=config) for bridge in ("eager", "graph")]
    failures = []
    for i in range(DRAWS):
        routing = ROUTINGS[i % len(ROUTINGS)]
        spread = not prepared and i % 4 == 2 and problem.activation_quant is None and problem.dtype != "float16"
        tensors = draw(problem, 1000 * number + i, routing, spread=spread)
        case, expected = tensors.case(), evaluate(problem, tensors)
        weights = prepare(case.weights, "triton") if prepared else case.weights
        assert weights.layout == (layout.TAG if prepared and has_float8() else PACKED)
        y = layers[i // len(ROUTINGS) % 2](case.x, weights, case.topk_weights, case.topk_ids)
        if (what := wrong(problem, y, expected)) is not None:
            failures.append(f"{i} {routing} spread={spread}: {what}")
        if i == 0:
            tokens = np.unique([0, problem.tokens // 2, problem.tokens - 1])
            error = testing.relative_error(expected.y[tokens], testing.reference(problem, case, tokens))
            assert error <= 1e-9
    assert not failures, f"{problem} {config}\n" + "\n".join(failures)


def test_every_token_count(compiled):
    """1 to 130 tokens: every remainder of every tile, and both sides of each change of the config."""
    problem = with_tokens(TOKEN_COUNTS[-1])
    tensors = draw(problem, 0)
    expected, weights = evaluate(problem, tensors), prepare(tensors.case().weights, "triton")
    failures = {}
    for tokens in TOKEN_COUNTS:
        first = {name: getattr(tensors, name)[:tokens] for name in ("x", "topk_weights", "topk_ids")}
        case = tensors._replace(**first).case()
        y = layer(with_tokens(tokens))(case.x, weights, case.topk_weights, case.topk_ids)
        what = wrong(problem, y, expected._replace(y=expected.y[:tokens]))
        failures |= {} if what is None else {tokens: what}
    assert not failures


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("problem", [MANY_EXPERTS, MANY_TOKENS], ids=["4096 experts", "65536 tokens"])
def test_many(compiled, problem, prepared):
    for routing in ("distinct", "skewed", "skipped"):
        tensors = draw(problem, 1, routing)
        case, expected = tensors.case(), evaluate(problem, tensors)
        weights = prepare(case.weights, "triton") if prepared else case.weights
        y = layer(problem)(case.x, weights, case.topk_weights, case.topk_ids)
        assert wrong(problem, y, expected) is None


def filled(shape, dtype, pattern):
    """A tensor whose memory holds a byte, or random ones if None."""
    dtype = getattr(torch, dtype)
    size = max(16, int(np.prod(shape)) * dtype.itemsize)
    if pattern is None:
        raw = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    else:
        raw = torch.full((size,), pattern, dtype=torch.uint8, device="cuda")
    return raw[: int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)


@pytest.mark.parametrize("way", WAYS)
def test_what_buffers_held_before_never_shows(compiled, way):
    """Workspace and output full of zeros, large numbers, NaN and random bytes: the same bits, in padding and skipped slots too."""
    problem, prepared, changes = WAYS[way]
    if prepared and not has_float8():
        pytest.skip("prepared weights have a layout of their own on sm_90 only")
    if (reason := why_not(problem)) is not None:
        pytest.skip(reason)
    tensors = draw(problem, 2, "skipped")
    case, expected = tensors.case(), evaluate(problem, tensors)
    used = (case.topk_ids >= 0) & (case.topk_ids < problem.experts)
    weights = prepare(case.weights, "triton") if prepared else case.weights
    operands = Operands(case.x, weights, jnp.where(used, case.topk_weights, 0), jnp.where(used, case.topk_ids, -1))
    inputs = [torch.from_dlpack(leaf) for leaf in jax.block_until_ready(jax.tree.leaves(operands))]
    config = IMPLEMENTATIONS["triton"].configs(problem, platforms()[0])[0]
    facts = launches.Facts(problem, Config.of({**dict(config.items), **dict(changes)}), prepared)
    overlap = launches.has_overlap(torch.device("cuda", torch.cuda.current_device()))
    results = []
    for pattern in (0x00, 0x7F, 0xFF, None, None):
        buffers = {name: filled(spec.shape, spec.dtype, pattern) for name, spec in facts.buffers().items()}
        y = filled((problem.tokens, problem.hidden), problem.out_dtype, pattern)
        tensors_of_call = launches.tensors_of(problem, inputs)
        steps = launches.TritonSteps(facts, tensors_of_call, buffers, y, launches.has_ptx(), overlap=overlap)
        moe.pipeline(steps, tensors_of_call)
        results.append(y)
    assert wrong(problem, results[0].double().cpu(), expected) is None
    assert all(torch.equal(results[0].view(torch.uint8), y.view(torch.uint8)) for y in results)


@pytest.mark.parametrize("prepared", [False, True])
def test_masked_tokens_may_hold_anything(compiled, prepared):
    """NaN in x and in the router weights of masked tokens: zeros for them, the same bits for the others."""
    case = draw(SMALL, 3).case()
    weights = prepare(case.weights, "triton") if prepared else case.weights
    mask = jnp.arange(SMALL.tokens) % 3 != 1
    call = jax.jit(functools.partial(mxfp4_moe, implementation="triton", **testing.options(SMALL)))
    clean = call(case.x, weights, case.topk_weights, case.topk_ids, token_mask=mask)
    x, factors = (jnp.where(mask[:, None], a, jnp.nan).astype(a.dtype) for a in (case.x, case.topk_weights))
    dirty = call(x, weights, factors, case.topk_ids, token_mask=mask)
    assert np.asarray(clean).tobytes() == np.asarray(dirty).tobytes()
    assert not np.asarray(dirty)[~np.asarray(mask)].any()
    assert np.asarray(dirty)[np.asarray(mask)].any(axis=1).all()


CAPTURED = """
import functools
import jax, numpy as np
from jax_mxfp4_moe import mxfp4_moe, prepare, testing
from jax_mxfp4_moe.implementations import torch_call
from jax_mxfp4_moe.problem import MoeProblem

for quant in (None, "mxfp4"):
    problem = MoeProblem(24, 4, 16, 256, 160, activation_quant=quant)
    eager, graph = (
        jax.jit(functools.partial(mxfp4_moe, implementation="triton", bridge=bridge, **testing.options(problem)))
        for bridge in ("eager", "graph")
    )
    cases = [testing.random_case(problem, seed) for seed in range(4)]
    for weights in (cases[0].weights, prepare(cases[0].weights, "triton")):
        def run(call):
            return [np.asarray(call(c.x, weights, c.topk_weights, c.topk_ids)).tobytes() for c in cases]
        want = run(eager)
        for _ in range(4):
            assert run(graph) == want, (quant, weights.layout)
        assert len(set(want)) == len(cases)
        c = cases[0]
        jax.block_until_ready([graph(c.x, weights, c.topk_weights, c.topk_ids) for _ in range(3)])
        before = torch_call.counters()["calls"]
        for _ in range(50):  # no y is kept, so that the next one can have its memory: another address is recorded anew
            assert np.asarray(graph(c.x, weights, c.topk_weights, c.topk_ids)).tobytes() == want[0]
        calls = torch_call.counters()["calls"] - before
        assert calls < 50, "nothing was recorded"
        print(quant, weights.layout, "calls into Python in 50 replays:", calls)
"""


def test_recorded_calls_equal_eager_ones(compiled, python):
    """The same bits from a command buffer, recorded, updated for other arguments and replayed."""
    flags = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+CUSTOM_CALL"
    done = python(CAPTURED, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("problem", DIFFERENTIATED, ids=["bfloat16", "float32"])
def test_gradient_is_that_of_xla(compiled, problem, prepared):
    """With respect to x, the router weights and the biases, of a loss that depends on y; ids with skipped slots."""
    case = draw(problem, 4, "skipped").case()

    def loss(implementation, weights, x, topk_weights, biases):
        weights = weights.replace(gate_up_bias=biases[0], down_bias=biases[1])
        y = mxfp4_moe(
            x, weights, topk_weights, case.topk_ids, implementation=implementation, **testing.options(problem)
        )
        return jnp.square(y.astype(jnp.float32)).sum()

    def gradient(implementation, weights):
        biases = (case.weights.gate_up_bias, case.weights.down_bias)
        call = jax.jit(jax.grad(functools.partial(loss, implementation), argnums=(1, 2, 3)))
        return jax.tree.leaves(call(weights, case.x, case.topk_weights, biases))

    got = gradient("triton", prepare(case.weights, "triton") if prepared else case.weights)
    want = gradient("xla", case.weights)
    assert len(got) == len(want) == 4
    for a, b in zip(got, want, strict=True):
        assert np.asarray(b, np.float32).any()
        assert testing.relative_error(a, b) <= 2 * testing.tolerance(problem)


def test_vmap(compiled):
    """A batch that shares the weights is the calls one after the other."""
    problem = with_tokens(24)
    tensors = draw(problem, 5)
    case, expected = tensors.case(), evaluate(problem, tensors)
    weights = prepare(case.weights, "triton")
    x, topk_weights, topk_ids = (a.reshape(3, 8, -1) for a in (case.x, case.topk_weights, case.topk_ids))
    call = functools.partial(mxfp4_moe, implementation="triton", **testing.options(problem))
    y = jax.jit(jax.vmap(call, in_axes=(0, None, 0, 0)))(x, weights, topk_weights, topk_ids)
    assert wrong(problem, np.asarray(y, np.float32).reshape(24, -1), expected) is None


PEAK = """
import jax, numpy as np
from jax_mxfp4_moe import MoeWeights, prepare
from jax_mxfp4_moe.testing import random_packed

rng = np.random.default_rng(0)
weights = jax.block_until_ready(MoeWeights(random_packed(rng, (80, 2048, 4096)), random_packed(rng, (80, 4096, 1024))))
packed = weights.gate_up.nbytes + weights.down.nbytes
device = jax.local_devices()[0]
before = device.memory_stats()["peak_bytes_in_use"]
prepared = jax.block_until_ready(prepare(weights, "triton"))
peak = device.memory_stats()["peak_bytes_in_use"]
print(f"{prepared.layout}: packed {packed / 1e6:.0f} MB, peak before {before / packed:.2f} and in prepare {peak / packed:.2f} times that")
assert before < 1.8 * packed, "the measurement starts too high"
assert peak <= 2.5 * packed
"""


def test_memory_of_prepare(python):
    """The packed stacks, the prepared ones, and what reordering takes on the way: no more than 2.5 times the packed stacks."""
    done = python(PEAK)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)


# (tokens, top_k, experts, hidden, intermediate), activation_quant, shared experts
CASES = {
    "odd": ((129, 4, 8, 416, 96), None, 0),
    "many_tokens": ((16384, 9, 33, 7168, 2048), None, 1),
    "many_tokens_quantized": ((16384, 9, 33, 7168, 2048), "mxfp4", 1),
    "case_12b_weights_beyond_32_bits": ((64, 8, 512, 4096, 1024), None, 0),
    "case_12a_rows_beyond_32_bits": ((40000, 8, 16, 1024, 4096), None, 0),
}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "odd" else pytest.mark.slow) for n in CASES])
def test_large_and_odd(name, prepared):
    """Tokens at the start, in the middle and at the end equal the float64 reference; nothing is left unwritten."""
    sizes, quant, shared = CASES[name]
    problem = MoeProblem(*sizes, activation_quant=quant)
    if (reason := why_not(problem)) is not None:
        pytest.skip(reason)
    case = testing.random_case(problem, shared_experts=shared)
    weights = prepare(case.weights, "triton") if prepared else case.weights
    call = jax.jit(functools.partial(mxfp4_moe, implementation="triton", **testing.options(problem)))
    y = np.asarray(call(case.x, weights, case.topk_weights, case.topk_ids), np.float32)
    tokens = np.array([0, problem.tokens // 2, problem.tokens - 1])
    assert testing.relative_error(y[tokens], testing.reference(problem, case, tokens)) <= testing.tolerance(problem)
    assert np.isfinite(y).all()
