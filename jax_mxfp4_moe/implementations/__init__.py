"""The implementations by name, and how one is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from jax_mxfp4_moe.implementations.aiter.implementation import AiterImplementation
from jax_mxfp4_moe.implementations.base import Implementation
from jax_mxfp4_moe.implementations.torch import TorchImplementation
from jax_mxfp4_moe.implementations.triton.implementation import TritonImplementation
from jax_mxfp4_moe.implementations.xla import XlaImplementation
from jax_mxfp4_moe.mxfp4 import PACKED
from jax_mxfp4_moe.problem import MoeProblem

IMPLEMENTATIONS: dict[str, Implementation] = {
    i.name: i for i in (AiterImplementation(), TritonImplementation(), TorchImplementation(), XlaImplementation())
}

PREFERENCE: tuple[str, ...] = ("aiter", "triton", "xla", "torch")
"""Names to try, in order, when the caller leaves the choice open."""


def get(where: str, name: str) -> Implementation:
    """Returns the implementation of that name, or raises ValueError."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"{where}: implementation={name!r} given; expected one of {', '.join(sorted(IMPLEMENTATIONS))}."
        )
    return IMPLEMENTATIONS[name]


def wrong_layout(where: str, layout: str, name: str) -> str:
    """The sentence for weights that were prepared for another implementation."""
    if layout == PACKED:
        return (
            f"{where}: packed weights given, but implementation={name!r} was asked for, which reads only its own layout.\n"
            f"Call prepare(weights, implementation={name!r}) once, outside jit, or leave implementation unset."
        )
    owner = layout.split(":")[0]
    return (
        f"{where}: weights.gate_up was prepared for {owner!r} (layout {layout!r}), but implementation={name!r} was asked for.\n"
        f"Call prepare(weights, implementation={name!r}) on the packed weights once, outside jit, or leave implementation unset."
    )


def choose(
    problem: MoeProblem, platform: str, implementation: str | Sequence[str] | None, layout: str = PACKED
) -> Implementation:
    """Returns the first implementation, of those asked for or in order of preference, that can run `problem` on `platform`.

    Raises:
      ValueError: an unknown name, or the only one asked for cannot read `layout`.
      ImportError: the only one asked for is not installed.
      NotImplementedError: none can; the text gives each one's reason.
    """
    where = "mxfp4_moe"
    if implementation is None:
        names: Sequence[str] = [n for n in PREFERENCE if layout in IMPLEMENTATIONS[n].layouts]
        if not names:
            raise ValueError(
                f"{where}: weights in layout {layout!r} given; no implementation here reads it. "
                "Load the packed weights again and call prepare(weights, implementation)."
            )
    elif not isinstance(implementation, (str, list, tuple)):
        raise TypeError(
            f"{where}: implementation={implementation!r} given; expected a name, a sequence of names, or None."
        )
    else:
        names = [implementation] if isinstance(implementation, str) else list(implementation)
    if not names:
        raise ValueError(f"{where}: implementation=() given; expected a name, a sequence of names, or None.")
    reasons: dict[str, str] = {}
    for name in names:
        candidate = get(where, name)
        if layout not in candidate.layouts:
            if len(names) == 1:
                raise ValueError(wrong_layout(where, layout, name))
            reasons[name] = f"cannot read weights in layout {layout!r}"
            continue
        reason = candidate.why_not(problem, platform)
        if reason is None:
            return candidate
        reasons[name] = reason
    only = names[0]
    if implementation is not None and len(names) == 1 and IMPLEMENTATIONS[only].missing() is not None:
        raise ImportError(f"{where}: implementation={only!r} was asked for, but it {reasons[only]}.")
    width = max(map(len, reasons))
    listed = "\n".join(f"  {name:<{width}}  {reason}" for name, reason in reasons.items())
    quoted = ", ".join(map(repr, reasons))
    remedy = (
        "Leave implementation unset to choose among all."
        if implementation is not None
        else "See python -m jax_mxfp4_moe doctor."
    )
    raise NotImplementedError(f"{where}: none of {quoted} can run {problem} on {platform}:\n{listed}\n{remedy}")
