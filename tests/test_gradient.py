"""The derivative of the layer: against finite differences of the oracle, and against automatic differentiation of a dense layer.

The dense layer below shares nothing with the package: it expands every expert with the oracle and is differentiated by JAX in
float64, with straight-through estimators where the layer rounds.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import compiled_fast, far_from_ties, random_case, random_ids

from jax_mxfp4_moe import MoeWeights, mxfp4_moe
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.triton import layout
from jax_mxfp4_moe.implementations.triton.implementation import TritonImplementation
from jax_mxfp4_moe.testing import relative_error

# By the type of the cotangent: sums are float32 for all of them, and only the last rounding is to a narrower type.
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-3, "float16": 5e-4}
TRAINABLE = ("x", "topk_weights", "gate_up_bias", "down_bias")
ACTIVATIONS = {
    "silu": {"activation": "silu"},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "swiglu_oai": {"activation": "swiglu_oai"},
    "silu_clamped": {"activation": "silu_clamped", "activation_limit": 4.0},
    "silu_post_clamped": {"activation": "silu_post_clamped", "activation_limit": 4.0},
}
SMALL = {"tokens": 6, "top_k": 3, "hidden": 32, "intermediate": 64}


# --- the gradients of the package ------------------------------------------------------------------------------------


def cotangent(case, out_dtype=None):
    """Of y: random values that bfloat16 holds, so that the type of y does not round them."""
    dy = np.random.default_rng(7).normal(size=case.x.shape)
    return dy.astype(jnp.bfloat16).astype(jnp.dtype(out_dtype or case.x.dtype))


def gradients(case, *, expert_map=None, token_mask=None, activation_scale=None, **options):
    """By `jax.grad`, of what can be trained, by name; None for the biases that are not there."""
    # Options that would change the program are always there, so that calls of equal shapes share a compilation.
    experts = case.gate_up[0].shape[0]
    traced = {
        "expert_map": np.arange(12) if expert_map is None else expert_map,
        "token_mask": np.ones(case.x.shape[:-1], bool) if token_mask is None else token_mask,
        "activation_scale": activation_scale,
    }
    if expert_map is None:
        traced["expert_map"][experts:] = -1
    options = {"activation": "silu", "implementation": "xla", "deterministic": True, **options}
    if options["implementation"] == "xla":
        options["tile_rows"] = 8  # so that a tile of a small case runs into the rows of other experts
    weights, dy = case.weights, cotangent(case, options.get("preferred_element_type"))
    trained = (case.x, case.topk_weights, weights.gate_up_bias, weights.down_bias)
    arrays = jax.tree.map(jnp.asarray, (trained, weights, case.topk_ids, dy, traced))
    return dict(zip(TRAINABLE, _gradients(*arrays, tuple(sorted(options.items()))), strict=True))


@functools.partial(compiled_fast, static_argnums=5)
def _gradients(trained, weights, topk_ids, dy, traced, options):
    options = dict(options)
    if "tile_rows" in options:
        options["config"] = {"tile_rows": options.pop("tile_rows")}

    def loss(trained):
        x, topk_weights, *biases = trained
        y = mxfp4_moe(x, with_biases(weights, *biases), topk_weights, topk_ids, **traced, **options)
        return (y.astype(jnp.float32) * dy.astype(jnp.float32)).sum()

    return jax.grad(loss)(trained)


def with_biases(weights, gate_up_bias, down_bias):
    return MoeWeights(weights.gate_up, weights.down, gate_up_bias, down_bias)


# --- the dense layer -------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def straight_through(rounding, a):
    # As float32, which holds all that a product may read: callbacks run where 64-bit types are not enabled.
    a = a.astype(jnp.float32)
    return jax.pure_callback(rounding, jax.ShapeDtypeStruct(a.shape, a.dtype), a).astype(jnp.float64)


@straight_through.defjvp
def _identity(rounding, primals, tangents):
    return straight_through(rounding, *primals), tangents[0]


@functools.cache  # equal readings are one function, so that compilations are shared
def read_as(activation_quant, scale, dtype, scale_rule="even", rounding="nearest_even"):
    """What a product reads of an array: rounded to the type of x, then quantized."""

    def rounded(a):
        a = oracle.round_to(a, dtype)
        if activation_quant == "mxfp4":
            a = oracle.quantize_dequantize(a, scale_rule, rounding)
        if activation_quant == "fp8":
            a = oracle.dequantize_fp8(*oracle.quantize_fp8(a, scale))
        return a.astype(np.float32)

    return rounded


def dense_activation(gate, up, activation="silu", activation_alpha=1.702, activation_limit=7.0):
    limit = activation_limit
    if activation in ("silu", "gelu", "gelu_tanh"):
        gated = {
            "silu": lambda g: g / (1 + jnp.exp(-g)),
            "gelu": lambda g: g * (1 + jax.lax.erf(g / np.sqrt(2))) / 2,
            "gelu_tanh": lambda g: g * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) / 2,
        }
        return gated[activation](gate) * up
    up = jnp.minimum(jnp.maximum(up, -limit), limit)
    if activation == "swiglu_oai":
        gate = jnp.minimum(gate, limit)
        return gate / (1 + jnp.exp(-activation_alpha * gate)) * (up + 1)
    if activation == "silu_clamped":
        gate = jnp.minimum(gate, limit)
        return gate / (1 + jnp.exp(-gate)) * up
    return jnp.minimum(gate / (1 + jnp.exp(-gate)), limit) * up


def dense_gradients(
    case,
    *,
    activation_quant=None,
    activation_scale=None,
    expert_map=None,
    token_mask=None,
    apply_router_weight_on_input=False,
    preferred_element_type=None,
    scale_rule="even",
    rounding="nearest_even",
    **activation,
):
    """As `gradients`, in float64, from every expert expanded and applied to every token."""
    gate_up, down = oracle.dequantize(*case.gate_up), oracle.dequantize(*case.down)
    ids = np.asarray(case.topk_ids, np.int64)
    if expert_map is not None:
        inside = (ids >= 0) & (ids < len(expert_map))
        ids = np.where(inside, np.asarray(expert_map)[np.where(inside, ids, 0)], -1)
    if token_mask is not None:
        ids = np.where(np.asarray(token_mask)[..., None], ids, -1)
    x = np.where((ids >= 0).any(-1, keepdims=True), np.asarray(case.x, np.float64), 0)  # what nobody reads may be NaN
    chosen = (ids[..., None] == np.arange(len(gate_up))).astype(np.float64)
    scales = (None, None) if activation_scale is None else map(float, activation_scale)
    readings = tuple(read_as(activation_quant, s, str(case.x.dtype), scale_rule, rounding) for s in scales)
    trained = {n: getattr(case, n) for n in TRAINABLE if getattr(case, n) is not None} | {"x": x}
    dy = cotangent(case, preferred_element_type)
    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (trained, chosen, gate_up, down, dy))
        options = (readings, apply_router_weight_on_input, tuple(sorted(activation.items())))
        return dict.fromkeys(TRAINABLE) | jax.tree.map(np.asarray, _dense_gradients(*arrays, *options))


@functools.partial(compiled_fast, static_argnums=(5, 6, 7))
@jax.grad
def _dense_gradients(trained, chosen, gate_up, down, dy, readings, apply_router_weight_on_input, activation):
    x, topk_weights, gate_up_bias, down_bias = (trained.get(name) for name in TRAINABLE)
    weight = (topk_weights * chosen.sum(axis=-1))[..., None]
    h = jnp.einsum("...ke,...d,efd->...kf", chosen, straight_through(readings[0], x), gate_up)
    if apply_router_weight_on_input:
        h = h * weight
    if gate_up_bias is not None:
        h = h + chosen @ gate_up_bias
    h = straight_through(readings[1], dense_activation(*jnp.split(h, 2, axis=-1), **dict(activation)))
    y = jnp.einsum("...ke,...kf,edf->...kd", chosen, h, down)
    if down_bias is not None:
        y = y + chosen @ down_bias
    y = y if apply_router_weight_on_input else y * weight
    return (y.sum(axis=-2) * dy).sum()


def check(case, name="xla", **options):
    """Compares all gradients with the dense layer's; returns them."""
    why_not = case.why_not(name, **options)
    if why_not is not None:
        pytest.skip(f"{name} {why_not}")
    found, expected = gradients(case, implementation=name, **options), dense_gradients(case, **options)
    for what in TRAINABLE:
        given = getattr(case, what)
        assert (found[what] is None) == (given is None), what
        if given is not None:
            assert found[what].dtype == given.dtype, what
            assert found[what].shape == given.shape, what
            error = relative_error(np.asarray(found[what], np.float64), expected[what])
            assert error <= TOLERANCES[str(given.dtype)], what
    return found


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_finite_differences(activation):
    """Along a random direction in each of x, router weights and biases; the differences are the float64 oracle's."""
    options = ACTIVATIONS[activation]
    case = random_case(**SMALL, biases=True)
    found, dy, rng = gradients(case, **options), np.asarray(cotangent(case), np.float64), np.random.default_rng(1)
    for what in TRAINABLE:
        start = np.asarray(getattr(case, what), np.float64)
        # y is linear in the router weights, so that their step may be large; others' differences have errors of step ** 2.
        step = 0.5 if what == "topk_weights" else 1e-4
        direction = rng.normal(size=start.shape)

        def loss(steps, what=what, start=start, direction=direction):
            moved = case.replace(**{what: start + steps * direction})
            x_dtype = "float64"  # nothing is rounded on the way
            weights = oracle.dequantize(*moved.gate_up), oracle.dequantize(*moved.down)
            biases = {"gate_up_bias": moved.gate_up_bias, "down_bias": moved.down_bias}
            y = oracle.moe(moved.x, *weights, moved.topk_weights, moved.topk_ids, **biases, x_dtype=x_dtype, **options)
            return (y * dy).sum()

        difference = (loss(step) - loss(-step)) / (2 * step)
        derivative = (np.asarray(found[what], np.float64) * direction).sum()
        size = np.linalg.norm(found[what]) * np.linalg.norm(direction)  # a derivative along a direction may cancel
        assert abs(difference - derivative) <= 2e-6 * size, what


