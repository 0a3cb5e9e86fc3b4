"""mxfp4_moe at the door: what it refuses, in which words, and what importing it costs. Numbers: see test_contract.py."""

import copy
import os
import pickle
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_case

import jax_mxfp4_moe
from jax_mxfp4_moe import MoeWeights, Mxfp4Array, mxfp4_moe, prepare, quantize_weights, validate

CASE = random_case(tokens=4, experts=3, top_k=2, hidden=64, intermediate=96)
CASE_WITH_BIAS = random_case(tokens=4, experts=3, top_k=2, hidden=64, intermediate=96, biases=True)


def weights_with(**changes) -> MoeWeights:
    """Weights with some parts replaced past every check, as a careless tree.map could."""
    leaves = {"gate_up": CASE.weights.gate_up, "down": CASE.weights.down, "gate_up_bias": None, "down_bias": None}
    return MoeWeights(**{**leaves, **changes})


def mxfp4_zeros(*shape) -> Mxfp4Array:
    return Mxfp4Array(
        np.zeros((*shape[:-1], shape[-1] // 2), np.uint8), np.zeros((*shape[:-1], shape[-1] // 32), np.uint8)
    )


def unchecked(codes, scales) -> Mxfp4Array:
    """An Mxfp4Array of shapes that its constructor refuses, by way of the pytree."""
    return jax.tree.unflatten(jax.tree.structure(mxfp4_zeros(3, 192, 64)), [codes, scales])


def refuses(error, texts, *, jit=True, **changes):
    """The call with these changes raises at trace time, eagerly and under jit; a good call works afterwards."""
    arguments = {"x": CASE.x, "weights": CASE.weights, "topk_weights": CASE.topk_weights, "topk_ids": CASE.topk_ids}
    options = {name: changes.pop(name) for name in list(changes) if name not in arguments}
    arguments.update(changes)

    def call(*arrays):
        return mxfp4_moe(*arrays, **options)

    for run in (call, lambda *arrays: jax.eval_shape(call, *arrays)):
        with pytest.raises(error) as caught:
            run(*arguments.values())
        assert type(caught.value) in (error if isinstance(error, tuple) else (error,))
        message = str(caught.value)
        for text in ("mxfp4_moe", *texts):
            assert text in message, message
    good = mxfp4_moe(CASE.x, CASE.weights, CASE.topk_weights, CASE.topk_ids)
    assert np.isfinite(np.asarray(good)).all()


F32, I32, U8 = np.float32, np.int32, np.uint8
ids, weights = CASE.topk_ids, CASE.topk_weights

BAD_INPUT = {
    # x
    "x_rank_0": ({"x": np.float32(1)}, ValueError, ["x", "()", "expected"]),
    "x_width": ({"x": np.zeros((4, 96), F32)}, ValueError, ["(4, 96)", "64", "expected"]),
    "x_integers": ({"x": np.zeros((4, 64), I32)}, TypeError, ["int32", "expected", "float32", "bfloat16"]),
    # topk_weights and topk_ids
    "ids_float": ({"topk_ids": ids.astype(F32)}, TypeError, ["topk_ids", "float32", "expected", "integer"]),
    "ids_bool": ({"topk_ids": ids > 0}, TypeError, ["topk_ids", "bool", "expected", "integer"]),
    "weights_integer": ({"topk_weights": ids}, TypeError, ["topk_weights", "int32", "expected", "floating"]),
    "wrong_k": ({"topk_weights": weights[:, :1]}, ValueError, ["(4, 1)", "(4, 2)", "expected"]),
    "ids_rank": ({"topk_ids": ids[0], "topk_weights": weights[0]}, ValueError, ["(2,)", "expected"]),
    "ids_tokens": ({"topk_ids": ids[:3], "topk_weights": weights[:3]}, ValueError, ["(3, 2)", "expected"]),
    "ids_leading_axes": (
        {"x": CASE.x.reshape(2, 2, 64)},
        ValueError,
        ["(2, 2, 64)", "(4, 2)", "expected"],
    ),
    "no_k": ({"topk_ids": ids[:, :0], "topk_weights": weights[:, :0]}, ValueError, ["(4, 0)", "expected"]),
    # weights
    "weights_not_moe_weights": (
        {"weights": (CASE.weights.gate_up, CASE.weights.down)},
        TypeError,
        ["tuple", "expected MoeWeights", "quantize_weights"],
    ),
    "weights_experts": (
        {"weights": weights_with(down=mxfp4_zeros(4, 64, 96))},
        ValueError,
        ["(3, 192, 64)", "(4, 64, 96)", "expected [E, 2F, D] and [E, D, F]"],
    ),
    "weights_not_twice_f": (
        {"weights": weights_with(gate_up=mxfp4_zeros(3, 96, 64))},
        ValueError,
        ["(3, 96, 64)", "(3, 64, 96)", "expected [E, 2F, D] and [E, D, F]"],
    ),
    "weights_transposed": (
        {"weights": weights_with(down=mxfp4_zeros(3, 96, 64))},
        ValueError,
        ["(3, 192, 64)", "(3, 96, 64)", "expected [E, 2F, D] and [E, D, F]"],
    ),
    "weights_stacked_layers": (
        {"weights": jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), CASE.weights)},
        ValueError,
        ["(2, 3, 192, 64)", "expected [E, 2F, D]", "scan"],
    ),
    "scales_shape": (
        {"weights": weights_with(gate_up=unchecked(np.zeros((3, 192, 32), U8), np.zeros((3, 192, 4), U8)))},
        ValueError,
        ["gate_up", "(3, 192, 32)", "(3, 192, 4)", "expected", "length / 32"],
    ),
    "bias_shape": (
        {"weights": weights_with(down_bias=np.zeros((3, 96), F32))},
        ValueError,
        ["down_bias", "(3, 96)", "expected (3, 64)"],
    ),
    "bias_integers": (
        {"weights": weights_with(gate_up_bias=np.zeros((3, 192), I32))},
        TypeError,
        ["gate_up_bias", "int32", "expected an array of float32", "Cast"],
    ),
    "parts_not_mxfp4": (
        {"weights": MoeWeights(np.zeros((3, 192, 64), F32), np.zeros((3, 64, 96), F32))},
        TypeError,
        ["gate_up", "expected an Mxfp4Array", "quantize_weights"],
    ),
    "one_part_not_mxfp4": (
        {"weights": weights_with(down=(CASE.weights.down.codes, CASE.weights.down.scales))},
        TypeError,
        ["down", "tuple", "expected an Mxfp4Array"],
    ),
    "leaves_cast_to_bfloat16": (
        {"weights": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), CASE.weights)},
        TypeError,
        ["gate_up", "bfloat16", "expected uint8"],
    ),
    "leaves_cast_to_int8": (
        {"weights": jax.tree.map(lambda leaf: leaf.astype(jnp.int8), CASE.weights)},
        TypeError,
        ["gate_up", "int8", "expected uint8"],
    ),
    "scales_cast_to_int32": (
        {"weights": weights_with(down=unchecked(CASE.weights.down.codes, CASE.weights.down.scales.astype(I32)))},
        TypeError,
        ["down", "int32", "expected uint8"],
    ),
    # names
    "activation": ({"activation": "relu"}, ValueError, ["'relu'", "expected one of", "silu"]),
    "activation_quant": ({"activation_quant": "int8"}, ValueError, ["'int8'", "expected", "'mxfp4'", "None"]),
    "implementation": ({"implementation": "cutlass"}, ValueError, ["'cutlass'", "expected", "xla", "torch"]),
    "implementation_number": ({"implementation": 3}, TypeError, ["implementation=3 given", "expected a name"]),
    "implementations_number": ({"implementation": (3, "xla")}, (TypeError, ValueError), ["3", "given", "expected"]),
    "implementations_none": ({"implementation": ()}, ValueError, ["implementation=() given", "expected a name"]),
    "bridge": ({"bridge": "fast"}, ValueError, ["'fast'", "expected", "graph", "eager", "callback"]),
    "scale_rule": ({"scale_rule": "round"}, ValueError, ["'round'", "expected one of", "half_up"]),
    "rounding": ({"rounding": "up"}, ValueError, ["'up'", "expected one of", "half_away"]),
    "alpha_of_silu": ({"activation_alpha": 1.702}, ValueError, ["activation_alpha", "1.702", "silu"]),
    "limit_of_silu": ({"activation_limit": 7.0}, ValueError, ["activation_limit", "7.0", "silu"]),
    "limit_not_positive": (
        {"activation": "swiglu_oai", "activation_limit": 0.0},
        ValueError,
        ["activation_limit", "0.0", "expected a positive"],
    ),
    "output_type": ({"preferred_element_type": np.int32}, TypeError, ["preferred_element_type", "int32", "expected"]),
    "output_type_unknown": ({"preferred_element_type": "foo"}, TypeError, ["'foo' given", "expected float32"]),
    "config_zero": (
        {"config": {"tile_rows": 0}, "implementation": "xla"},
        ValueError,
        ["tile_rows=0 given", "expected"],
    ),
    "config_float": (
        {"config": {"tile_rows": 0.9}, "implementation": "xla"},
        ValueError,
        ["tile_rows=0.9", "expected"],
    ),
    "config_list": ({"config": [1], "implementation": "xla"}, TypeError, ["config", "list", "expected a mapping"]),
    "config_of_torch": ({"config": {"tile_rows": 8}, "implementation": "torch"}, ValueError, ["'tile_rows'", "none"]),
    # activation_scale
    "scale_without_fp8": (
        {"activation_scale": (1.0, 1.0)},
        ValueError,
        ["activation_scale given", "activation_quant=None", "'fp8'", "Leave it out"],
    ),
    "scale_of_mxfp4": ({"activation_scale": 1.0, "activation_quant": "mxfp4"}, ValueError, ["'mxfp4'", "'fp8'"]),
    "one_scale": (
        {"activation_scale": np.float32(1), "activation_quant": "fp8"},
        ValueError,
        ["activation_scale of shape ()", "expected (2,)", "of x and of h"],
    ),
    "scales_of_experts": (
        {"activation_scale": np.ones((2, 3), F32), "activation_quant": "fp8"},
        ValueError,
        ["activation_scale of shape (2, 3)", "expected (2,)", "largest"],
    ),
    "integer_scales": (
        {"activation_scale": np.ones(2, I32), "activation_quant": "fp8"},
        TypeError,
        ["activation_scale", "int32", "expected an array of float32"],
    ),
    "weights_scale_type": (
        {"weights": CASE.weights.replace(activation_scale=np.ones(2, np.float16))},
        TypeError,
        ["weights.activation_scale", "float16", "expected an array of float32", "Cast"],
    ),
    "weights_scale_shape": (
        {"weights": CASE.weights.replace(activation_scale=np.ones((2, 2), F32))},
        ValueError,
        ["weights.activation_scale", "(2, 2)", "expected (2,)"],
    ),
    # expert_map and token_mask
    "map_float": ({"expert_map": np.zeros(6, F32)}, TypeError, ["expert_map", "float32", "expected", "integer"]),
    "map_rank": ({"expert_map": np.zeros((2, 3), I32)}, ValueError, ["expert_map", "[2, 3]", "expected a 1-D"]),
    "mask_type": ({"token_mask": np.ones(4, F32)}, TypeError, ["token_mask", "float32", "expected", "bool"]),
    "mask_shape": ({"token_mask": np.ones(5, bool)}, ValueError, ["token_mask", "[5]", "expected bool[4]"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case):
    """One error type each, at trace time; the text says what was given, what was expected and the remedy."""
    changes, error, texts = BAD_INPUT[case]
    refuses(error, texts, **changes)


def test_length_that_is_not_a_multiple_of_32():
    with pytest.raises(ValueError, match=r"multiple of\s*32"):
        quantize_weights(np.zeros((2, 96, 48), F32), np.zeros((2, 48, 48), F32))
    with pytest.raises(ValueError, match=r"(?s)\(2, 64, 64\).*\(2, 48, 32\).*expected.*swapaxes"):
        quantize_weights(np.zeros((2, 64, 64), F32), np.zeros((2, 48, 32), F32))


def test_quantize_weights_refuses_integers():
    with pytest.raises(TypeError, match="int32"):
        quantize_weights(np.zeros((2, 64, 64), I32), np.zeros((2, 64, 32), I32))


def test_quantize_weights_takes_lists():
    """As mxfp4_moe does: they are the arrays that NumPy makes of them."""
    gate_up, down = np.linspace(-1, 1, 2 * 64 * 32).reshape(2, 64, 32), np.linspace(-2, 2, 2048).reshape(2, 32, 32)
    expected = quantize_weights(gate_up.astype(F32), down.astype(F32))
    jax.tree.map(np.testing.assert_array_equal, quantize_weights(gate_up.tolist(), down.tolist()), expected)
    with pytest.raises(TypeError, match="int"):
        quantize_weights(np.zeros((2, 64, 32), int).tolist(), np.zeros((2, 32, 32), int).tolist())
    with pytest.raises(ValueError, match=r"quantize_weights: .*\(2,\).*given; expected \[E, 2F, D\]"):
        quantize_weights([1.0, 2.0], down)


def test_quantize_weights_of_no_experts():
    weights = quantize_weights(np.zeros((0, 64, 32), F32), np.zeros((0, 32, 32), F32))
    assert weights.gate_up.shape == (0, 64, 32)
    assert weights.down.shape == (0, 32, 32)


@pytest.mark.parametrize("which", ["gate_up_bias", "down_bias"])
def test_biases_as_lists(which):
    """Refused with the remedy, or taken for the array they spell; not an AttributeError somewhere."""
    bias = getattr(CASE_WITH_BIAS, which)
    try:
        y = mxfp4_moe(CASE.x, weights_with(**{which: bias.tolist()}), CASE.topk_weights, CASE.topk_ids)
    except TypeError as error:
        for text in ("mxfp4_moe", which, "list", "given", "expected", "float32"):
            assert text in str(error)  # noqa: PT017
    else:
        np.testing.assert_array_equal(y, CASE.replace(**{which: bias}).run(jit=False))


@pytest.mark.parametrize("implementation", ["xla", "torch"])
def test_float64_biases_with_x64(implementation):
    """They exist as JAX arrays only there; the message is the same for every implementation."""
    with jax.enable_x64(True):
        bias = jnp.zeros((3, 192), jnp.float64)
        refuses(
            TypeError,
            ["gate_up_bias", "float64", "expected", "float32", "Cast"],
            weights=weights_with(gate_up_bias=bias),
            implementation=implementation,
        )


@pytest.mark.parametrize("activation_quant", [None, "mxfp4"])
@pytest.mark.parametrize("copied", [lambda w: pickle.loads(pickle.dumps(w)), copy.deepcopy, copy.copy])
def test_weights_can_be_pickled_and_copied(copied, activation_quant):
    """Every leaf, and what the weights were made for."""
    w = CASE_WITH_BIAS.weights
    w = MoeWeights(w.gate_up, w.down, w.gate_up_bias, activation_quant=activation_quant)
    new = copied(w)
    assert jax.tree.structure(new) == jax.tree.structure(w)
    jax.tree.map(np.testing.assert_array_equal, new, w)


# --- layouts ---------------------------------------------------------------------------------------------------------


def prepared_elsewhere(layout="triton") -> MoeWeights:
    gate_up, down = CASE.weights.gate_up, CASE.weights.down
    return MoeWeights(
        Mxfp4Array(gate_up.codes, gate_up.scales, length=gate_up.length, layout=layout),
        Mxfp4Array(down.codes, down.scales, length=down.length, layout=layout),
    )


@pytest.mark.parametrize("implementation", ["xla", "torch"])
def test_weights_prepared_for_another_implementation(implementation):
    """The message names what was prepared, which part, what was asked for, and prepare()."""
    texts = ["weights.gate_up", "'triton'", f"implementation='{implementation}'", "prepare(weights", "outside jit"]
    refuses(ValueError, texts, weights=prepared_elsewhere(), implementation=implementation)


def test_weights_in_a_layout_that_no_implementation_here_reads():
    refuses(ValueError, ["'triton'", "prepare"], weights=prepared_elsewhere())


def test_half_prepared_weights():
    mixed = MoeWeights(prepared_elsewhere().gate_up, CASE.weights.down)
    refuses(ValueError, ["'triton'", "'packed'", "prepare"], weights=mixed)


def test_prepare_refuses_unknown_names_and_foreign_layouts():
    with pytest.raises(ValueError, match=r"'cutlass'.*expected"):
        prepare(CASE.weights, "cutlass")
    for name in (None, 3, ("xla", "torch")):
        with pytest.raises(
            (TypeError, ValueError), match=rf"prepare: implementation={re.escape(repr(name))}.*expected"
        ):
            prepare(CASE.weights, name)
    with pytest.raises(TypeError, match=r"prepare: .*NoneType given; expected MoeWeights"):
        prepare(None, "xla")
    with pytest.raises(ValueError, match="'triton'"):
        prepare(prepared_elsewhere(), "xla")


# --- validate --------------------------------------------------------------------------------------------------------


def test_a_mask_of_experts_is_no_map():
    """Its values are not seen under jit, where `validate` is the check."""
    mask = np.array([1, 1, 0, 1, 0], np.int32)
    for check in (
        lambda: CASE.run(jit=False, expert_map=mask),
        lambda: validate(CASE.weights, CASE.topk_weights, CASE.topk_ids, expert_map=mask),
    ):
        with pytest.raises(ValueError, match=r"all of them 0 or 1; .*cumsum"):
            check()
    CASE.run(jit=False, expert_map=np.array([0, -1, 1, -1, -1], np.int32))


def test_validate_accepts_good_input():
    assert validate(CASE.weights, CASE.topk_weights, CASE.topk_ids) is None
    skipped = np.where(CASE.topk_ids == 0, -1, CASE.topk_ids)
    validate(CASE.weights, CASE.topk_weights, skipped)


def test_validate_sees_values():
    bad_ids = CASE.topk_ids.copy()
    bad_ids[2, 1] = 3
    with pytest.raises(ValueError, match=r"(?s)3.*expert_map"):
        validate(CASE.weights, CASE.topk_weights, bad_ids)
    bad_weights = CASE.topk_weights.copy()
    bad_weights[0, 0] = np.nan
    with pytest.raises(ValueError, match=r"(?i)topk_weights.*(nan|finite)"):
        validate(CASE.weights, bad_weights, CASE.topk_ids)
    for scale in (0.0, -1.0, np.nan, np.inf, 1e-40):
        weights = CASE.weights.replace(activation_scale=np.array([1, scale], F32))
        with pytest.raises(ValueError, match=r"activation_scale \[1.0, .*given; expected numbers.*Set it to None"):
            validate(weights, CASE.topk_weights, CASE.topk_ids)
    validate(CASE.weights.replace(activation_scale=np.array([1, 1e-5], F32)), CASE.topk_weights, CASE.topk_ids)


# --- choosing --------------------------------------------------------------------------------------------------------


def test_a_sequence_of_implementations_is_tried_in_order():
    """As in tokamax: None, a name or a sequence of names."""
    case = CASE
    y = case.run(jit=False, implementation=("xla", "torch"))
    np.testing.assert_array_equal(y, case.run(jit=False, implementation="xla"))
    np.testing.assert_array_equal(case.run(jit=False), y)


# --- the bridge ------------------------------------------------------------------------------------------------------


def bridge_of_a_call(**options) -> str:
    """Which way to torch the program of one and the same call takes."""
    program = str(jax.make_jaxpr(lambda x: CASE.replace(x=x).run(jit=False, implementation="torch", **options))(CASE.x))
    ways = {"callback": "pure_callback", "eager": "target_name=jax_mxfp4_moe_eager"}
    return " ".join(way for way, text in ways.items() if text in program)


def test_the_environment_chooses_the_bridge_at_every_call(monkeypatch):
    """Not only at the first of equal calls, whose trace JAX remembers; the argument comes before it."""
    from jax_mxfp4_moe.implementations import torch_call

    for name in ("torch", "eager"):
        why_not = torch_call.why_not(name) if name == "eager" else CASE.why_not(name)
        if why_not is not None:
            pytest.skip(why_not)
    monkeypatch.delenv("JAX_MXFP4_MOE_BRIDGE", raising=False)
    expected = np.asarray(CASE.run(jit=False, implementation="torch"))
    for _ in range(2):
        assert bridge_of_a_call() == "eager"
        monkeypatch.setenv("JAX_MXFP4_MOE_BRIDGE", "callback")
        assert bridge_of_a_call() == "callback"
        np.testing.assert_array_equal(CASE.run(jit=False, implementation="torch"), expected)
        assert bridge_of_a_call(bridge="eager") == "eager"
        monkeypatch.setenv("JAX_MXFP4_MOE_BRIDGE", "eager")
        assert bridge_of_a_call() == "eager"
        assert bridge_of_a_call(bridge="callback") == "callback"
        monkeypatch.setenv("JAX_MXFP4_MOE_BRIDGE", "")  # set to nothing is not set
        assert bridge_of_a_call() == "eager"


@pytest.mark.parametrize("implementation", [None, "xla", "torch"])
def test_an_unknown_bridge_in_the_environment(monkeypatch, implementation):
    """An error also where no bridge is needed: a misspelt variable shall not wait for the day it counts."""
    monkeypatch.setenv("JAX_MXFP4_MOE_BRIDGE", "fast")
    for run in (False, True):
        with pytest.raises(
            ValueError, match=r"JAX_MXFP4_MOE_BRIDGE='fast' given; expected one of graph, eager, callback"
        ):
            CASE.run(jit=run, implementation=implementation)
    monkeypatch.delenv("JAX_MXFP4_MOE_BRIDGE")
    CASE.run(jit=False, implementation=implementation)


# --- torch: missing, failing -----------------------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
        check=False,
    )


