"""Tables of aiter rows: what is in ours, what is read of others', which rows are refused on which release, and which is chosen."""

import contextlib
import csv
import dataclasses
import itertools
import pathlib
import re

import pytest

pytest.importorskip("torch")
import aiter_sim

from jax_mxfp4_moe import workloads
from jax_mxfp4_moe.implementations.aiter import known_releases, names, release, tables
from jax_mxfp4_moe.implementations.aiter.known_releases import RELEASES, with_flydsl
from jax_mxfp4_moe.implementations.aiter.release import FLYDSL_T16, Release
from jax_mxfp4_moe.problem import MoeProblem
from jax_mxfp4_moe.tuning import table

ROOT = pathlib.Path(__file__).parents[2]
BY_VERSION = {known.version: known for known in RELEASES}
V9, V10, V11, V12, V13, V13P1, V14, V16, V17 = (
    BY_VERSION[v]
    for v in (
        "v0.1.9", "v0.1.10", "v0.1.11", "v0.1.12", "v0.1.13", "v0.1.13.post1", "v0.1.14, v0.1.15", "v0.1.16", "v0.1.17",
    )
)  # fmt: skip
CASES = [pytest.param(known, id=what) for what, known in known_releases.cases()]

CK1, CK2 = ((lambda tile, stage=stage: names.ck_name(stage, tile)) for stage in (1, 2))
FLY1, FLY2 = "flydsl_moe1_afp4_wfp4_bf16_t{}".format, "flydsl_moe2_afp4_wfp4_bf16_t{}".format
SHAPES = [
    (16, 256, 257),
    (128, 256, 257),
    (512, 256, 257),
    (16, 512, 33),
    (128, 512, 33),
    (512, 512, 33),
    (512, 2048, 33),
]


NATIVE = {  # experts, intermediate, slots -> us of 4 to 2048 tokens by aiter's newer pipeline, as its pull requests report them
    (257, 256, 9): (33.4, 43.0, 51.0, 66.7, 98.1, 111.8, 144.2, 197.7, 265.1, 415.5),
    (257, 512, 9): (44.0, 56.5, 96.0, 118.4, 161.0, 206.9, 240.0, 302.7, 378.1, 534.5),
    (32, 2048, 8): (91.1, 103.0, 125.6, 145.7, 164.5, 239.0, 274.9, 423.1, 538.2, 924.8),
}


def row(block_m=32, k1=None, k2=None, *, token=128, **more):
    k1 = CK1("256x32x128x128_1x4") if k1 is None else k1
    k2 = CK2("256x32x128x128_1x4") if k2 is None else k2
    sizes = token, 7168, more.pop("inter_dim", 512), 33, 9
    return tables.Row(*sizes, block_m, more.pop("ksplit", 0), k1, k2, **more)


def of_shape(name="r257i256_m16", **changes):
    return dataclasses.replace(workloads.get(name).problem, scale_rule="even", rounding="half_away", **changes)


def select(problem, installed, preset=None, token=None, registry=()):
    """Without an aiter: every name counts as registered."""
    return tables.select(problem, installed, preset, token=token or problem.tokens, registry=registry or Everything())


class Everything:
    def __contains__(self, name):
        return True


@pytest.fixture(autouse=True)
def no_aiter(monkeypatch):
    """No aiter, and no tables but the shipped ones."""
    monkeypatch.delenv(tables.CONFIG_VARIABLE, raising=False)
    monkeypatch.delenv(table.USER_TABLES_VARIABLE, raising=False)
    monkeypatch.setattr(tables, "own_rows", lambda: ())


# --- what is shipped -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "policies"), [("seed_dispatch", (2, 0, 0, 0, 2, 0, 0)), ("seed_block_m", (0,) * 7)])
def test_aiter_seeds_are_as_the_program_was_written(preset, policies):
    big = "moe_ck2stages_gemm1_256x128x128x128_1x4_MulABScaleShuffled_v3_Nswizzle0_Quant3_MulRoutedWeight0_silu_FP4X2_FP4X2_B16"
    rows = tables.preset_rows(preset)
    assert [(r.token, r.inter_dim, r.expert) for r in rows] == SHAPES
    assert [(r.block_m, r.ksplit) for r in rows] == [(16, 2), (32, 0), (32, 0), (32, 2), (32, 0), (64, 0), (32, 0)]
    assert [r.dispatch_policy for r in rows] == list(policies)
    assert all((r.kernel_name1, r.kernel_name2) == (("", "") if r.ksplit else (big, FLYDSL_T16)) for r in rows)
    assert all((r.model_dim, r.topk, r.run_1stage) == (7168, 9, 0) for r in rows)


