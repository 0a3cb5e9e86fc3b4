"""The contract of an implementation, and what passes between `mxfp4_moe` and one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax

from jax_mxfp4_moe.mxfp4 import PACKED
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.weights import MoeWeights


class Operands(NamedTuple):
    """The arrays of one call, checked and brought to one form.

    Attributes:
      x: [tokens, D].
      weights: as `prepare` left them for the implementation; `activation_scale` only if `problem.has_activation_scale`.
      topk_weights: [tokens, K] float32, 0 where the slot is skipped.
      topk_ids: [tokens, K] int32, each in 0..E-1, or -1 where the slot is skipped; rows of weights, not global ids.
    """

    x: jax.Array
    weights: MoeWeights
    topk_weights: jax.Array
    topk_ids: jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """One choice of an implementation's tuning parameters.

    Attributes:
      items: (name, value) pairs, sorted by name; hashable, so that a config can be static in a jitted call.
      source: where it came from, in words for people: an argument, a table and its row, or the implementation's default.
    """

    items: tuple[tuple[str, Any], ...]
    source: str = "default"

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str = "default") -> Config:
        """Builds a config from a mapping."""
        return cls(tuple(sorted(values.items())), source)

    @functools.cached_property
    def _values(self) -> dict[str, Any]:
        return dict(self.items)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.items) or "-"


class Steps(Protocol):
    """The steps of one implementation, in JAX or torch words; `pipeline` in `moe` joins them.

    Law: `route` and `quantize` are bitwise equal to the `xla` implementation's; `stage1` and `stage2` agree with it within the
    tolerance of `testing.TOLERANCES` for the recipe.
    """

    def route(self, topk_ids: Any) -> Any:
        """Sorts rows by expert."""

    def quantize(self, x: Any, scale: Any = None) -> Any:
        """Rounds activations to `problem.activation_quant`; returns them as they are when that is None.

        `scale` is the static scale of "fp8", or None.
        """

    def stage1(self, x: Any, gate_up: Any, bias: Any, topk_weights: Any, routing: Any) -> Any:
        """Gate and up product, activation."""

    def stage2(self, h: Any, down: Any, bias: Any, topk_weights: Any, routing: Any) -> Any:
        """Down product, weighted sum."""


Pipeline = Callable[[Steps, Operands], Any]


class Implementation:
    """One way to run the pipeline. A subclass says what it needs, what it can do, and does it."""

    name: str = ""
    layouts: tuple[str, ...] = (PACKED,)
    """Layouts of weights that `run` accepts."""
    extra: str | None = None
    """The extra of this package that installs what it needs, if it needs any."""
    presets: tuple[str, ...] = ()
    """Names that the caller may give as `config`."""
    switches: tuple[str, ...] = ()
    """Parameters of a config that may be 0, whatever they are by default."""

    capturable: bool = False
    """Whether its pipeline may be recorded into a command buffer: it then allocates nothing, reads nothing back on the
    host, and launches work on every call. What is not capturable goes through the bridge's eager target."""

    def missing(self) -> str | None:
        """None if what it needs is installed, or else a sentence that ends in the remedy. Imports nothing heavy."""
        return None

    def why_not(self, problem: MoeProblem | None, platform: str) -> str | None:
        """None if it can run `problem` on `platform`, or else one sentence that says why not.

        With `problem` None the question is about the platform alone. The same sentence serves choice, error and doctor.
        """
        return self.missing()

    def prepare(self, weights: MoeWeights) -> MoeWeights:
        """Brings packed weights to this implementation's layout, once, outside jit. Law: `unprepare(prepare(w)) == w`."""
        return weights

    def unprepare(self, weights: MoeWeights) -> MoeWeights:
        """The inverse of `prepare`."""
        return weights

    def configs(self, problem: MoeProblem, platform: str) -> list[Config]:
        """Every config worth trying for `problem`, the one to use untuned first. Law: each gives the same answer."""
        return [Config(())]

    def preset(self, name: str, problem: MoeProblem, platform: str) -> Config:
        """The config that `config=name` asks for, with a name of `presets`. It may carry a precision of its own.

        Raises:
          ValueError: the preset has nothing for `problem`.
        """
        raise NotImplementedError(f"{self.name} does not define preset.")

    def run(
        self,
        operands: Operands,
        problem: MoeProblem,
        config: Config,
        *,
        platform: str,
        pipeline: Pipeline,
        bridge: str | None,
    ) -> jax.Array:
        """Returns y [tokens, D] of `problem.out_dtype`. Called while tracing, with `why_not` None and tokens > 0."""
        raise NotImplementedError(f"{self.name} does not define run.")