@pytest.mark.parametrize("name", ["xla", "torch", "triton"])
@pytest.mark.parametrize(("dtype", "activation_quant"), [("float32", None), ("bfloat16", "mxfp4")])
def test_every_implementation(name, dtype, activation_quant):
    check(random_case(**SMALL, dtype=dtype, biases=True), name, activation_quant=activation_quant)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_clamps(activation):
    """Gates and ups inside, beyond and exactly at the limits, where the derivative is that of jnp.minimum and jnp.clip."""
    options = ACTIVATIONS[activation]
    case = random_case(**SMALL, biases=True)
    limit = options.get("activation_limit", 7.0)
    x, bias = 3 * case.x, 3 * case.gate_up_bias
    x[0] = 0  # so that what a gate is, is its bias
    bias[:, :4] = bias[:, -8:-4] = [limit, -limit, limit + 1, limit - 1]
    case = case.replace(x=x, gate_up_bias=bias)
    check(case, **options)


def test_straight_through_mxfp4():
    """Activations are rounded on the way forward, and the derivative passes as if they were not."""
    options = {"activation_quant": "mxfp4", "scale_rule": "rceil", "rounding": "half_away"}

    def make(seed):
        return random_case(seed=seed, tokens=3, top_k=2, hidden=32, intermediate=32, biases=True)

    check(far_from_ties(make, **options), **options)