def test_aiter_default_table_has_the_recorded_figures():
    rows = tables.default_rows()
    kernels_alone = [(r.token, r.expert, r.us) for r in rows if r.us]
    assert kernels_alone == [
        (16, 257, 65.4857), (16, 257, 83.4771), (16, 257, 68.7036), (128, 257, 141.947), (128, 257, 139.8588),
        (512, 257, 161.5139), (512, 257, 167.9011),
    ]  # fmt: skip
    reference = {(r.token, r.inter_dim, r.expert): r.layer_us for r in rows if r.layer_us and not r.kernel_name1}
    assert reference == dict(zip(SHAPES, (152.7, 239.0, 336.5, 106.2, 141.1, 225.0, 380.4), strict=True))
    for sizes, us in NATIVE.items():
        found = [
            (r.token, r.layer_us)
            for r in rows
            if r.layer_us and r.kernel_name1 and (r.expert, r.inter_dim, r.topk) == sizes
        ]
        assert found == list(zip((4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), us, strict=True))
    assert sum(bool(r.layer_us and r.kernel_name1) for r in rows) == 30
    assert all(r.source and r.model_dim == 7168 for r in rows)


def test_aiter_default_rows_are_right_on_the_releases_they_were_recorded_on():
    recorded = 0
    for _, installed in known_releases.cases():
        installed = dataclasses.replace(installed, version=installed.version.split(",")[0].split(" ")[0])
        for r in tables.default_rows():
            if tables.recorded_on(r, installed) and (
                installed.flydsl or "flydsl" not in r.kernel_name1 + r.kernel_name2
            ):
                assert tables.verdict(r, installed) is None, (r, installed)
                recorded += 1
    assert recorded > 20


def test_aiter_tables_have_the_columns_that_aiter_reads():
    for path in sorted((table.TABLES / "gfx950").glob("aiter*.csv")):
        with path.open(newline="") as file:
            columns = csv.DictReader(file).fieldnames
        needed = (
            "cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1,block_m,"
            "ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage,tflops,bw"
        )
        assert set(needed.split(",")) <= set(columns)
        assert "_tag" not in columns  # some releases pass tagged rows over
        assert columns[0] == "gfx"


# --- reading ---------------------------------------------------------------------------------------------------------

AITERS_OWN = """cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,doweight_stage1,\
block_m,ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage,tflops,bw,_tag
256,16,7168,256,257,9,ActivationType.Silu,torch.bfloat16,{fp4},{fp4},QuantType.per_1x32,{true},{false},\
32,0,1.0,{k1},0.0%,2.0,{k2},1.3%,3.5,0,1.0,1.0,{tag}
256,16,7168,256,257,9,ActivationType.Silu,torch.bfloat16,torch.float8_e4m3fn,torch.float8_e4m3fn,QuantType.per_Token,1,0,\
junk,0,1.0,,0.0%,2.0,,1.3%,3.5,0,1.0,1.0,
"""


def own_csv(path, **fields):
    fields = {"fp4": tables.FP4, "true": 1, "false": 0, "k1": "a", "k2": "b", "tag": "", **fields}
    path.write_text(AITERS_OWN.format(**fields))
    return path


@pytest.mark.parametrize(("true", "false"), [(1, 0), (True, False), ("1.0", "0.0")])
def test_aiters_own_files_are_read_as_they_are(tmp_path, true, false):
    path = own_csv(tmp_path / "tuned_fmoe.csv", true=true, false=false, k1="nan", tag="flydsl_fallback")
    (found,) = tables.read(path)
    assert found.key == (
        256, 16, 7168, 256, 257, 9, "ActivationType.Silu", "torch.bfloat16", tables.FP4, tables.FP4, "QuantType.per_1x32", 1, 0,
    )  # fmt: skip
    assert (found.block_m, found.ksplit, found.kernel_name1, found.kernel_name2, found.us) == (32, 0, "", "b", 3.5)
    assert (found.tag, found.gfx, found.pipeline, found.dispatch_policy) == (
        "flydsl_fallback",
        "gfx950",
        "two_stage",
        0,
    )
    assert found.table == "tuned_fmoe.csv line 2"


def test_aiter_files_with_an_architecture_of_another_device_are_passed_over(tmp_path):
    path = own_csv(tmp_path / "a.csv")
    lines = path.read_text().splitlines()
    for gfx, count in (("gfx950", 1), ("", 1), ("0", 1), ("gfx942", 0)):
        path = tmp_path / f"with_{gfx}.csv"
        path.write_text("\n".join([f"gfx,{lines[0]}", f"{gfx},{lines[1]}"]))
        assert len(tables.read(path)) == count


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("block_m", "blocks"), r"tuned.csv: columns \['block_m'\] are missing; expected aiter's own: cu_num, token"),
        ((",32,0,1.0,", ",-32,0,1.0,"), r"tuned.csv line 2: block_m='-32' given; expected a whole number"),
        ((",32,0,1.0,", ",,0,1.0,"), "block_m='' given; expected a whole number"),
        ((",32,0,1.0,", ",32.5,0,1.0,"), "block_m='32.5' given; expected a whole number"),
        (("3.5,0,1.0,1.0,\n", "soon,0,1.0,1.0,\n"), "us='soon' given; expected microseconds"),
        (("_tag", "dispatch_policy"), "dispatch_policy=3 given; expected 0, 1 or 2"),
        (("_tag", "pipeline"), "pipeline='3' given; expected 'two_stage' or 'vendor'"),
    ],
)  # fmt: skip
def test_a_damaged_aiter_table_is_named(tmp_path, change, told):
    path = own_csv(tmp_path / "tuned.csv", tag=3 if change[0] == "_tag" else "")
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ValueError, match=f"tuning table .*{told}"):
        tables.read(path)


