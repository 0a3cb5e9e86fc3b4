"""The file layer on good files: which files are taken, what a tensor's bytes are, and names as the inverse of patterns."""

import json
import os
import struct
import sys

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(__file__))
import synthetic

from jax_mxfp4_moe.checkpoint import names, open_checkpoint
from jax_mxfp4_moe.checkpoint.files import DTYPES, MXFP4_BLOCKS, expect


def write(path, tensors, metadata=None):
    path.write_bytes(synthetic.safetensors_bytes(tensors, metadata))
    return path


def tensor(dtype, *shape, seed=0):
    """Random bytes of any dtype, F4 and F6 included."""
    storage = DTYPES[dtype]
    nbytes = int(np.prod(shape)) // storage.elements * storage.nbytes
    return synthetic.Tensor(dtype, shape, np.random.default_rng(seed).bytes(nbytes))


A, B = tensor("U8", 4, 6), tensor("BF16", 3, 2, 4, seed=1)


# --- tensors ---------------------------------------------------------------------------------------------------------

NUMPY = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32, "I32": np.int32, "U64": np.uint64,
    "I64": np.int64, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
}  # fmt: skip


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {MXFP4_BLOCKS}))
def test_every_dtype_is_read_as_numpy_or_as_bytes(dtype, tmp_path):
    stored = tensor(dtype, 5, 3, 8)
    # One byte before it: tensors need not be aligned.
    opened = open_checkpoint(write(tmp_path / "model.safetensors", {"odd": tensor("U8", 1), "t": stored}))
    found = opened["t"]
    assert (found.name, found.dtype, found.shape) == ("t", dtype, (5, 3, 8))
    assert found.bytes.dtype == np.uint8
    assert found.bytes.tobytes() == stored.data
    array = found.read()
    assert array.dtype == NUMPY.get(dtype, np.uint8)
    last = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}.get(dtype, 8)
    assert array.shape == (5, 3, last)
    assert array.tobytes() == stored.data
    assert found.read(1, 3).shape == (2, 3, last)
    assert found.read(1, 3).tobytes() == array[1:3].tobytes() == found.read(stop=3)[1:].tobytes()
    assert found.read(5).shape == (0, 3, last)


def test_views_are_maps_that_cannot_be_written(tmp_path):
    opened = open_checkpoint(write(tmp_path / "model.safetensors", {"a": A}))
    for view in (opened["a"].bytes, opened["a"].read(), opened["a"].read(1, 2)):
        assert type(view) is np.ndarray
        base = view
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert isinstance(base, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 5), (3, 2), (5, None)])
def test_rows_out_of_range_are_refused(start, stop, tmp_path):
    opened = open_checkpoint(write(tmp_path / "model.safetensors", {"a": A, "scalar": tensor("F32")}))
    with pytest.raises(
        ValueError, match=r"tensor 'a' U8 \[4, 6\] in .*model.safetensors: entries .* asked for; expected a range"
    ):
        opened["a"].read(start, stop)
    with pytest.raises(ValueError, match="within the first axis"):
        opened["scalar"].read(0, 1)
    assert opened["scalar"].read().shape == ()


def test_vectors_empty_tensors_and_odd_names(tmp_path):
    stored = {
        "v": tensor("F32", 7),
        "none": tensor("F32", 0, 3),
        "rows of none": tensor("BF16", 3, 0),
        "": A,
        "ü\n.weight": B,
    }
    opened = open_checkpoint(write(tmp_path / "model.safetensors", stored))
    assert opened["v"].read(2, 4).tobytes() == stored["v"].data[8:16]
    assert opened["none"].read().shape == (0, 3)
    assert opened["rows of none"].read(1, 2).shape == (1, 0)
    assert {name: found.bytes.tobytes() for name, found in opened.items()} == {n: t.data for n, t in stored.items()}