@pytest.mark.parametrize("scales", [None, (0.01, 0.05)])
def test_straight_through_fp8(scales):
    """One scale a row, and static scales, which are constants."""
    case = random_case(**SMALL, biases=True)
    options = {} if scales is None else {"activation_scale": np.asarray(scales, np.float32)}
    check(case, activation_quant="fp8", **options)


def test_types():
    """Each cotangent has the type of what it belongs to, whatever type y has."""
    case = random_case(**SMALL, dtype="float16", biases=True)
    case.gate_up_bias = case.gate_up_bias.astype(jnp.bfloat16)
    case.down_bias = case.down_bias.astype(jnp.float16)
    check(case, preferred_element_type="float32")


SKIPS = np.array([[-1, -1, -1], [5, 0, 1], [-(2**31), 2**31 - 1, 2], [3, -2, 3], [4, 4, 4], [1, 0, 2]], np.int32)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("ids", ["distinct", "skipped_and_repeated", "one_expert", "nothing"])
def test_ids(ids, before):
    case = random_case(**SMALL, biases=True)
    ids = {
        "distinct": case.topk_ids,
        "skipped_and_repeated": SKIPS,
        "one_expert": np.full_like(SKIPS, 3),
        "nothing": np.full_like(SKIPS, -1),
    }[ids]
    found = check(case.replace(topk_ids=ids), apply_router_weight_on_input=before)
    assert (np.asarray(found["topk_weights"])[(ids < 0) | (ids >= 5)] == 0).all()