@pytest.mark.parametrize(
    ("tag_filter", "read"),
    [("none", ["", "x", "flydsl_fallback"]), ("untagged", [""]), ("not_fallback", ["", "x"])],
)  # fmt: skip
def test_aiter_tags_are_read_as_the_release_reads_them(tag_filter, read):
    found = [t for t in ("", "x", "flydsl_fallback") if tables.is_read(row(tag=t), Release(tag_filter=tag_filter))]
    assert found == read


# --- refusals --------------------------------------------------------------------------------------------------------

F11, F12, F13, F14, F16, F17 = map(with_flydsl, (V11, V12, V13, V14, V16, V17))


@pytest.mark.parametrize(
    ("asked", "installed", "told"),
    [
        # CK: the tile must have block_m rows.
        (row(32, CK1("256x128x128x128_1x4")), V11, "gemm1_256x128.*multiplies 128 rows by one expert's weights, but .* blocks of 32"),
        (row(64, CK1("256x128x128x128_1x4"), CK2("256x64x128x128_1x4")), V11, "multiplies 128 rows .* blocks of 64"),
        (row(64, CK1("256x64x128x128_1x4"), CK2("64x32x32x128_1x1")), V11, "gemm2_64x32.* multiplies 32 rows .* blocks of 64"),
        (row(16), V11, "multiplies 32 rows .* blocks of 16"),
        (row(k2=CK1("256x32x128x128_1x4")), V11, "is a kernel of stage 1 and was given for stage 2"),
        (row(k1=CK1("256x32x128x128_1x4").replace("Shuffled", "")), V11, "reads weights that are not shuffled"),
        (row(k1=CK1("256x32x128x128_1x4").replace("silu", "gelu")), V11, "is not among aiter's CK kernels for MXFP4"),
        (row(k1=CK1("64x32x32x128_1x1")), dataclasses.replace(V9, trailing=("bias1", "bias2")), "came with v0.1.9"),
        (row(k1=""), V11, "stage 1 has no kernel name, and aiter reads an empty field as NaN"),
        (row(k2="fmoe_bf16"), V11, "fmoe_bf16 is neither a CK nor a FlyDSL kernel"),
        (row(run_1stage=1), V11, "run_1stage is a kernel of one stage"),
        # FlyDSL: there or not.
        (row(k2=FLY2("32x128x256_atomic")), V10, "needs FlyDSL for stage 2, .* install the flydsl that it names"),
        (row(k2=FLY2("32x128x256_atomic")), V11, "needs FlyDSL for stage 2"),
        (row(k1=FLY1("32x64x256_w3")), F11, "needs FlyDSL for stage 1"),
        # FlyDSL: tiles against blocks.
        (row(k2=FLY2("64x128x256_atomic")), F11, "has tiles of 64 rows and expects rows sorted by 64, found block_m 32"),
        (row(k2=FLY2("16x128x256_atomic")), F11, "would skip its products with tiles of 16 rows"),
        (row(k2=FLYDSL_T16), F11, "would skip its products"),
        (row(k2=FLY2("16x128x256_atomic")), F12, "expects rows sorted by 16, found block_m 32"),
        (row(k2=FLY2("32x128x256_atomic_sbm64")), F12, "expects rows sorted by 64, found block_m 32"),
        (row(k1=FLY1("64x64x256_w3")), F12, "has tiles of 64 rows"),
        (row(64, FLY1("32x64x256_w3_sbm64"), CK2("256x64x128x128_1x4")), F12, "has tiles of 32 rows and expects rows sorted by 32"),
        (row(16, FLY1("16x64x256_w3"), FLY2("16x128x256_atomic")), F12, "t16x64x256_w3 has tiles of 16 rows, .* needs 32 or more"),
        (row(k2=f"{FLYDSL_T16}_sbm32"), F12, "can be compiled by this aiter for intermediate sizes of at most 256, found 512"),
        (row(k2=f"{FLYDSL_T16}_sbm64", inter_dim=256), F12, "expects rows sorted by 64, found block_m 32"),
        (row(k2=f"{FLYDSL_T16}_bnt2_sbm32", inter_dim=256), F12, "has tile_k 128, for which this aiter has no right kernel"),
        (row(k2=FLY2("32x128x128_atomic"), inter_dim=256), F12, "has tile_k 128"),
        (row(k2=f"{FLYDSL_T16}_sbm32", inter_dim=256), F13, "has tile_k 128"),
        (row(k2=f"{FLYDSL_T16}_sbm32", inter_dim=256), F14, "has tile_k 128"),
        (row(k2=FLYDSL_T16), F16, "expects rows sorted by 16, found block_m 32"),
        # FlyDSL: other forms.
        (row(k1=FLY1("32x64x256_w3_fp4")), F16, "quantizes inside stage 1"),
        (row(k1=FLY1("32x64x256_fq")), F12, "quantizes inside stage 1"),
        (row(k1=FLY1("32x64x256_gui")), F16, "reads gate and up rows in turn"),
        (row(k1="flydsl_moe1_afp8_wfp4_bf16_t32x64x256"), F16, "multiplies fp8 by fp4, expected fp4 by fp4"),
        (row(k1=FLY2("32x128x256_atomic")), F16, "is a kernel of stage 2 and was given for stage 1"),
        (row(k2="flydsl_mxmoe_g2_a4w4_32x256x256_atomic"), F17, "follows a protocol of its own"),
        (row(k2="flydsl_moe2_layout_afp4_wfp4_bf16_t32x128x128_atomic_sbm32"), F17, "follows a protocol of its own"),
        (row(k2=FLY2("32x128x256_reduce")), F12, "sums over every slot, .* use one with _atomic"),
        # Split K.
        (row(16, "", "", ksplit=2, token=16), V9, "ksplit=2 needs the split-K kernels"),
        (row(16, "", "", ksplit=2, token=16), V13P1, "ksplit=2: this aiter takes .* alternating groups of 16 gate and 16 up rows"),
        (row(32, "", "", ksplit=2, token=16), V11, "block_m=32: with ksplit > 1 aiter sorts 16 tokens by 16"),
        (row(16, FLY1("32x64x256"), "", ksplit=2, token=16), F16, "aiter would run those, and not split K"),
        (row(256, FLY1("256x64x256"), FLY2("256x64x256_atomic")), F16, "block_m=256 is none of aiter's block sizes: 16, 32, 64, 128"),
    ],
)  # fmt: skip
def test_aiter_refuses_rows_that_would_be_wrong(asked, installed, told):
    found = tables.verdict(asked, installed)
    assert found is not None
    assert re.search(told, found), found


