"""The command line, `python -m jax_mxfp4_moe`: doctor, bench, tune and convert. Needs the [cli] extra.

Exit status: 0 if all is well; 1 if something measured is wrong or cannot run; 2 if the command is used wrongly.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from jax_mxfp4_moe import aiter_validation
from jax_mxfp4_moe import bench as bench_module
from jax_mxfp4_moe import doctor as doctor_module
from jax_mxfp4_moe.checkpoint import convert as convert_module
from jax_mxfp4_moe.checkpoint import write
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS
from jax_mxfp4_moe.implementations.torch_call import BRIDGES
from jax_mxfp4_moe.quantize import SCALE_RULES
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


def _check_numbers(given: str | None) -> str | None:
    _numbers(given)
    return given


def _numbers(given: str | None) -> list[int] | None:
    """Reads "0,3-5" as [0, 3, 4, 5]."""
    if given is None:
        return None
    numbers: list[int] = []
    for part in given.split(","):
        found = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if found is None:
            raise typer.BadParameter(f"{given!r} given; expected layer numbers and ranges such as 0,3-5.")
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return numbers


def _known_key(given: list[str] | None) -> list[str] | None:
    """A check of tuning keys, for typer to call."""
    for key in given or ():
        try:
            table.problem_of(key.split(","))
        except (ValueError, TypeError) as wrong:
            raise typer.BadParameter(str(wrong)) from None
    return given


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
    aiter_releases: Annotated[
        bool, typer.Option("--aiter-releases", help="Print the Markdown tables of docs/aiter_releases.md.")
    ] = False,
) -> None:
    """What can run here, and why the rest cannot."""
    raise typer.Exit(doctor_module.run(as_json=json, support=support, aiter_releases=aiter_releases))


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
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="With --implementation aiter: check every row of its tables, time it beside aiter's fused_moe, and write a report; of the "
            "seven tuned workloads, if NAMES are left out.",
        ),
    ] = False,
    report: Annotated[pathlib.Path, typer.Option(help="Where --validate writes its report.")] = aiter_validation.REPORT,
) -> None:
    """Check and time workloads: one row for each implementation, and plain JAX."""
    if validate:
        if implementation != [aiter_validation.IMPLEMENTATION] or bridge is not None or csv is not None:
            raise typer.BadParameter(
                f"--validate takes --implementation {aiter_validation.IMPLEMENTATION}, NAMES, --repeats and --report, and no other option."
            )
        raise typer.Exit(aiter_validation.run(names or (), repeats=repeats, path=report))
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
    key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A problem that has no name, as the key of its row: {','.join(table.KEY_COLUMNS)}. May be repeated.",
            callback=_known_key,
        ),
    ] = None,
    repeats: Repeats = None,
) -> None:
    """Measure all configs of an implementation, and keep the winners as table rows."""
    keys = [each.split(",") for each in key or ()]
    chosen = names or (() if keys else CPU_WORKLOADS)
    raise typer.Exit(search.run(chosen, implementation, out, keys=keys, repeats=repeats))


@app.command()
def convert(
    source: Annotated[pathlib.Path, typer.Argument(help="A folder, .safetensors or .gguf file with the checkpoint.")],
    destination: Annotated[pathlib.Path, typer.Argument(help="The folder to write.")],
    to: Annotated[
        str, typer.Option(help=f"Format: {', '.join(write.FORMATS)}.", callback=_one_of(write.FORMATS, "format"))
    ],
    layers: Annotated[
        str | None,
        typer.Option(
            help="Such as 0,3-5: only the experts and routers of these, without the rest of the model.",
            callback=_check_numbers,
        ),
    ] = None,
    scale_rule: Annotated[
        str | None,
        typer.Option(
            help=f"For experts in floats: {', '.join(SCALE_RULES)}. even, if left out.",
            callback=_one_of(SCALE_RULES, "scale rule"),
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Declare the weights fit for activations that are not quantized.")
    ] = False,
    max_shard_bytes: Annotated[int, typer.Option(min=1, help="Size beyond which a new file is begun.")] = (
        write.MAX_SHARD_BYTES
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at the destination.")] = False,
) -> None:
    """Write a checkpoint in another format: packed experts keep their bytes, experts in floats are quantized."""
    raise typer.Exit(
        convert_module.run(
            source, destination, to=to, layers=_numbers(layers), scale_rule=scale_rule, weights_only=weights_only,
            max_shard_bytes=max_shard_bytes, overwrite=overwrite,
        )
    )  # fmt: skip
