"""Pages under docs/ say what is so: figures are those that their scripts print, names are those of the code."""

import importlib.util
import inspect
import pathlib
import re

import pytest

from jax_mxfp4_moe import MoeWeights, mxfp4_moe, topk_routing
from jax_mxfp4_moe.problem import ACTIVATION_DEFAULTS
from jax_mxfp4_moe.route import SCORINGS

ROOT = pathlib.Path(__file__).parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def first_column(section: str) -> set[str]:
    """The words in backticks in the first cell of every row."""
    return {word for row in re.findall(r"^\| ([^|]*`[^|]*) \|", section, re.M) for word in re.findall(r"`(\w+)", row)}


def test_error_sizes_are_those_that_the_script_prints():
    spec = importlib.util.spec_from_file_location("numerics_script", ROOT / "benchmarks" / "numerics.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    lines = page("numerics.md").splitlines()
    for table in (script.numbers_table(), script.layer_table()):
        start = lines.index(table[0])
        assert lines[start : start + len(table)] == table


def test_numerics_lists_every_activation_and_scoring():
    found = sections(page("numerics.md"))
    assert set(ACTIVATION_DEFAULTS) <= first_column(found["The layer"])
    assert first_column(found["Routing"]) - {"scoring"} == set(SCORINGS)


@pytest.mark.parametrize(
    ("title", "function"), [("Routing: `topk_routing`", topk_routing), ("The layer: `mxfp4_moe`", mxfp4_moe)]
)
def test_migration_names_what_exists(title, function):
    words = first_column(sections(page("migration.md"))[title]) - {"weights"}
    assert words
    assert words <= set(inspect.signature(function).parameters)


def test_migration_names_every_activation_and_part_of_the_weights():
    found = sections(page("migration.md"))
    assert first_column(found["Activations"]) == set(ACTIVATION_DEFAULTS)
    for part in re.findall(r"`weights\.(\w+)`", page("migration.md")):
        assert part in inspect.signature(MoeWeights).parameters