@pytest.mark.parametrize(
    ("asked", "installed"),
    [
        (row(), V9),
        (row(128, CK1("256x128x128x128_1x4"), CK2("64x128x128x128_1x1")), V11),
        (row(k2=FLY2("32x128x256_atomic")), F11),
        (row(k1=FLY1("32x64x256_w4"), k2=FLY2("16x256x256_atomic_sbm32")), F12),
        (row(k1=FLY1("32x64x256_w3_kb4_go"), k2=FLY2("32x256x256_atomic_bnt2_persist")), F12),
        (row(k1=FLY1("32x128x256_w3"), k2=FLY2("32x128x256_reduce")), F17),
        (row(k2=f"{FLYDSL_T16}_sbm32"), F16),
        (row(k2=f"{FLYDSL_T16}_sbm32", inter_dim=256), F12),
        (row(64, CK1("256x64x128x128_1x4"), f"{FLYDSL_T16}_sbm64", inter_dim=256), F12),
        (row(16, "", "", ksplit=2, token=16), V10),
        (row(16, "placeholder", "placeholder", ksplit=2, token=2047), V14),
        (row(32, "placeholder", "placeholder", ksplit=2, token=2048), V14),
        (row(64, "placeholder", "placeholder", ksplit=2, token=16384), V14),
        (row(0, "", "", pipeline="vendor"), V9),
    ],
)  # fmt: skip
def test_aiter_accepts_rows_that_are_right(asked, installed):
    assert tables.verdict(asked, installed) is None
    assert tables.nearest_legal(asked, installed) is asked


def test_an_aiter_kernel_must_be_registered():
    asked = row(k2=f"{FLYDSL_T16}_sbm32")
    twin = FLYDSL_T16.replace("_atomic", "_reduce")
    assert "is not registered in this aiter" in tables.verdict(asked, F16, registry={})
    assert tables.verdict(asked, F16, registry={FLYDSL_T16}) is None
    assert "is not registered in this aiter" in tables.verdict(asked, F16, registry={twin})
    other = row(k2=FLY2("32x128x256_atomic"))
    assert "is not registered" in tables.verdict(other, F16, registry={FLY2("32x128x256_reduce")})
    short = dataclasses.replace(asked, inter_dim=256)
    assert tables.verdict(short, F12, registry={}) is None  # it will be
    assert "is not registered in this aiter" in tables.verdict(short, F16, registry={})


def test_both_faults_of_an_aiter_row_are_told():
    found = tables.verdict(tables.preset_rows("seed_dispatch")[1], V11)
    assert "gemm1_256x128" in found
    assert "needs FlyDSL" in found


# --- replacements ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", CASES)
@pytest.mark.parametrize("preset", tables.SEEDS)
def test_aiter_seed_rows_are_right_after_replacement(preset, installed):
    for asked in tables.preset_rows(preset):
        runs = tables.nearest_legal(asked, installed)
        assert tables.verdict(runs, installed) is None
        assert runs.key == asked.key
        assert runs.dispatch_policy == asked.dispatch_policy
        assert runs.replaces == (tables.verdict(asked, installed) or "")
        assert runs.ksplit or runs.block_m == asked.block_m or asked.ksplit
        if asked.ksplit and installed.split_k_is_right:
            assert (runs.ksplit, runs.block_m) == (2, 16)