@pytest.mark.parametrize("before", [False, True])
def test_what_is_masked_neither_gets_nor_gives(before):
    """NaN and infinity in masked rows, and NaN in the weights of skipped slots, reach no derivative; theirs are 0."""
    case = random_case(**SMALL, biases=True)
    mask = np.array([True, False, True, True, False, True])
    x, topk_weights, ids = case.x.copy(), case.topk_weights.copy(), case.topk_ids.copy()
    x[1], x[4], topk_weights[2, 1], ids[2, 1] = np.nan, np.inf, np.nan, -1
    case = case.replace(x=x, topk_weights=topk_weights, topk_ids=ids)
    options = {"token_mask": mask, "apply_router_weight_on_input": before}
    found = gradients(case, **options)
    clean = case.replace(topk_weights=np.nan_to_num(topk_weights))
    expected = dense_gradients(clean, **options)
    for what in TRAINABLE:
        assert relative_error(found[what], expected[what]) <= 1e-5, what
    assert (np.asarray(found["x"])[~mask] == 0).all()
    assert (np.asarray(found["topk_weights"])[~mask] == 0).all()
    assert found["topk_weights"][2, 1] == 0


def test_expert_map():
    expert_map = np.full(12, -1, np.int32)
    expert_map[[7, 2, 9, 0, 11]] = np.arange(5)
    case = random_case(**SMALL, biases=True)
    case = case.replace(topk_ids=random_ids(np.random.default_rng(1), case.topk_ids.shape, 12))
    check(case, expert_map=expert_map)


