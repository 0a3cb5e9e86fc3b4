"""The command line, `python -m jax_mxfp4_moe`: doctor, bench and tune. Needs the [cli] extra.

Exit status: 0 if all is well; 1 if something measured is wrong or cannot run; 2 if the command is used wrongly.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from jax_mxfp4_moe import bench as bench_module
from jax_mxfp4_moe import doctor as doctor_module
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.torch_call import BRIDGES
from jax_mxfp4_moe.tuning import search, table
from jax_mxfp4_moe.workloads import CPU_WORKLOADS, WORKLOADS

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="MXFP4 mixture-of-experts layers inside jax.jit.",
    rich_markup_mode=None,
)


def _one_of(known: Iterable[str], what: str) -> Callable[[Any], Any]:
    """A check of a parameter, a name or a list of names, for typer to call."""

    def check(given: Any) -> Any:
        for name in [given] if isinstance(given, str) else given or ():
            if name not in known:
                raise typer.BadParameter(f"{what} {name!r} given; expected one of {', '.join(known)}.")
        return given

    return check


_known_workload = _one_of(WORKLOADS, "workload")
_known_implementation = _one_of(IMPLEMENTATIONS, "implementation")
Names = Annotated[
    list[str] | None,
    typer.Argument(
        help=f"Workloads: {', '.join(WORKLOADS)}. All cpu_* ones if left out.",
        metavar="NAMES",
        callback=_known_workload,
    ),
]
Repeats = Annotated[int | None, typer.Option(min=1, help="Rounds; as many as fit into two seconds if left out.")]


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    support: Annotated[bool, typer.Option("--support", help="Print the Markdown table of README.md.")] = False,
) -> None:
    """What can run here, and why the rest cannot."""
    raise typer.Exit(doctor_module.run(as_json=json, support=support))


@app.command()
def bench(
    names: Names = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; each must run. All that can, if left out.", callback=_known_implementation),
    ] = None,
    bridge: Annotated[
        str | None,
        typer.Option(help=f"How torch is reached: {', '.join(BRIDGES)}.", callback=_one_of(BRIDGES, "bridge")),
    ] = None,
    repeats: Repeats = None,
    csv: Annotated[pathlib.Path | None, typer.Option(help="Write the rows to this file too.")] = None,
) -> None:
    """Check and time workloads: one row for each implementation, and plain JAX."""
    raise typer.Exit(bench_module.run(names or (), implementation or (), bridge=bridge, repeats=repeats, path=csv))


@app.command()
def tune(
    out: Annotated[
        pathlib.Path,
        typer.Option(envvar=table.USER_TABLES_VARIABLE, help="Folder of tables, read when that variable names it."),
    ],
    names: Names = None,
    implementation: Annotated[
        str, typer.Option(help="Whose configs to measure.", callback=_known_implementation)
    ] = "xla",
    repeats: Repeats = None,
) -> None:
    """Measure all configs of an implementation, and keep the winners as table rows."""
    raise typer.Exit(search.run(names or CPU_WORKLOADS, implementation, out, repeats=repeats))