@pytest.mark.parametrize(
    ("asked", "installed", "block_m", "k1", "k2"),
    [
        ((32, CK1("256x128x128x128_1x4"), FLYDSL_T16), V11, 32, CK1("256x32x128x128_1x4"), CK2("256x32x128x128_1x4")),
        ((64, CK1("256x128x128x128_1x4"), FLYDSL_T16), F11, 64, CK1("256x64x128x128_1x4"), FLY2("64x128x256_atomic")),
        ((32, CK1("256x128x128x128_1x4"), FLYDSL_T16), F12, 32, CK1("256x32x128x128_1x4"), FLY2("16x128x256_atomic_sbm32")),
        ((32, CK1("256x128x128x128_1x4"), FLYDSL_T16), F14, 32, CK1("256x32x128x128_1x4"), FLY2("16x128x256_atomic_sbm32")),
        ((32, CK1("256x128x128x128_1x4"), FLYDSL_T16), F16, 32, CK1("256x32x128x128_1x4"), f"{FLYDSL_T16}_sbm32"),
        ((32, FLY1("32x64x256_w3_fp4"), FLY2("32x128x256_atomic")), F16, 32, FLY1("32x64x256_w3"), FLY2("32x128x256_atomic")),
        ((64, FLY1("32x64x256_w3"), FLY2("64x128x256_atomic")), F12, 64, FLY1("64x64x256_w3"), FLY2("64x128x256_atomic")),
        ((16, FLY1("16x64x256_w3"), FLY2("16x128x256_atomic")), F12, 32, FLY1("32x64x256_w3"), FLY2("16x128x256_atomic_sbm32")),
        ((32, FLY1("32x64x256_w3"), CK2("64x32x32x128_1x1")), V12, 32, CK1("256x32x128x128_1x4"), CK2("64x32x32x128_1x1")),
        ((16, CK1("256x32x128x128_1x4"), CK2("256x32x128x128_1x4")), V11, 32, CK1("256x32x128x128_1x4"), CK2("256x32x128x128_1x4")),
    ],
)  # fmt: skip
def test_the_nearest_aiter_row_keeps_what_it_can(asked, installed, block_m, k1, k2):
    runs = tables.nearest_legal(row(*asked), installed)
    assert (runs.block_m, runs.kernel_name1, runs.kernel_name2) == (block_m, k1, k2)
    assert runs.replaces
    assert "in the place of a row that is refused: " in runs.config().source


def test_the_tuned_programs_stage_2_is_kept_where_it_can_be_registered_for_aiter():
    """Of its own rows those with an intermediate size of 256; what runs for them says so."""
    asked = {r.key[1:5:2]: r for r in tables.preset_rows("seed_dispatch") if not r.ksplit}
    for known, kept in ((F12, {(128, 256), (512, 256)}), (F14, set()), (F16, set(asked))):
        runs = {key: tables.nearest_legal(r, known) for key, r in asked.items()}
        assert {key for key, r in runs.items() if r.kernel_name2.startswith(FLYDSL_T16)} == kept
        told = known_releases.verdicts(known, {})
        for key, r in asked.items():
            line = next(
                t for n, t in told.items() if n.startswith(f"seed_dispatch M{r.token} E{r.expert} I{r.inter_dim}:")
            )
            assert line.endswith("(registered by us), eager") == (known is F12 and key in kept), line
    asked = dataclasses.replace(
        asked[128, 256], kernel_name1=CK1("256x32x128x128_1x4"), kernel_name2=f"{FLYDSL_T16}_sbm32"
    )
    assert known_releases.describe(asked, F12).endswith("_sbm32 (registered by us)")


@pytest.mark.parametrize("installed", CASES)
def test_every_aiter_row_has_a_line_of_its_own(installed):
    """Two rows of one shape may both be `fused_moe`'s; those of certain kernels are not said to be usable wherever it is."""
    every = [*itertools.chain(*map(tables.preset_rows, tables.SEEDS)), *tables.default_rows()]
    told = known_releases.verdicts(installed, None)
    assert len(told) == len(every)
    native = [line for name, line in told.items() if name.endswith("aiter's fused_moe by flydsl_mxmoe_g1_a4w4")]
    assert len(native) == 30
    assert set(native) == {"not used here, unless aiter's own table names these kernels for the shape; eager"}
    assert told["default M128 E33 I512: aiter's fused_moe"] == "usable, eager"


def test_only_a_stage_2_of_aiter_is_told_what_rows_are_sorted_by():
    """Stage 1 takes the suffix for nothing, and steps by its own tile."""
    first = names.alternatives(1, FLY1("32x64x256_w3"), 64, F12)
    second = names.alternatives(2, FLY2("32x128x256_atomic"), 64, F12)
    assert FLY1("64x64x256_w3") in first
    assert not any("_sbm" in name for name in first)
    assert FLY2("32x128x256_atomic_sbm64") in second


# --- the choice ------------------------------------------------------------------------------------------------------


def at(installed, version):
    return dataclasses.replace(installed, version=version)


