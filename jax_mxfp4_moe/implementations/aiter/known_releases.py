"""The releases of aiter that are known, as `release.detect` sees them, and the tables of docs/aiter_releases.md.

Nothing here decides what runs: that is asked of the installed aiter. `python -m jax_mxfp4_moe doctor --aiter-releases` prints the tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

from jax_mxfp4_moe.implementations.aiter import kernels, tables
from jax_mxfp4_moe.implementations.aiter.release import FLYDSL_T16_MAX_INTERMEDIATE, Release
from jax_mxfp4_moe.implementations.aiter.tables import Row

_9 = Release(
    "v0.1.9", triton_quant="aiter.ops.triton.fused_mxfp4_quant", hip_quant="separate", hip_scale_rule="half_up"
)
_10 = dataclasses.replace(
    _9,
    version="v0.1.10",
    trailing=("is_shuffled",),
    triton_quant="aiter.ops.triton.quant.fused_mxfp4_quant",
    split_k="halves",
)
_11 = dataclasses.replace(_10, version="v0.1.11", tag_filter="untagged", flydsl_stages=(2,))
_12 = dataclasses.replace(_11, version="v0.1.12", flydsl_stages=(1, 2), flydsl_sort_block_m=True)
_12_2 = dataclasses.replace(_12, version="v0.1.12.post2", hip_quant="fused")
_13 = dataclasses.replace(_12_2, version="v0.1.13")
_13_1 = dataclasses.replace(_13, version="v0.1.13.post1", split_k="interleaved")
_14 = dataclasses.replace(
    _13_1,
    version="v0.1.14, v0.1.15",
    trailing=("is_shuffled", "gate_mode"),
    table="pair",
    key_activations=("enum", "str"),
    split_k="choice",
)
_16 = dataclasses.replace(
    _14,
    version="v0.1.16",
    trailing=(*_14.trailing, "is_ep"),
    key_has_gfx=True,
    hip_scale_rule="rceil",
    flydsl_t16=True,
    flydsl_overrides=True,
)
_16_6 = dataclasses.replace(_16, version="v0.1.16.post6", tag_filter="not_fallback")
_17 = dataclasses.replace(_16, version="v0.1.17", trailing=(*_16.trailing, "has_stage2_bias"))
# The registry cannot be imported without flydsl.
_18 = dataclasses.replace(_17, version="v0.1.18, v0.1.19, v0.1.19.post2", tag_filter="not_fallback", flydsl_t16=False)
_20 = dataclasses.replace(_18, version="v0.1.20 and later", trailing=(*_18.trailing, "opus_weights_shuffled"))

RELEASES: tuple[Release, ...] = (_9, _10, _11, _12, _12_2, _13, _13_1, _14, _16, _16_6, _17, _18, _20)
"""One entry for each generation of the interface, without flydsl; each from its first release to the next entry's."""


def with_flydsl(release: Release) -> Release:
    """The same release where flydsl is installed."""
    return dataclasses.replace(
        release, flydsl=True, flydsl_t16=release.key_has_gfx, flydsl_t16_registrable=release in (_12, _12_2)
    )


def cases() -> list[tuple[str, Release]]:
    """(what is installed, release) for every release without flydsl, and with it where it can use it."""
    found = []
    for release in RELEASES:
        found.append((release.version, release))
        if release.flydsl_stages:
            found.append((f"{release.version} + flydsl", with_flydsl(release)))
    return found


def gives() -> str:
    """The Markdown table of what each release gives."""
    split_k = {None: "no", "halves": "yes", "choice": "yes, told the order", "interleaved": "no: wrong order"}
    rows = [
        [
            release.version,
            "; ".join(f"{scale} + {rounding} ({how})" for (scale, rounding), how in release.activation_rules.items()),
            " and ".join(f"stage {stage}" for stage in release.flydsl_stages) or "none",
            _t16(release),
            split_k[release.split_k],
            "yes, undone for our rows" if release.flydsl_overrides else "no",
            f"{release.table}, {release.key_length} parts",
        ]
        for release in RELEASES
    ]
    heads = (
        "aiter",
        "activation rules",
        "FlyDSL kernels",
        "FlyDSL t16x128x128",
        "ksplit > 1",
        "replaces rows by FlyDSL",
        "table in memory",
    )
    return _markdown(heads, rows)


def _t16(release: Release) -> str:
    """Who registers the stage-2 kernel of the tuned program, where flydsl is installed."""
    release = with_flydsl(release)
    if release.flydsl_t16_registrable:
        return f"registered by us, intermediate up to {FLYDSL_T16_MAX_INTERMEDIATE}"
    return "registered by aiter" if release.flydsl_t16 else "refused" if release.flydsl_stages else "none"