def test_a_missing_extra_says_what_to_install():
    """Without torch implementation='torch' is an ImportError with the command, and the default goes on with xla."""
    result = run_python(
        """
        import importlib.machinery, sys

        class Finder(importlib.machinery.PathFinder):  # the folders of this interpreter, as if torch were not in them
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.split(".")[0] == "torch" else super().find_spec(name, path, target)

        sys.meta_path = [Finder if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
        import numpy as np
        import jax_mxfp4_moe as m

        w = m.quantize_weights(np.ones((2, 64, 32), np.float32), np.ones((2, 32, 32), np.float32))
        arguments = np.ones((3, 32), np.float32), w, np.ones((3, 1), np.float32), np.zeros((3, 1), np.int32)
        print("DEFAULT", m.mxfp4_moe(*arguments).shape)
        try:
            m.mxfp4_moe(*arguments, implementation="torch")
        except ImportError as error:
            print("ERROR", error)
        print("AGAIN", m.mxfp4_moe(*arguments, implementation="xla").shape)
        """
    )
    assert result.returncode == 0, result.stderr
    assert "DEFAULT (3, 32)" in result.stdout
    assert "torch" in result.stdout.split("ERROR")[1]
    assert "pip install 'jax_mxfp4_moe[torch]'" in result.stdout
    assert "AGAIN (3, 32)" in result.stdout


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_an_exception_inside_torch_is_readable_and_the_next_call_works(monkeypatch, jit):
    """The text names the error, its message and the place; nothing is left broken behind it."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'jax_mxfp4_moe[torch]'")
    from jax_mxfp4_moe.implementations import torch as implementation

    before = np.asarray(CASE.run(jit=jit, implementation="torch"))

    def a_step_that_fails(gate, up, problem):
        raise ZeroDivisionError("the gate is made of straw")

    with monkeypatch.context() as patch:
        patch.setattr(implementation, "activate", a_step_that_fails)
        with pytest.raises(Exception, match="the gate is made of straw") as caught:
            jax.block_until_ready(CASE.run(jit=jit, implementation="torch"))
    message = str(caught.value)
    for text in ("ZeroDivisionError", "a_step_that_fails", "MoeProblem(tokens=4"):
        assert text in message, message
    np.testing.assert_array_equal(CASE.run(jit=jit, implementation="torch"), before)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_follows_one_expert():
    """The stacks are never expanded: beyond weights and result, a call needs about one expert in float32, whatever E is."""
    hidden, intermediate, temporary = 512, 256, {}
    one_expert = 4 * 2 * intermediate * hidden
    for experts in (8, 64):
        case = random_case(tokens=4, experts=experts, top_k=2, hidden=hidden, intermediate=intermediate)
        arguments = case.x, case.weights, case.topk_weights, case.topk_ids
        program = jax.jit(lambda *arrays: mxfp4_moe(*arrays, implementation="xla")).lower(*arguments).compile()
        temporary[experts] = program.memory_analysis().temp_size_in_bytes
    assert 0 < temporary[64] < 2 * one_expert
    assert abs(temporary[64] - temporary[8]) <= 0.25 * temporary[8]


# --- imports ---------------------------------------------------------------------------------------------------------


def test_import_loads_nothing_optional():
    result = run_python(
        """
        import sys
        import jax_mxfp4_moe

        for name in ("torch", "triton", "aiter", "flax", "gguf", "hypothesis"):
            assert name not in sys.modules, name
        assert not any(name.startswith("jax_mxfp4_moe._bridge") for name in sys.modules), "the bridge loads when used"
        print("OK")
        """
    )
    assert result.stdout.strip() == "OK", result.stderr


def test_a_call_with_xla_loads_no_torch():
    result = run_python(
        """
        import sys
        import numpy as np
        import jax_mxfp4_moe as m

        w = m.quantize_weights(np.ones((2, 64, 32), np.float32), np.ones((2, 32, 32), np.float32))
        m.mxfp4_moe(np.ones((3, 32), np.float32), w, np.ones((3, 1), np.float32), np.zeros((3, 1), np.int32),
                    implementation="xla")
        for name in ("torch", "triton", "aiter", "flax"):
            assert name not in sys.modules, name
        print("OK")
        """
    )
    assert result.stdout.strip() == "OK", result.stderr


def test_public_names():
    """The names users type; each is there and in __all__."""
    names = (
        "Mxfp4Array",
        "MoeWeights",
        "quantize",
        "dequantize",
        "quantize_weights",
        "prepare",
        "mxfp4_moe",
        "validate",
    )
    for name in (*names, "topk_routing"):
        assert hasattr(jax_mxfp4_moe, name), name
        assert name in jax_mxfp4_moe.__all__, name


def test_importing_does_not_start_a_backend():
    """A program that sets its platform or device count after the import still can."""
    result = run_python(
        """
        import jax_mxfp4_moe
        import jax._src.xla_bridge as bridge
        print("STARTED" if bridge._backends else "OK")
        """
    )
    assert result.stdout.strip() == "OK", result.stderr