@pytest.mark.parametrize(
    ("installed", "us"),
    [
        (at(V9, "0.1.9"), 68.7036),  # recorded elsewhere, but the only one that is right here
        (at(V11, "0.1.11"), 68.7036), (at(F11, "0.1.11.post1"), 68.7036), (at(F12, "0.1.12"), 83.4771), (at(V12, "0.1.12"), 68.7036),
        (at(F16, "0.1.16.post6"), 83.4771), (at(F17, "0.1.17"), 65.4857),
        (at(F17, "0.1.21.dev3+g01234"), 65.4857), (at(F17, "unknown"), 65.4857),
    ],
)  # fmt: skip
def test_aiter_prefers_a_figure_of_the_installed_release(installed, us):
    chosen = select(of_shape(), installed)
    assert chosen.us == us
    assert f"{us:g} us for both products" in chosen.config().source
    assert "dsv3_fp4_tuned_fmoe.csv" in chosen.config().source


def test_an_aiter_row_of_another_precision_is_not_eligible():
    installed = at(F17, "0.1.17")
    assert select(of_shape(), installed).ksplit == 0
    kept = select(of_shape(activation_quant=None), installed)
    assert (kept.ksplit, kept.block_m, kept.dispatch_policy) == (2, 16, 2)
    assert select(of_shape(activation_quant=None), V13P1) is None
    assert select(of_shape("r257i256_m128", activation_quant=None), installed) is None


def test_an_aiter_preset_may_be_more_precise_than_asked_but_not_less():
    with pytest.warns(
        tables.RowReplacedWarning,
        match=r"the row of aiter.seed_dispatch.csv line 5 is not run as it stands: block_m=32",
    ):
        assert select(of_shape("r33i512_m16"), V11, "seed_dispatch").ksplit == 2
    assert select(of_shape(), V11, "seed_dispatch").ksplit == 2
    with pytest.warns(tables.RowReplacedWarning):
        assert select(of_shape(), V13P1, "seed_block_m").activation_quant == "mxfp4"
    with pytest.raises(
        NotImplementedError,
        match=r"config='seed_dispatch' given with activation_quant=None, and .* Pass activation_quant='mxfp4'",
    ):
        select(of_shape("r257i256_m128", activation_quant=None), V11, "seed_dispatch")


def test_unknown_aiter_presets_and_shapes_are_told():
    with pytest.raises(
        ValueError, match="config='fast' given; expected one of seed_dispatch, seed_block_m, vendor, own_choice"
    ):
        select(of_shape(), V11, "fast")
    with pytest.raises(
        ValueError,
        match=r"config='seed_dispatch' given for MoeProblem.*expected one of its shapes.*16x7168x256 E257 K9, 128x",
    ):
        select(of_shape("oss_m16"), V11, "seed_dispatch")


def test_aiter_vendor_and_own_choice_have_every_shape():
    problem = MoeProblem(5, 2, 4, 300, 500, activation_quant="mxfp4")
    vendor, own = (select(problem, V11, preset, token=8) for preset in ("vendor", "own_choice"))
    assert (vendor.pipeline, vendor.key[1:6]) == ("vendor", (8, 512, 512, 4, 2))
    assert (own.pipeline, own.block_m, own.ksplit) == ("two_stage", 0, 0)
    kept = select(dataclasses.replace(problem, activation_quant=None), V11, "own_choice", token=8)
    assert kept.ksplit == 2


@pytest.mark.parametrize(
    ("installed", "token", "rule"),
    [
        (V11, 1024, ("even", "half_away")), (V11, 2048, ("half_up", "nearest_even")),
        (BY_VERSION["v0.1.12.post2"], 16, ("half_up", "nearest_even")), (V13, 16, ("half_up", "nearest_even")),
        (V16, 16, ("rceil", "nearest_even")),
        (Release(), 16, None),
    ],
)  # fmt: skip
def test_aiters_own_rule_of_rounding(installed, token, rule):
    assert tables.vendor_rule(installed, token) == rule
    assert tables.vendor_rule(installed, token, FLY1("32x64x256_w3")) == rule
    assert tables.vendor_rule(installed, token, FLY1("32x64x256_w3_fp4")) is None  # by a rule of the kernel's own
    assert tables.vendor_rule(installed, token, FLY1("32x64x256_fq")) is None


def test_the_layer_goes_to_aiter_only_with_the_rule_that_was_asked_for():
    problem = of_shape("r33i512_m128")
    chosen = select(problem, V11)
    assert (chosen.pipeline, chosen.layer_us) == ("vendor", 141.1)
    assert "141.1 us a layer" in chosen.config().source
    assert select(dataclasses.replace(problem, scale_rule="half_up", rounding="nearest_even"), V11) is None
    assert select(problem, V16) is None
    assert select(dataclasses.replace(problem, scale_rule="rceil", rounding="nearest_even"), V16).pipeline == "vendor"


def test_aiters_own_rule_goes_by_the_tokens_there_are(monkeypatch):
    """v0.1.11 looks 1500 tokens up as 1024, and rounds them as more than 1024."""
    monkeypatch.setattr(tables, "default_rows", lambda: (row(0, "", "", token=1024, pipeline="vendor"),))
    problem = dataclasses.replace(of_shape("r33i512_m512"), tokens=1500)
    assert select(problem, V11, token=1024) is None
    rule = {"scale_rule": "half_up", "rounding": "nearest_even"}
    assert select(dataclasses.replace(problem, **rule), V11, token=1024).pipeline == "vendor"