def validity(preset: str) -> str:
    """The Markdown table of a preset: for each release and row what runs, and what was refused."""
    rows_of_preset = tables.preset_rows(preset)
    lines: dict[tuple[str, ...], list[str]] = {}
    for what, release in cases():
        cells = tuple(_cell(row, release) for row in rows_of_preset)
        lines.setdefault(cells, []).append(what)
    heads = ["aiter", *(f"M{row.token} E{row.expert} I{row.inter_dim}" for row in rows_of_preset)]
    return _markdown(heads, [["<br>".join(what), *cells] for cells, what in lines.items()])


def _cell(row: Row, release: Release) -> str:
    """What runs in the place of a row, shortened."""
    runs = tables.nearest_legal(row, release)
    return ("as written: " if not runs.replaces else "") + describe(runs, release)


def describe(row: Row, release: Release | None = None) -> str:
    """What a row runs, shortened; with a release also whether its kernel has to be added to aiter's registry."""
    if row.pipeline == tables.VENDOR:
        return "aiter's fused_moe" + (f" by {row.kernel_name1}" if row.kernel_name1 else "")
    if row.ksplit > 1:
        return f"block_m {row.block_m}, ksplit {row.ksplit}"
    ours = release is not None and kernels.is_registered_by_us(row.kernel_name2, release)
    second = short_name(row.kernel_name2) + (" (registered by us)" if ours else "")
    return f"block_m {row.block_m}, {short_name(row.kernel_name1)}, {second}"


def verdicts(release: Release, registry: Container[str] | None) -> dict[str, str]:
    """For every row of the presets and of the default table, what becomes of it on `release`."""
    found = {}
    for preset, rows in [*((p, tables.preset_rows(p)) for p in tables.SEEDS), ("default", tables.default_rows())]:
        for row in rows:
            name = f"{preset} M{row.token} E{row.expert} I{row.inter_dim}: {describe(row)}"
            why = tables.verdict(row, release, registry)
            if row.pipeline == tables.VENDOR and row.kernel_name1:
                found[name] = "not used here, unless aiter's own table names these kernels for the shape; eager"
            elif why is None:
                ours = kernels.is_registered_by_us(row.kernel_name2, release)
                found[name] = f"usable{', its stage 2 registered by us' if ours else ''}, {bridges(row, release)}"
            elif preset == "default":
                found[name] = f"not used here: {why}"
            else:
                runs = tables.nearest_legal(row, release, registry)
                found[name] = f"refused: {why}. Runs {describe(runs, release)}, {bridges(runs, release)}"
    return found


def bridges(row: Row, release: Release) -> str:
    """How a row reaches the device: "eager", or "eager or graph" where nothing in its calls has to allocate (with the Triton rule)."""
    by_ck = all(kernels.ck_stage_and_rows(name) for name in (row.kernel_name1, row.kernel_name2))
    two_stage = row.pipeline != tables.VENDOR and row.ksplit <= 1 and row.dispatch_policy != 2
    return "eager or graph" if by_ck and two_stage and release.triton_quant is not None else "eager"


def short_name(name: str) -> str:
    """A kernel's name less what all of them share."""
    for prefix, short in (("moe_ck2stages_gemm", "CK"), ("flydsl_moe", "FlyDSL")):
        if name.startswith(prefix):
            stage, rest = name.removeprefix(prefix).split("_", 1)
            rest = rest.split("_MulABScale")[0].removeprefix("afp4_wfp4_bf16_")
            return f"{short}{stage} {rest}"
    return name


def reasons() -> str:
    """The Markdown list of every sentence with which a row of the seeds is refused on some release, with those releases."""
    found: dict[str, list[str]] = {}
    for what, release in cases():
        for preset in tables.SEEDS:
            for row in tables.preset_rows(preset):
                for clause in (tables.verdict(row, release) or "").split("; "):
                    releases = found.setdefault(clause, [])
                    if what not in releases:
                        releases.append(what)
    found.pop("", None)
    everywhere = len(cases())
    return "\n".join(
        f"- {clause}. On {'every one' if len(releases) == everywhere else '; '.join(releases)}."
        for clause, releases in found.items()
    )


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text() -> str:
    """Everything that docs/aiter_releases.md shows between its two `releases` comments."""
    runs = [validity(preset) for preset in tables.SEEDS]
    assert len(set(runs)) == 1, "the seeds differ in more than the sorting: show a table for each"
    both = " and ".join(f'`config="{preset}"`' for preset in tables.SEEDS)
    return "\n\n".join(
        [
            "### What each release gives",
            gives(),
            f"### What runs for the rows of {both}",
            runs[0],
            policies(),
            "### Why rows are refused",
            reasons(),
        ]
    )


def policies() -> str:
    """The Markdown table of the rows' dispatch_policy, in which the seeds differ."""
    heads = [
        "dispatch_policy",
        *(f"M{row.token} E{row.expert} I{row.inter_dim}" for row in tables.preset_rows(tables.SEEDS[0])),
    ]
    return _markdown(
        heads, [[f"`{p}`", *(str(row.dispatch_policy) for row in tables.preset_rows(p))] for p in tables.SEEDS]
    )