def test_expect_names_what_was_found_and_what_was_expected(tmp_path):
    a = open_checkpoint(write(tmp_path / "model.safetensors", {"a": A}))["a"]
    assert expect(a, ("U8", "I8"), (None, 6)) is a is expect(a, ("U8",))
    for dtypes, shape, told in (
        (("F32",), None, r"expected F32\. "),
        (("U8", "I8"), (4, 7), r"expected U8 or I8 \[4, 7\]\. "),
        (("U8",), (4, 6, None), r"expected U8 \[4, 6, any\]\. "),
    ):
        with pytest.raises(ValueError, match=r"^tensor 'a' U8 \[4, 6\] in .*model.safetensors: found; " + told):
            expect(a, dtypes, shape)


# --- which files -----------------------------------------------------------------------------------------------------


def test_a_file_and_its_folder_are_one(tmp_path):
    file = write(tmp_path / "model.safetensors", {"a": A, "b": B}, {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    by_file, by_folder = open_checkpoint(str(file)), open_checkpoint(tmp_path)
    assert dict(by_file) == dict(by_folder)
    assert by_file.config == by_folder.config == {"model_type": "x"}
    assert (by_file.path, by_folder.path, by_file.files) == (file, tmp_path, (file,))
    assert len(by_folder) == 2
    assert "c" not in by_folder
    assert repr(by_folder) == f"Checkpoint('{tmp_path}', 2 tensors in 1 safetensors files)"


def test_files_without_an_index_are_joined_unless_one_is_the_model(tmp_path):
    write(tmp_path / "part-1.safetensors", {"a": A})
    write(tmp_path / "part-2.safetensors", {"b": B})
    assert open_checkpoint(tmp_path).keys() == {"a", "b"}
    write(tmp_path / "model.safetensors", {"c": B})
    assert open_checkpoint(tmp_path).keys() == {"c"}


def test_the_index_of_the_model_goes_before_others(tmp_path):
    write(tmp_path / "part-1.safetensors", {"a": A, "b": B})
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text(
            json.dumps({"weight_map": {name: "part-1.safetensors"}})
        )
    with pytest.raises(
        ValueError,
        match=r"has 2 index files, a.safetensors.index.json, b.safetensors.index.json; expected one, or one named",
    ):
        open_checkpoint(tmp_path)
    os.rename(tmp_path / "b.safetensors.index.json", tmp_path / "model.safetensors.index.json")
    assert open_checkpoint(tmp_path).keys() == {"b"}


def test_links_are_followed(tmp_path):
    """As a download cache lays them out: names in one folder, contents in another."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs" / "0123", {"a": A})
    os.symlink("../blobs/0123", tmp_path / "snapshot" / "model.safetensors")
    assert open_checkpoint(tmp_path / "snapshot")["a"].bytes.tobytes() == A.data


def test_nothing_to_open(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no/such given, which does not exist; expected a folder or a file of tensors"
    ):
        open_checkpoint("no/such")
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(ValueError, match=r"has no tensors among its 1 entries; .* Was the download completed\?"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        ValueError,
        match=r"pytorch_model.bin: .* only be read by unpickling, which runs code .* Convert it where you trust it",
    ):
        open_checkpoint(tmp_path)


# --- GGUF ------------------------------------------------------------------------------------------------------------


def test_gguf_is_known_by_its_content_and_written_by_another_library(tmp_path):
    library = pytest.importorskip("gguf")
    made = synthetic.gguf(tmp_path / "model")
    renamed = made.path.rename(tmp_path / "model" / "anything.safetensors")
    opened = open_checkpoint(renamed)
    assert opened.container == "gguf"
    assert opened.config["gpt-oss.expert_count"] == 3
    assert opened.config["tokenizer.ggml.tokens"] is None
    reader = library.GGUFReader(renamed)
    assert opened.keys() == {found.name for found in reader.tensors}
    for found in reader.tensors:
        mine = opened[found.name]
        assert mine.shape == tuple(int(n) for n in reversed(found.shape))
        assert mine.bytes.tobytes() == found.data.tobytes()
        np.testing.assert_array_equal(mine.read(), np.asarray(found.data))


def test_gguf_types_that_are_not_read_have_bytes_only(tmp_path):
    library = pytest.importorskip("gguf")
    writer = library.GGUFWriter(tmp_path / "model.gguf", "x")
    blocks = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    writer.add_tensor("q", blocks, raw_dtype=library.GGMLQuantizationType.Q8_0)
    writer.add_tensor("f", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = open_checkpoint(tmp_path)
    assert opened["q"].dtype == "ggml type 8"
    assert opened["q"].shape == (2, 32)
    assert opened["q"].bytes[:68].tobytes() == blocks.tobytes()
    with pytest.raises(
        ValueError,
        match=r"tensor 'q' ggml type 8 \[2, 32\] in .*: asked for; expected one of .* does not read that type",
    ):
        opened["q"].read()
    np.testing.assert_array_equal(opened["f"].read(), np.ones((2, 3)))


def test_parts_of_a_split_gguf_are_joined(tmp_path):
    library = pytest.importorskip("gguf")
    for part in range(2):
        writer = library.GGUFWriter(tmp_path / f"model-{part + 1:05d}-of-00002.gguf", "x")
        writer.add_uint16("split.count", 2)
        writer.add_tensor(f"t{part}", np.full((2, 3), part, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert open_checkpoint(tmp_path).keys() == {"t0", "t1"}
    with pytest.raises(
        ValueError, match=r"is 1 of 2 parts of a checkpoint; expected all of them. Give the path of a folder"
    ):
        open_checkpoint(tmp_path / "model-00001-of-00002.gguf")


def test_big_endian_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ValueError, match=r"GGUF version 50331648 found; expected 2 or 3 in little-endian order"):
        open_checkpoint(tmp_path)


# --- names -----------------------------------------------------------------------------------------------------------

TABLES = {
    name: table
    for name, table in vars(names).items()
    if name.isupper() and isinstance(table, dict) and not name.startswith("_")
}
TEMPLATES = [(n, t) for n, table in TABLES.items() for parts in table.values() for t in parts if t]
TEMPLATES += [
    (f"shared {n}", t) for n in ("QUARK", "GGUF") for parts in names.shared(TABLES[n]).values() for t in parts if t
]
TEMPLATES += [("router", t) for r in names.ROUTERS for t in (r.weight, r.bias, *r.correction_bias) if t]


def test_all_tables_are_tried():
    assert {
        "GPT_OSS",
        "GPT_OSS_ORIGINAL",
        "QUARK",
        "COMPRESSED_TENSORS",
        "DEEPSEEK_V4",
        "GGUF",
        "DENSE_STACKED",
    } <= TABLES.keys()


@pytest.mark.parametrize("root", ["", "model.", "language_model.model."])
def test_pattern_is_the_inverse_of_fill(root):
    for table, template in TEMPLATES:
        fields = {"root": root, "layer": 10, "block": "block_sparse_moe", "expert": 207}
        name = names.fill(template, **fields)
        match = names.pattern(template).fullmatch(name)
        assert match, (table, template)
        assert all(match[key] == str(fields[key]) for key in match.groupdict()), (table, match.groupdict())
        assert names.layer_of(name) == 10


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.03.mlp.experts.1.up_proj.weight",
        "model.layers.3.mlp.experts.01.up_proj.weight",
        "model.layers.3.mlp.experts.1.up_proj.weight_2",
        "model.layers.3.mlp.experts..up_proj.weight",
        "modellayers.3.mlp.experts.1.up_proj.weight",
        "model.layers.-3.mlp.experts.1.up_proj.weight",
        "model.layers.3.other.experts.1.up_proj.weight",
        "model.layers.3.mlp.experts.99999999.up_proj.weight",
        "model.layers.3.mlp.experts.\u0661.up_proj.weight",
    ],
)
def test_names_that_only_look_alike_do_not_match(name):
    assert names.pattern(names.QUARK["up"].codes).fullmatch(name) is None


def test_layers_of_a_checkpoint(tmp_path):
    stored = dict.fromkeys(
        ["embed", "model.layers.10.a", "model.layers.2.a", "blk.2.b", "layers.x.c", "model.layers.2"], A
    )
    opened = open_checkpoint(write(tmp_path / "model.safetensors", stored))
    assert list(opened.layers.items()) == [(2, ("model.layers.2.a", "blk.2.b")), (10, ("model.layers.10.a",))]