SHAPES = {
    "odd_blocks_behind_leading_axes": ({"tokens": (2, 3), "hidden": 96, "intermediate": 160}, "gate_up_bias"),
    "one_token": ({"tokens": (), "top_k": 1}, None),
    "more_than_a_tile": ({"tokens": 150, "experts": 1, "top_k": 1, "hidden": 32, "intermediate": 32}, "down_bias"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape):
    """Each with another one of the biases alone."""
    sizes, bias = SHAPES[shape]
    case = random_case(**sizes, biases=True)
    check(case.replace(**{other: None for other in ("gate_up_bias", "down_bias") if other != bias}))


def test_no_tokens_and_no_experts():
    for case in (random_case(tokens=0), random_case(tokens=4, biases=True)):
        empty = case.replace(
            gate_up=tuple(part[:0] for part in case.gate_up), down=tuple(part[:0] for part in case.down)
        )
        if case.gate_up_bias is not None:
            empty = empty.replace(gate_up_bias=case.gate_up_bias[:0], down_bias=case.down_bias[:0])
        for some in (case, empty) if case.x.size == 0 else (empty,):
            found = gradients(some)
            assert found["x"].shape == some.x.shape
            assert all((np.asarray(g) == 0).all() for g in found.values() if g is not None)


def test_with_x64():
    case = random_case(**SMALL, biases=True)
    expected = gradients(case)
    with jax.enable_x64(True):
        found = gradients(case)
    for what in TRAINABLE:
        assert found[what].dtype == jnp.float32
        assert relative_error(found[what], expected[what]) <= 1e-6, what


def test_repeated_calls_are_bit_equal():
    case = random_case(**SMALL, biases=True)
    first, second = (gradients(case) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


# --- weights ---------------------------------------------------------------------------------------------------------


class UnpreparedTriton(TritonImplementation):
    """The forward pass of weights in triton's layout on a machine without a GPU."""

    def why_not(self, problem, platform):
        return None

    def run(self, operands, problem, config, **options):
        weights = self.unprepare(operands.weights)
        xla = IMPLEMENTATIONS["xla"]
        config = xla.configs(problem, options["platform"])[0]
        return xla.run(operands._replace(weights=weights), problem, config, **options)


def test_prepared_weights(monkeypatch):
    """The backward pass reads another implementation's layout: it takes it apart inside the traced program."""
    monkeypatch.setitem(IMPLEMENTATIONS, "triton", UnpreparedTriton())
    case = random_case(**SMALL, biases=True)
    weights = case.weights
    shuffled = MoeWeights(
        *map(layout.shuffle, (weights.gate_up, weights.down)), weights.gate_up_bias, weights.down_bias
    )
    assert shuffled.layout == "triton:e4m3"

    def loss(x, biases):
        shuffled_too = MoeWeights(shuffled.gate_up, shuffled.down, *biases)
        return (mxfp4_moe(x, shuffled_too, case.topk_weights, case.topk_ids) * cotangent(case)).sum()

    biases = (weights.gate_up_bias, weights.down_bias)
    found = compiled_fast(jax.grad(loss, (0, 1)))(jnp.asarray(case.x), biases)
    expected = gradients(case)
    for what, part in {"x": found[0], "gate_up_bias": found[1][0], "down_bias": found[1][1]}.items():
        assert relative_error(part, expected[what]) <= 1e-6, what


def test_gradients_of_the_weights():
    """Bytes have no derivative: float0 if that is allowed, JAX's own error if not; biases have theirs."""
    case = random_case(**SMALL, biases=True)

    def loss(weights):
        return (mxfp4_moe(case.x, weights, case.topk_weights, case.topk_ids) * cotangent(case)).sum()

    with pytest.raises(TypeError, match=r"uint8.*allow_int"):
        jax.grad(loss)(case.weights)
    found, expected = compiled_fast(jax.grad(loss, allow_int=True))(case.weights), gradients(case)
    for part in (found.gate_up.codes, found.gate_up.scales, found.down.codes, found.down.scales):
        assert part.dtype == jax.dtypes.float0
    assert relative_error(found.gate_up_bias, expected["gate_up_bias"]) <= 1e-6
    assert relative_error(found.down_bias, expected["down_bias"]) <= 1e-6


def test_flax_trains_router_and_biases_and_nothing_else():
    """nnx.grad and an optax optimizer by default: the loss falls, and the bytes stay."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed: pip install 'jax_mxfp4_moe[flax]'")
    optax = pytest.importorskip("optax", reason="optax is not installed: pip install 'jax_mxfp4_moe[examples]'")
    from jax_mxfp4_moe.layers import Mxfp4Moe, Quantized

    layer = Mxfp4Moe(32, 32, 4, 2, use_bias=True, router_bias=True, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
    frozen = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, Quantized)))
    x = jax.random.normal(jax.random.key(0), (6, 32))
    target = jax.random.normal(jax.random.key(1), (6, 32))

    @nnx.jit
    def step(layer, optimizer):
        value, found = nnx.value_and_grad(lambda layer: ((layer(x) - target) ** 2).mean())(layer)
        optimizer.update(layer, found)
        return value, found

    losses = []
    for _ in range(8):
        value, found = step(layer, optimizer)
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(found)}
    assert names == {"router/kernel", "router/bias", "gate_up_bias", "down_bias"}
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
    for trained in ("gate_up_bias", "down_bias"):
        assert (after[trained] != before[trained]).any(), trained
    assert (after["router"]["kernel"] != before["router"]["kernel"]).any()
    assert len(jax.tree.leaves(frozen)) == 4
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer, Quantized)), frozen)


# --- refusals --------------------------------------------------------------------------------------------------------

CASE = random_case(tokens=4, hidden=32, intermediate=32)


def layer(x):
    return mxfp4_moe(x, CASE.weights, CASE.topk_weights, CASE.topk_ids)


def test_second_derivatives_are_refused():
    def slope(x):
        return jnp.square(jax.grad(lambda x: layer(x).sum())(x)).sum()

    with pytest.raises(
        NotImplementedError, match=r"mxfp4_moe: .*derivative of its gradient.*expected first.*stop_gradient"
    ):
        jax.jit(jax.grad(slope))(CASE.x)
    # A gradient that counts as a constant, as in first-order meta-learning, is fine.
    x = jnp.asarray(CASE.x)
    gradient = jax.grad(lambda x: layer(x).sum())

    def after_a_step(x):
        return layer(x - 0.1 * jax.lax.stop_gradient(gradient(x))).sum()

    moved = compiled_fast(gradient)(x - 0.1 * compiled_fast(gradient)(x))
    assert relative_error(compiled_fast(jax.grad(after_a_step))(x), moved) <= 1e-5


@pytest.mark.parametrize("forward", [jax.jacfwd, lambda f: lambda x: jax.jvp(f, (x,), (x,)), jax.hessian])
def test_forward_mode_is_refused(forward):
    with pytest.raises(TypeError, match=re.escape("forward-mode autodiff (jvp)")):
        forward(layer)(jnp.asarray(CASE.x))
    with pytest.raises(TypeError, match=re.escape("forward-mode autodiff (jvp)")):
        jax.jit(forward(layer))(jnp.asarray(CASE.x))


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_follows_one_expert():
    """The backward pass does not expand the stacks either: about one expert's two matrices in float32, whatever E is."""
    hidden, intermediate, temporary = 512, 256, {}
    one_expert = 4 * 3 * intermediate * hidden
    for experts in (8, 64):
        case = random_case(tokens=4, experts=experts, top_k=2, hidden=hidden, intermediate=intermediate)

        def loss(x, weights, *routing):
            return mxfp4_moe(x, weights, *routing, implementation="xla").sum()

        arguments = case.x, case.weights, case.topk_weights, case.topk_ids
        program = jax.jit(jax.grad(loss)).lower(*arguments).compile()
        temporary[experts] = program.memory_analysis().temp_size_in_bytes
    assert 0 < temporary[64] < 2 * one_expert
    assert abs(temporary[64] - temporary[8]) <= 0.25 * temporary[8]


def test_nothing_is_kept_from_the_forward_pass():
    """What a derivative keeps of a layer is what was put into it: its arrays and no other float."""
    case = random_case(tokens=64, top_k=4, hidden=32, intermediate=96)
    _, back = jax.vjp(lambda x: mxfp4_moe(x, case.weights, case.topk_weights, case.topk_ids), jnp.asarray(case.x))
    kept = [a for a in jax.tree.leaves(back) if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.floating)]
    assert sorted(a.size for a in kept) == [64 * 4, 64 * 32]
