"""The doctor tells the truth about this process, and needs nothing beyond JAX."""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from jax_mxfp4_moe import device, doctor
from jax_mxfp4_moe.implementations import IMPLEMENTATIONS, torch_call
from jax_mxfp4_moe.implementations.aiter import known_releases, tables

ROOT = pathlib.Path(__file__).parents[1]


def without(*packages):
    """The start of a program in which these packages are absent."""
    return f"""
import importlib.util, sys
absent = {packages!r}
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] in absent else find_spec(name, *rest)
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    )


def test_report_is_of_this_process(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    found = doctor.report()
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["triton"] == doctor.NOT_INSTALLED or importlib.metadata.version("triton")
    assert found["devices"]["platforms"] == list(device.platforms())
    assert found["implementations"]["xla"] == dict.fromkeys(device.platforms())
    assert set(found["implementations"]) == set(IMPLEMENTATIONS)
    assert found["bridge"]["why_not"] == torch_call.why_not("eager") == found["bridge"]["bridges"]["eager"]
    assert found["bridge"]["bridges"]["callback"] is None
    assert found["variables"]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert found["variables"]["HIP_VISIBLE_DEVICES"] is None


def test_text_tells_every_reason(monkeypatch):
    monkeypatch.setattr(
        IMPLEMENTATIONS["torch"], "why_not", lambda problem, platform: f"dislikes {platform}", raising=False
    )
    monkeypatch.setattr(torch_call, "why_not", lambda bridge: "is out of order" if bridge == "graph" else None)
    shown = re.sub(r" +", " ", doctor.text(doctor.report()))
    for platform in device.platforms():
        assert f"torch on {platform} dislikes {platform}" in shown
        assert f"xla on {platform} usable" in shown
    assert "bridge graph is out of order" in shown
    for name in (*doctor.PACKAGES, *doctor.VARIABLES):
        assert name in shown


def test_status_says_whether_anything_can_run(monkeypatch, capsys):
    assert doctor.run(as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["devices"]["error"] is None
    for name in IMPLEMENTATIONS:
        monkeypatch.setattr(IMPLEMENTATIONS[name], "why_not", lambda problem, platform: "is ill", raising=False)
    assert doctor.run() == 1


def test_tables_are_listed_and_a_damaged_one_is_named(monkeypatch, tmp_path):
    good = f"{','.join(doctor.table.KEY_COLUMNS)},config_tile_rows\n{'1,' * len(doctor.table.KEY_COLUMNS)}8\n"
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(doctor.table, "TABLES", shipped)
    for folder, arch, content in (
        (tmp_path, "cpu", "token,expert\n1,2\n"),
        (tmp_path, "sm_0", good),
        (shipped, "cpu", good),
    ):
        (folder / arch).mkdir(parents=True)
        (folder / arch / "xla.csv").write_text(content)
    monkeypatch.setenv("JAX_MXFP4_MOE_TABLES", str(tmp_path))
    bad, other, *listed = doctor.report()["tables"]
    assert bad["used_here"]
    assert "model_dim" in bad["error"]
    assert not other["used_here"]
    assert other["error"] is None
    assert other["rows"] > 0
    assert [(t["rows"], t["used_here"]) for t in listed] == [(1, True)]


def test_conflicting_hip_runtimes_are_told_before_aiter_runs(monkeypatch):
    maps = "".join(f"7f00-7f01 r-xp 0 00:01 1   {path}\n" for path in ("/a/libamdhip64.so.6", "/b/libamdhip64.so.7"))
    seen = device.hip_runtimes(maps), device.hip_runtime_conflict(maps)
    monkeypatch.setattr(device, "hip_runtimes", lambda: seen[0])
    monkeypatch.setattr(device, "hip_runtime_conflict", lambda: seen[1])
    found = doctor.report()
    assert found["hip_runtimes"]["loaded"] == ["/a/libamdhip64.so.6", "/b/libamdhip64.so.7"]
    shown = re.sub(r" +", " ", doctor.text(found))
    assert "HIP runtimes\n loaded /a/libamdhip64.so.6, /b/libamdhip64.so.7\n CONFLICT needs one HIP runtime" in shown


def test_without_aiter_there_is_nothing_about_its_rows():
    found = doctor.report()
    if device.platforms() != ("cpu",):
        pytest.skip("a device may have a usable aiter")
    assert found["aiter"] is None
    assert "HIP runtimes\n  loaded  none" in doctor.text(found)


@pytest.mark.parametrize(("profile", "flydsl"), [("v0.1.11", False), ("v0.1.17", True)])
def test_every_aiter_row_has_its_verdict(profile, flydsl, monkeypatch):
    pytest.importorskip("torch")
    if device.platforms() != ("cpu",):
        pytest.skip("a simulation runs on a CPU")
    import aiter_sim

    monkeypatch.delenv(tables.CONFIG_VARIABLE, raising=False)
    with aiter_sim.installed(profile, flydsl=flydsl) as sim:
        assert sim.aiter.__simulated__
        found = doctor.report()
    assert found["aiter"]["facts"]["version"] == profile.removeprefix("v")
    assert found["aiter"]["facts"]["simulated"] is True
    rows = found["aiter"]["rows"]
    for preset in tables.SEEDS:
        mine = {name: told for name, told in rows.items() if name.startswith(f"{preset} ")}
        assert len(mine) == len(tables.preset_rows(preset)) == 7
        assert [told for told in mine.values() if told.startswith("usable")] == [
            "usable, eager"
        ]  # M16 E257, with ksplit 2
        policies = [row.dispatch_policy for row in tables.preset_rows(preset)]
        for told, policy in zip(mine.values(), policies, strict=True):  # which rows of this release need not allocate
            assert told.endswith(", eager or graph") == (
                "Runs" in told and not flydsl and "ksplit 2" not in told and policy != 2
            ), told
        refused = next(told for name, told in mine.items() if "M128 E257" in name)
        assert refused.startswith("refused: moe_ck2stages_gemm1_256x128")
        assert refused.endswith(
            "FlyDSL2 t16x128x128_atomic_sbm32, eager" if flydsl else "CK2 256x32x128x128_1x4, eager or graph"
        )
    assert sum(name.startswith("default ") for name in rows) > 15
    shown = doctor.text(found)
    assert all(name in shown and told in shown for name, told in rows.items())
    assert "\nRows of aiter, run eagerly; 'graph': recorded too, with bridge='graph' and even + half_away\n" in shown


def test_shipped_aiter_tables_are_listed(monkeypatch):
    monkeypatch.delenv("JAX_MXFP4_MOE_TABLES", raising=False)
    listed = {pathlib.Path(t["path"]).name: t for t in doctor.report()["tables"] if "gfx950" in t["path"]}
    for name, rows in (
        ("aiter.csv", len(tables.default_rows())),
        ("aiter.seed_dispatch.csv", 7),
        ("aiter.seed_block_m.csv", 7),
    ):
        assert (listed[name]["rows"], listed[name]["error"]) == (rows, None)


def test_tables_of_aiter_releases_are_printed(capsys):
    assert doctor.run(aiter_releases=True) == 0
    assert capsys.readouterr().out.strip() == known_releases.text()


def test_works_without_any_extra():
    done = run(
        without("torch", "typer", "rich", "flax", "triton", "aiter")
        + "from jax_mxfp4_moe.__main__ import main\nsys.exit(main(['doctor']))"
    )
    assert done.returncode == 0, done.stderr
    shown = re.sub(r" +", " ", done.stdout)
    assert "torch on cpu is not installed: pip install 'jax_mxfp4_moe[torch]'" in shown


def test_loads_no_torch_on_a_cpu():
    done = run(
        "import sys\nfrom jax_mxfp4_moe import doctor\ndoctor.report()\nprint('torch' in sys.modules)",
        JAX_PLATFORMS="cpu",
    )
    assert done.stdout.strip() == "False", done.stderr


def test_a_missing_device_is_a_finding():
    done = run("import sys\nfrom jax_mxfp4_moe import doctor\nsys.exit(doctor.run())", JAX_PLATFORMS="nonsense")
    assert done.returncode == 1, done.stderr
    assert "nonsense" in done.stdout
    assert "JAX_PLATFORMS" in done.stdout


def test_support_table_has_a_cell_for_each_pair(monkeypatch):
    monkeypatch.setattr(
        IMPLEMENTATIONS["torch"], "why_not", lambda problem, platform: f"needs torch 1.2+x on {platform}", raising=False
    )
    lines = doctor.support_table().splitlines()
    assert lines[0] == "| | cpu | cuda | rocm | tpu |"
    assert "| `xla` | yes | yes | yes | yes |" in lines
    assert "| `torch` | needs torch on cpu | needs torch on cuda | needs torch on rocm | needs torch on tpu |" in lines


def test_readme_shows_the_support_table():
    readme = ROOT / "README.md"
    if not readme.is_file() or doctor.SUPPORT_BEGIN not in readme.read_text(encoding="utf-8"):
        pytest.skip("README.md has no support table")
    torch = pytest.importorskip("torch")
    if device.platforms() != ("cpu",) or torch.version.cuda or torch.version.hip:
        pytest.skip("the table is that of a CPU machine with a CPU build of torch")
    shown = readme.read_text(encoding="utf-8").split(doctor.SUPPORT_BEGIN)[1].split(doctor.SUPPORT_END)[0]
    assert shown.strip() == doctor.support_table(), "run: python -m jax_mxfp4_moe doctor --support"