def test_a_native_figure_counts_only_where_aiters_own_table_names_those_kernels(monkeypatch):
    problem = dataclasses.replace(of_shape(), scale_rule="rceil", rounding="nearest_even")
    installed = at(F17, "0.1.20.post1")
    assert select(problem, installed).us == 65.4857
    blank = tables.blank(problem, 16)
    own = dataclasses.replace(
        blank,
        block_m=16,
        kernel_name1="flydsl_mxmoe_g1_a4w4_16x256x256",
        kernel_name2="flydsl_mxmoe_g2_a4w4_16x256x256",
    )
    monkeypatch.setattr(tables, "own_rows", lambda: (own,))
    chosen = select(problem, installed)
    assert (chosen.pipeline, chosen.layer_us) == ("vendor", 51.0)
    assert select(of_shape(), installed).us == 65.4857  # another rule


@pytest.mark.parametrize(("experts", "intermediate", "top_k"), NATIVE)
@pytest.mark.parametrize(("tokens", "token", "place"), [(3, 4, 0), (16, 16, 2), (100, 128, 5), (2000, 2048, 9)])
def test_the_layer_goes_to_aiters_newer_pipeline_where_its_figure_is_the_best(
    experts, intermediate, top_k, tokens, token, place, monkeypatch
):
    """On the releases that have it, if their table names it for the shape; the source says whose figure it is."""
    problem = MoeProblem(
        tokens,
        top_k,
        experts,
        7168,
        intermediate,
        activation_quant="mxfp4",
        scale_rule="rceil",
        rounding="nearest_even",
    )
    blank = dataclasses.replace(tables.blank(problem, token), block_m=16)
    for prefix, picked in (
        ("flydsl_mxmoe_g{}_a4w4_16x256x256", True),
        ("flydsl_moe{}_afp4_wfp4_bf16_t32x128x256", False),
    ):
        own = dataclasses.replace(blank, kernel_name1=prefix.format(1), kernel_name2=prefix.format(2))
        monkeypatch.setattr(tables, "own_rows", lambda own=own: (own,))
        for version in ("0.1.16.post6", "0.1.18", "0.1.20.post1", "0.1.21.dev3"):
            chosen = select(problem, at(F17, version), token=token)
            by_figure = chosen is not None and chosen.layer_us == NATIVE[experts, intermediate, top_k][place]
            assert by_figure == picked
            if picked:
                assert chosen.pipeline == "vendor"
                assert "ROCm/aiter pull requests 3470, 3788, 3832, MI355X: " in chosen.config().source
                assert f"{chosen.layer_us:g} us a layer" in chosen.config().source
        asked = dataclasses.replace(problem, scale_rule="even", rounding="half_away")
        assert getattr(select(asked, at(F17, "0.1.18"), token=token), "pipeline", None) != "vendor"  # another rule


def test_an_aiter_figure_of_the_layer_counts_only_where_its_rule_is_known(monkeypatch):
    """The shipped row names no kernels; aiter's own row for the shape may name one that rounds by a rule of its own."""
    problem = dataclasses.replace(of_shape("r33i512_m128"), scale_rule="rceil", rounding="nearest_even")
    blank = dataclasses.replace(tables.blank(problem, 128), block_m=32, kernel_name2=FLY2("32x128x256_atomic"))
    for first, pipeline in ((FLY1("32x64x256_w3_fp4"), "two_stage"), (FLY1("32x64x256_w3"), "vendor")):
        own = dataclasses.replace(blank, kernel_name1=first)
        monkeypatch.setattr(tables, "own_rows", lambda own=own: (own,))
        assert select(problem, F17).pipeline == pipeline


def test_a_users_row_of_the_newer_pipeline_is_for_aiters_fused_moe_only_where_it_has_that_row(monkeypatch):
    """A table that aiter does not read does not make its `fused_moe` run those kernels; nor does it round by another rule."""
    problem = dataclasses.replace(of_shape(), scale_rule="rceil", rounding="nearest_even")
    native = {f"kernel_name{n}": f"flydsl_mxmoe_g{n}_a4w4_16x256x256" for n in (1, 2)}
    asked = dataclasses.replace(tables.blank(problem, 16), block_m=16, **native)
    monkeypatch.setattr(tables, "user_rows", lambda: (asked,))
    other = dataclasses.replace(asked, kernel_name1="flydsl_mxmoe_g1_a4w4_32x256x256")
    by_another_rule = dataclasses.replace(problem, scale_rule="even", rounding="half_away")
    for own, given, pipeline in (
        ((asked,), problem, "vendor"),
        ((), problem, "two_stage"),
        ((other,), problem, "two_stage"),
        ((asked,), by_another_rule, "two_stage"),
    ):
        monkeypatch.setattr(tables, "own_rows", lambda own=own: own)
        told = (
            contextlib.nullcontext()
            if pipeline == "vendor"
            else pytest.warns(tables.RowReplacedWarning, match="protocol of its own")
        )
        with told:
            assert select(given, at(F17, "0.1.18")).pipeline == pipeline


