"""MoeProblem: the static facts of one call, by which implementations are chosen, configured, compiled and compared."""

from __future__ import annotations

import dataclasses

ACTIVATION_QUANTS: tuple[str | None, ...] = (None, "mxfp4", "fp8")
"""What activations are rounded to before each stage; None leaves them as they are."""

ACTIVATION_DEFAULTS: dict[str, dict[str, float | None]] = {
    "silu": {},
    "gelu": {},
    "gelu_tanh": {},
    "swiglu_oai": {"alpha": 1.702, "limit": 7.0},
    "silu_clamped": {"limit": None},
    "silu_post_clamped": {"limit": None},
}
"""The gated activations by name, with the parameters each takes and their defaults (None: must be given); formulas in `stage1`."""


@dataclasses.dataclass(frozen=True)
class MoeProblem:
    """Shapes, types and options of one `mxfp4_moe` call; hashable, no arrays.

    Attributes:
      tokens, top_k, experts, hidden, intermediate: sizes M, K, E, D, F; experts are those whose weights are here.
      dtype, out_dtype: names of the types of x and of the result.
      activation, activation_alpha, activation_limit: the gated activation and its parameters.
      activation_quant: one of ACTIVATION_QUANTS.
      has_activation_scale: whether "fp8" activations have static scales, which are then in `MoeWeights.activation_scale`; without them
        each row gets its own.
      scale_rule, rounding: the quantization rules of the activations.
      has_gate_up_bias, has_down_bias: whether the weights carry biases.
      apply_router_weight_on_input: the router weight multiplies the stage 1 product, and not the result.
      deterministic: the same inputs must give the same bits.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    activation: str = "silu"
    activation_alpha: float | None = None
    activation_limit: float | None = None
    activation_quant: str | None = None
    scale_rule: str = "even"
    rounding: str = "nearest_even"
    has_gate_up_bias: bool = False
    has_down_bias: bool = False
    apply_router_weight_on_input: bool = False
    deterministic: bool = False
    has_activation_scale: bool = False

    @property
    def rows(self) -> int:
        """Pairs of a token and one of its experts: the rows of the two grouped products, if none is skipped."""
        return self.tokens * self.top_k

    def __str__(self) -> str:
        """Shapes, and only those options that differ from their defaults."""
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"MoeProblem({', '.join(shown)})"


def resolve_activation(
    where: str, activation: str, alpha: float | None, limit: float | None
) -> tuple[float | None, float | None]:
    """Returns alpha and limit with defaults filled in.

    Raises:
      ValueError: an unknown activation, a parameter that it does not take (a limit that is silently ignored changes a model's
        answers), a limit or alpha that is missing, or one that is not positive.
    """
    if activation not in ACTIVATION_DEFAULTS:
        raise ValueError(f"{where}: activation={activation!r} given; expected one of {', '.join(ACTIVATION_DEFAULTS)}.")
    defaults = ACTIVATION_DEFAULTS[activation]
    resolved: list[float | None] = []
    for name, value in (("alpha", alpha), ("limit", limit)):
        if name not in defaults:
            if value is not None:
                raise ValueError(
                    f"{where}: activation_{name}={value!r} given with activation={activation!r}, which takes none. "
                    f"Leave it out, or choose one of {', '.join(a for a, d in ACTIVATION_DEFAULTS.items() if name in d)}."
                )
            resolved.append(None)
            continue
        value = defaults[name] if value is None else float(value)
        if value is None or not value > 0:
            raise ValueError(
                f"{where}: activation_{name}={value!r} given with activation={activation!r}; expected a positive number. "
                "For no clamp, use activation='silu'."
            )
        resolved.append(value)
    return resolved[0], resolved[1]