def test_aiters_own_row_that_only_fused_moe_can_run(monkeypatch):
    problem = MoeProblem(64, 8, 32, 4096, 512, activation_quant="mxfp4", scale_rule="rceil", rounding="nearest_even")
    blank = dataclasses.replace(tables.blank(problem, 64), block_m=32, kernel_name2=FLY2("32x128x256_atomic"))

    def chosen(first, asked=problem):
        monkeypatch.setattr(tables, "own_rows", lambda: (dataclasses.replace(blank, kernel_name1=first),))
        return select(asked, F17)

    assert chosen("flydsl_mxmoe_g1_a4w4_16x256x256").pipeline == "vendor"
    by_another_rule = dataclasses.replace(problem, scale_rule="even", rounding="half_away")
    for first, asked in (
        ("32x64x256_w3_gui", problem),  # wrong in fused_moe as well, which has these weights
        ("32x64x256_w3_gui", by_another_rule),
        ("32x64x256_w3_fp4", problem),
    ):  # the latter has none known
        runs = chosen(FLY1(first), asked)
        assert (runs.pipeline, runs.kernel_name1) == ("two_stage", FLY1("32x64x256_w3"))
    assert chosen(FLY1("32x64x256_w3")) is None  # aiter's own choice is as good


@pytest.mark.parametrize("way", ["folder", "variable"])
def test_rows_of_the_user_come_first(tmp_path, monkeypatch, way):
    folder = tmp_path / "gfx950"
    folder.mkdir()
    path = own_csv(folder / "aiter.csv", k1=CK1("256x32x128x128_1x4"), k2=CK2("256x32x128x128_1x4"))
    monkeypatch.setenv(
        *(
            (table.USER_TABLES_VARIABLE, str(tmp_path))
            if way == "folder"
            else (tables.CONFIG_VARIABLE, f"{path}:/absent.csv")
        )
    )
    assert select(of_shape(), at(F17, "0.1.17")).kernel_name1 == CK1("256x32x128x128_1x4")
    own_csv(path, k1=CK1("256x128x128x128_1x4"), k2=CK2("256x32x128x128_1x4"))
    with pytest.warns(
        tables.RowReplacedWarning, match=r"aiter.csv line 2 is not run as it stands: .* multiplies 128 rows"
    ):
        chosen = select(of_shape(), at(F17, "0.1.17"))
    assert (chosen.block_m, chosen.kernel_name1) == (32, CK1("256x32x128x128_1x4"))
    own_csv(path, tag="flydsl_fallback")
    assert select(of_shape(), at(F17, "0.1.17")).us == 65.4857


def test_a_file_that_was_written_for_aiter_is_not_taken_for_the_users(tmp_path, monkeypatch):
    path = own_csv(
        tmp_path / f"{tables.WRITTEN_PREFIX}0123.csv", k1=CK1("256x32x128x128_1x4"), k2=CK2("256x32x128x128_1x4")
    )
    monkeypatch.setenv(tables.CONFIG_VARIABLE, str(path))
    assert tables.user_rows() == ()


@pytest.mark.parametrize(
    "change", [{"activation": "gelu"}, {"dtype": "float16"}, {"top_k": 8}, {"apply_router_weight_on_input": True}]
)
def test_an_aiter_row_of_another_problem_is_not_used(change):
    assert select(of_shape(**change), V11) is None


def test_padded_dimensions_are_the_ones_looked_up():
    assert select(of_shape(hidden=7000, intermediate=200), V11).us == 68.7036


# --- releases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "flydsl"), aiter_sim.CASES)
def test_known_aiter_releases_are_what_is_detected(profile, flydsl):
    """What the documentation says of releases is what would be seen on them."""
    with aiter_sim.installed(profile, flydsl=flydsl):
        seen = release.load()
    if "bias1" in seen.trailing:
        pytest.skip("older than the releases that are listed")
    base = profile.split(".post3")[0] if profile.startswith("v0.1.10") else profile
    known = next((k for k in RELEASES if base in k.version.split(", ")), RELEASES[-1])
    assert base in known.version or base.startswith(("v0.1.2", "HEAD"))
    known = with_flydsl(known) if flydsl else known
    ignored = {"version", "simulated", "metadata", "trailing"}
    differing = {
        f.name: (getattr(known, f.name), getattr(seen, f.name))
        for f in dataclasses.fields(Release)
        if f.name not in ignored and getattr(known, f.name) != getattr(seen, f.name)
    }
    assert not differing
    assert seen.trailing[: len(known.trailing)] == known.trailing


def test_documentation_shows_the_tables_of_aiter_releases():
    page = ROOT / "docs" / "aiter_releases.md"
    shown = page.read_text(encoding="utf-8").split("<!-- releases -->")[1].split("<!-- /releases -->")[0]
    assert shown.strip() == known_releases.text(), "run: python -m jax_mxfp4_moe doctor --aiter-releases"
