"""Damaged and hostile files: always a clear error that names the file, never a crash, a hang, a huge allocation or a wrong array."""

import functools
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import zipfile

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

sys.path.insert(0, os.path.dirname(__file__))
import synthetic

from jax_mxfp4_moe import checkpoint
from jax_mxfp4_moe.checkpoint import files
from jax_mxfp4_moe.checkpoint.files import open_checkpoint

HUGE = 2**62


def outcome(path):
    """Opens a checkpoint and reads all of it: the arrays as bytes, or the message of the error that was raised."""
    try:
        opened = open_checkpoint(path)
        found = {}
        for name, tensor in opened.items():
            found[name] = (tensor.dtype, tensor.shape, tensor.bytes.tobytes())
            if tensor.dtype in files.DTYPES:
                assert tensor.read().nbytes == tensor.nbytes
        return found
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
    assert len(message) < 2_000, "a hostile file fills the message"
    assert path.name in message, "the message does not name the file"
    return message


def refused(path):
    message = outcome(path)
    assert isinstance(message, str), f"was opened: {[(n, t[:2]) for n, t in message.items()]}"
    return message


TENSORS = {
    "a": synthetic.Tensor.of("U8", np.arange(64).reshape(4, 16)),
    "b.weight": synthetic.Tensor.of("BF16", np.arange(8).reshape(2, 4)),
    "c": synthetic.Tensor.of("F32", np.arange(3)),
    "e": synthetic.Tensor.of("F8_E8M0", np.arange(5)),
}
GOOD = synthetic.safetensors_bytes(TENSORS, {"format": "pt"})
HEADER_BYTES = struct.unpack("<Q", GOOD[:8])[0]
DATA = GOOD[8 + HEADER_BYTES :]


def header():
    return json.loads(GOOD[8 : 8 + HEADER_BYTES])


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


# --- safetensors -----------------------------------------------------------------------------------------------------


def test_the_good_file_is_read(file):
    file.write_bytes(GOOD)
    assert outcome(file) == {n: (t.dtype, t.shape, t.data) for n, t in TENSORS.items()}


@pytest.mark.parametrize("length", [640, 19280 + 65536], ids=["pickle", "zip"])
def test_a_header_whose_length_looks_like_another_format_is_read(length, file):
    # 640 is written b"\x80\x02", as a pickle begins; the other b"PK", as torch's archives do.
    text = GOOD[8 : 8 + HEADER_BYTES].rstrip().ljust(length)
    file.write_bytes(struct.pack("<Q", length) + text + DATA)
    assert outcome(file).keys() == TENSORS.keys()


def test_a_file_cut_anywhere_is_refused(file):
    file.write_bytes(GOOD)
    for size in reversed(range(len(GOOD))):
        os.truncate(file, size)
        refused(file)


def test_a_file_with_something_behind_its_end_is_refused(file):
    file.write_bytes(GOOD + b"\0")
    assert re.search(r"\d+ bytes found, but its header describes \d+", refused(file))


@pytest.mark.parametrize("length", [0, 1, len(GOOD) - 7, len(GOOD), 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(length, file):
    file.write_bytes(struct.pack("<Q", length) + GOOD[8:])
    refused(file)


def entry(**changes):
    """The header with one entry changed; a value None removes the field."""
    changed = header()
    changed["a"].update(changes)
    changed["a"] = {key: value for key, value in changed["a"].items() if value is not None}
    return changed


LIES = {
    "negative_size": (entry(shape=[-4, -16]), "expected at most 32 integers that are not negative"),
    "one_negative_size": (entry(shape=[-1, 64]), "not negative"),
    "huge_size": (entry(shape=[HUGE]), "takes 4611686018427387904 bytes, but data_offsets"),
    "product_wraps_to_the_right_size": (entry(shape=[2**32, 2**32, 64]), "but data_offsets"),
    "product_wraps_to_zero": (entry(shape=[2**32, 2**32], data_offsets=[0, 0]), "but data_offsets"),
    "more_than_64_bits": (entry(shape=[2**64 + 64]), "not negative"),
    "thousands_of_digits": (json.dumps(entry()).replace("[4, 16]", "[" + "9" * 4000 + "]"), "not negative"),
    "more_digits_than_python_parses": (json.dumps(entry()).replace("[4, 16]", "[" + "9" * 9000 + "]"), "not valid JSON"),
    "float_size": (entry(shape=[4.0, 16]), "not negative"),
    "true_is_no_size": (entry(shape=[True, 64]), "not negative"),
    "string_size": (entry(shape=["4", 16]), "not negative"),
    "shape_is_a_number": (entry(shape=64), "not negative"),
    "shape_is_null": (json.dumps(entry()).replace("[4, 16]", "null"), "not negative"),
    "too_many_axes": (entry(shape=[1] * 33 + [64]), "at most 32 integers"),
    "shape_of_another_size": (entry(shape=[4, 15]), "takes 60 bytes, but data_offsets [0, 64] span 64"),
    "odd_float4": (entry(dtype="F4", shape=[1, 127]), "multiple of 2"),
    "scalar_float4": (entry(dtype="F4", shape=[]), "multiple of 2"),
    "float6_of_no_whole_group": (entry(dtype="F6_E2M3", shape=[86]), "multiple of 4"),
    "unknown_dtype": (entry(dtype="F5"), "dtype F5 found; expected one of BOOL, U8"),
    "dtype_of_another_container": (entry(dtype=files.MXFP4_BLOCKS), "expected one of BOOL"),
    "dtype_is_a_number": (entry(dtype=8), "expected one of BOOL"),
    "dtype_is_a_list": (entry(dtype=["U8"]), "expected one of BOOL"),
    "dtype_is_long": (entry(dtype="U" * 5_000_000), "expected one of BOOL"),
    "offsets_reversed": (entry(data_offsets=[64, 0]), "span -64"),
    "offsets_negative": (entry(data_offsets=[-64, 0]), "two integers that are not negative"),
    "offsets_beyond_the_end": (entry(data_offsets=[10_000, 10_064]), "end beyond"),
    "offsets_wrap": (entry(data_offsets=[2**63 - 32, 2**63 + 32]), "two integers that are not negative"),
    "offsets_more_than_64_bits": (entry(data_offsets=[2**64, 2**64 + 64]), "two integers that are not negative"),
    "offsets_float": (entry(data_offsets=[0.0, 64.0]), "two integers that are not negative"),
    "offsets_three": (entry(data_offsets=[0, 32, 64]), "two integers"),
    "offsets_overlap": (entry(data_offsets=[16, 80]), "overlaps|gap"),
    "offsets_gap": ({**header(), "c": {"dtype": "F32", "shape": [2], "data_offsets": [80, 88]}}, "gap"),
    "same_range_twice": ({**header(), "d": header()["a"]}, "overlaps the one before it"),
    "field_missing": (entry(shape=None), "expected dtype, shape and data_offsets"),
    "field_too_many": (entry(strides=[16, 1]), "expected dtype, shape and data_offsets"),
    "entry_is_a_list": ({**header(), "a": [1, 2]}, "expected dtype, shape and data_offsets"),
    "metadata_is_no_table": ({**header(), "__metadata__": [1]}, "not a table of strings"),
    "metadata_holds_numbers": ({**header(), "__metadata__": {"a": 1}}, "not a table of strings"),
    "key_twice": (json.dumps(header())[:-1] + ', "a": ' + json.dumps(header()["c"]) + "}", "key 'a' appears twice"),
    "field_twice": (json.dumps(header()).replace('"dtype": "U8"', '"dtype": "U8", "dtype": "I8"'), "appears twice"),
    "not_a_number": (json.dumps(entry()).replace("[4, 16]", "[NaN, 16]"), "NaN is not a number of JSON"),
    "infinity": (json.dumps(entry()).replace("[4, 16]", "[-Infinity, 16]"), "not a number of JSON"),
    "a_float_beyond_range": (json.dumps(entry()).replace("[4, 16]", "[1e999, 16]"), "not negative"),
    "header_is_a_list": ([1, 2], "JSON list found; expected an object"),
    "header_is_a_string": ('"header"', "JSON str found"),
    "deep": ('{"a":' * 200_000 + "1" + "}" * 200_000, "not valid JSON"),
    "deep_lists": ('{"a":' + "[" * 1_000_000, "not valid JSON"),
    "cut_json": (json.dumps(header())[:-5], "not valid JSON"),
    "not_utf8": (json.dumps(header()).encode().replace(b'"a"', b'"\xff\xfe"'), "not valid JSON"),
    "long_name":
        (json.dumps(header()).replace('"a"', '"' + "a" * 1_000_000 + '"').replace("[4, 16]", "[5]"), "a name of 1000000 characters found"),
    "name_with_half_a_surrogate": (json.dumps(header()).replace('"a"', '"\\ud800"').replace("[4, 16]", "[5]"), "but data_offsets"),
    "empty": ("{}", "bytes found, but its header describes"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_lying_header_is_refused(name, file):
    text, told = LIES[name]
    file.write_bytes(synthetic.with_header(text if isinstance(text, (str, bytes)) else json.dumps(text), DATA))
    message = refused(file)
    assert re.search(told, message) or told in message, message
    message.encode()  # printable


def test_float4_and_bytes_share_a_reading(file):
    # The shape of F4 counts elements, two in a byte; NumPy has no such type.
    file.write_bytes(synthetic.with_header(json.dumps(entry(dtype="F4", shape=[4, 32])), DATA))
    tensor = open_checkpoint(file)["a"]
    assert tensor.shape == (4, 32)
    np.testing.assert_array_equal(tensor.read(), TENSORS["a"].array())
    np.testing.assert_array_equal(tensor.read(1, 3), TENSORS["a"].array()[1:3])


@hypothesis.settings(max_examples=150)
@hypothesis.given(data=st.data())
def test_any_damage_is_refused_or_harmless(tmp_path_factory, data):
    """Bytes changed, cut out or put in: if the file still opens, its tensors are ranges of its data that do not overlap."""
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1) | st.integers(0, 8 + HEADER_BYTES))
        kind = data.draw(st.sampled_from(["change", "cut", "put"]))
        if kind == "change":
            damaged[place] = data.draw(st.sampled_from(b'0123456789{}[]",:-eU\x00\xff') | st.integers(0, 255))
        elif kind == "cut":
            del damaged[place : place + data.draw(st.integers(1, 9))]
        else:
            damaged[place:place] = data.draw(st.binary(min_size=1, max_size=9))
    consistent(tmp_path_factory, bytes(damaged))


NUMBERS = st.integers(-2, 70) | st.sampled_from([2**31, 2**32, 2**63, 2**64, HUGE, -1, 0.5, 1e300, True, None, "1"])
DTYPE = st.sampled_from([*files.DTYPES, "u8", "", "F8"]) | st.integers() | st.none()
ENTRY = st.fixed_dictionaries(
    {"dtype": DTYPE, "shape": st.lists(NUMBERS, max_size=4), "data_offsets": st.lists(NUMBERS, max_size=3)}
)
VALUE = ENTRY | st.recursive(NUMBERS | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    table=st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), VALUE, max_size=4), size=st.integers(0, 80)
)
def test_any_header_is_refused_or_harmless(tmp_path_factory, table, size):
    consistent(tmp_path_factory, synthetic.with_header(json.dumps(table), bytes(range(size))))


def consistent(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    file.write_bytes(content)
    found = outcome(file)
    if not isinstance(found, str):
        (length,) = struct.unpack("<Q", content[:8])
        stored = json.loads(content[8 : 8 + length])
        rest = content[8 + length :]
        assert sum(len(data) for _, _, data in found.values()) == len(rest)
        for name, (dtype, shape, data) in found.items():
            assert (stored[name]["dtype"], tuple(stored[name]["shape"])) == (dtype, shape)
            begin, end = stored[name]["data_offsets"]
            assert data == rest[begin:end]


# --- index and folder ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret.safetensors").write_bytes(GOOD)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(GOOD)
    return folder


def index(folder, weight_map):
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    "shard",
    ["../secret.safetensors", "/etc/passwd", "sub/../../secret.safetensors", "./model-1.safetensors", "..", ".", "",
     "..\\secret.safetensors", "model-1.safetensors\0", "\0", "a" * 5_000 + "/b"],
)  # fmt: skip
def test_an_index_reaches_no_other_folder(shard, folder):
    index(folder, {"a": shard})
    message = refused(folder)
    assert "expected the plain name of a file in the same folder" in message
    assert "model.safetensors.index.json" in message


@pytest.mark.parametrize(
    ("weight_map", "told"),
    [
        ({"a": "model-2.safetensors"}, "1 of 1 shards are missing: model-2.safetensors"),
        ({"a": "x" * 300 + ".safetensors"}, "the plain name of a file"),
        ({"zzz": "model-1.safetensors"}, "tensor 'zzz' is said to be in model-1.safetensors, which does not hold it"),
        (["a"], "weight_map of type list found"),
        (None, "weight_map of type NoneType found"),
        ({"a": 1}, "weight_map"),
        ({"a": ["model-1.safetensors"]}, "weight_map"),
        ("[]", "a JSON list found; expected an object"),
        ("", "not valid JSON"),
        ('{"weight_map": {"a": "model-1.safetensors", "a": "model-1.safetensors"}}', "appears twice"),
        ("[" * 200_000, "not valid JSON"),
    ],
)
def test_a_wrong_index_is_refused(weight_map, told, folder):
    index(folder, weight_map)
    assert re.search(told, refused(folder))


def test_an_index_of_nothing_and_a_shard_that_is_a_folder_are_refused(folder):
    index(folder, {"a": "sub"})
    (folder / "sub").mkdir()
    assert "not a regular file" in refused(folder)


def test_a_pipe_is_refused_without_waiting(folder):
    os.mkfifo(folder / "pipe.safetensors")
    index(folder, {"a": "pipe.safetensors"})
    assert "not a regular file" in refused(folder)


def test_tensors_beside_the_index_are_not_taken(folder):
    (folder / "more.safetensors").write_bytes(synthetic.safetensors_bytes({"extra": TENSORS["c"]}))
    index(folder, dict.fromkeys(TENSORS, "model-1.safetensors"))
    assert outcome(folder).keys() == TENSORS.keys()


def test_the_same_tensor_in_two_files_is_refused(folder):
    (folder / "model-2.safetensors").write_bytes(GOOD)
    assert "has tensor 'a' in two files" in refused(folder)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error_and_no_crash(file):
    file.write_bytes(GOOD)
    opened = open_checkpoint(file)
    os.truncate(file, 8 + HEADER_BYTES + 10)
    with pytest.raises(ValueError, match="shorter than it was when it was opened"):
        opened["a"].read()


# --- pickles ---------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors", "model.gguf", "weights.ckpt"])
@pytest.mark.parametrize("kind", [0, 2, 3, 4, 5, "zip"])
def test_nothing_is_unpickled(kind, name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / name
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("model/data.pkl", pickle.dumps(Bomb(tmp_path / "boom")))
    else:
        file.write_bytes(pickle.dumps(Bomb(tmp_path / "boom"), protocol=kind))
    for path in (file, folder):
        message = refused(path)
        if kind or not name.endswith(("safetensors", "gguf")):
            assert "unpickling, which runs code from the file" in message
    assert not (tmp_path / "boom").exists()


# --- GGUF ------------------------------------------------------------------------------------------------------------


def gguf_string(text):
    text = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(text)) + text


def gguf_tensor(name="t", shape=(64,), kind=0, offset=0):
    return gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_file(tensors=None, metadata=(), *, magic=b"GGUF", version=3, tensor_count=None, metadata_count=None, data=256):
    """A file put together by hand. `metadata` are encoded entries; counts are true unless they are given."""
    tensors = [gguf_tensor()] if tensors is None else tensors
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(metadata) if metadata_count is None else metadata_count,
    )
    start = magic + struct.pack("<IQQ", version, *counts) + b"".join(metadata) + b"".join(tensors)
    return start + b"\0" * (-len(start) % 32) + bytes(i % 251 for i in range(data))


def gguf_value(kind, payload, key="k"):
    return gguf_string(key) + struct.pack("<I", kind) + payload


def gguf_array(kind, count, payload=b"", key="k"):
    return gguf_value(9, struct.pack("<IQ", kind, count) + payload, key)


GGUF_LIES = {
    "big_endian": (gguf_file(version=0x03000000), "version 50331648 found"),
    "version_1": (gguf_file(version=1), "GGUF version 1 found"),
    "tensor_count_huge": (gguf_file(tensor_count=2**63), "9223372036854775808 tensors announced"),
    "tensor_count_one_too_many": (gguf_file(tensor_count=2), "t"),
    "metadata_count_huge": (gguf_file(metadata_count=2**64 - 1), "18446744073709551615 metadata entries announced"),
    "name_longer_than_the_file": (gguf_file([struct.pack("<Q", 2**60) + b"t" * 24]), "bytes of a tensor name announced"),
    "key_longer_than_the_file": (gguf_file(metadata=[struct.pack("<Q", 2**60) + b"k" * 16]), "bytes of a metadata key announced"),
    "long_name": (gguf_file([gguf_tensor("t" * 100_000)]), "expected at most"),
    "axes_huge": (gguf_file([gguf_string("t") + struct.pack("<I", 2**32 - 1)]), "axes found; expected at most 32|announced"),
    "size_huge": (gguf_file([gguf_tensor(shape=(HUGE,))]), "takes 18446744073709551616 bytes|beyond"),
    "sizes_wrap": (gguf_file([gguf_tensor(shape=(2**32, 2**32, 64))]), "beyond"),
    "size_beyond_63_bits": (gguf_file([gguf_tensor(shape=(2**64 - 1,))]), "expected sizes below"),
    "offset_beyond_the_end": (gguf_file([gguf_tensor(offset=2**40)]), "beyond"),
    "offset_huge": (gguf_file([gguf_tensor(offset=2**64 - 32)]), "beyond"),
    "data_cut": (gguf_file(data=255), "beyond"),
    "overlap": (gguf_file([gguf_tensor("a", (32,)), gguf_tensor("b", (32,), offset=96)]), "beyond"),
    "block_not_whole": (gguf_file([gguf_tensor(shape=(33,), kind=39)]), "multiple of 32"),
    "block_without_axes": (gguf_file([gguf_tensor(shape=(), kind=39)]), "multiple of 32"),
    "name_twice": (gguf_file([gguf_tensor(shape=(8,)), gguf_tensor(shape=(8,), offset=32)]), "appears twice"),
    "key_twice": (gguf_file(metadata=[gguf_value(0, b"\1")] * 2), "metadata 'k' appears twice"),
    "metadata_of_unknown_type": (gguf_file(metadata=[gguf_value(13, bytes(8))]), "of type 13 found"),
    "array_of_arrays": (gguf_file(metadata=[gguf_array(9, 1, struct.pack("<IQ", 0, 0))]), "expected numbers or strings"),
    "array_count_huge": (gguf_file(metadata=[gguf_array(4, 2**62)]), "numbers of a metadata array announced"),
    "strings_count_huge": (gguf_file(metadata=[gguf_array(8, 2**61)]), "strings of a metadata array announced"),
    "string_in_array_huge": (gguf_file(metadata=[gguf_array(8, 1, struct.pack("<Q", 2**63))]), "announced"),
    "string_huge": (gguf_file(metadata=[gguf_value(8, struct.pack("<Q", 2**64 - 1))]), "bytes of a metadata string announced"),
    "alignment_0": (gguf_file(metadata=[gguf_value(4, struct.pack("<I", 0), "general.alignment")]), "expected a power of two"),
    "alignment_3": (gguf_file(metadata=[gguf_value(4, struct.pack("<I", 3), "general.alignment")]), "expected a power of two"),
    "alignment_huge": (gguf_file(metadata=[gguf_value(10, struct.pack("<Q", 2**63), "general.alignment")]), "expected a power of two"),
    "alignment_text": (gguf_file(metadata=[gguf_value(8, gguf_string("32"), "general.alignment")]), "expected a power of two"),
    "alignment_nan": (gguf_file(metadata=[gguf_value(6, struct.pack("<f", np.nan), "general.alignment")]), "expected a power of two"),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF_LIES)
def test_a_lying_gguf_header_is_refused(name, tmp_path):
    content, told = GGUF_LIES[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    message = refused(file)
    assert re.search(told, message), message


def test_a_gguf_file_by_hand_is_read(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(
        gguf_file(
            [gguf_tensor("t", (4, 8), offset=0), gguf_tensor("q", (32, 2), kind=39, offset=128)],
            [
                gguf_value(8, gguf_string("gpt-oss"), "general.architecture"),
                gguf_array(8, 2, gguf_string("a") + gguf_string("")),
            ],
            data=128 + 34,
        )
    )
    opened = open_checkpoint(file)
    assert opened.config["general.architecture"] == "gpt-oss"
    assert opened["t"].read().shape == (8, 4)
    np.testing.assert_array_equal(opened["q"].read().reshape(-1), [i % 251 for i in range(128, 162)])


def test_a_gguf_file_without_tensors_is_empty(tmp_path):
    file = tmp_path / "vocabulary.gguf"
    file.write_bytes(gguf_file([], data=0))
    assert outcome(file) == {}
    with pytest.raises(ValueError, match=r"vocabulary\.gguf has no experts in a known format"):
        checkpoint.describe(file)


def test_a_gguf_file_cut_anywhere_is_refused(tmp_path):
    good = gguf_file(metadata=[gguf_value(8, gguf_string("x")), gguf_array(4, 3, bytes(12), "l")])
    file = tmp_path / "model.gguf"
    file.write_bytes(good)
    assert len(outcome(file)) == 1
    for size in reversed(range(len(good))):
        os.truncate(file, size)
        refused(file)


@hypothesis.settings(max_examples=150)
@hypothesis.given(data=st.data())
def test_any_damage_to_gguf_is_refused_or_harmless(tmp_path_factory, data):
    good = gguf_file(
        [gguf_tensor("a", (32, 1), 39), gguf_tensor("b", (4,), 0, 32)],
        [gguf_value(4, struct.pack("<I", 32), "general.alignment"), gguf_array(8, 1, gguf_string("x"))],
        data=48,
    )
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(4, len(good) - 49))
        width = data.draw(st.sampled_from([1, 1, 4, 8]))
        damaged[place : place + width] = data.draw(st.integers(0, 40) | st.integers(0, 2 ** (8 * width) - 1)).to_bytes(
            8, "little"
        )[:width]
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(damaged)
    found = outcome(file)
    if not isinstance(found, str):
        assert sum(len(content) for _, _, content in found.values()) <= len(damaged)
        assert all(content in bytes(damaged) for _, _, content in found.values())


# --- the experts of a damaged checkpoint -----------------------------------------------------------------------------

SIZES = {"layers": 1, "experts": 2, "hidden": 64, "intermediate": 32}
MODELS = {
    "gpt_oss": synthetic.gpt_oss,
    "gpt_oss_original": synthetic.gpt_oss_original,
    "quark": functools.partial(synthetic.quark, style="qwen3"),
    "quark_gpt_oss": synthetic.quark_gpt_oss,
    "compressed_tensors": synthetic.compressed_tensors,
    "deepseek_v4": synthetic.deepseek_v4,
    "mixtral": synthetic.bfloat16,
    "gpt_oss_dequantized": synthetic.gpt_oss_dequantized,
}
# Types of the same width that cannot stand for one another, so that a wrong one has to be noticed.
OTHER_TYPES = {
    "U8": ["BOOL", "F8_E4M3"], "I8": ["BOOL", "F8_E5M2"], "F8_E8M0": ["I8", "BOOL"], "BF16": ["I16", "U16"], "F32": ["I32"],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Gives by name: the checkpoint as it was written, its experts as they load, and a folder for damaged copies of it."""
    made = {}
    for name, make in MODELS.items():
        truth = make(tmp_path_factory.mktemp(name) / "good", **SIZES)
        made[name] = (truth, checkpoint.load(truth.path, layer=0), truth.path.parent)
    return made.get  # a function: a dictionary of arrays would be printed with every failure


def other_shapes(shape):
    """Shapes of as many elements."""
    yield from ((1, *shape), (*shape, 1), (int(np.prod(shape)),), shape[::-1])
    if len(shape) > 1:
        yield (shape[0] * shape[1], *shape[2:])
        yield (shape[0] * 2, shape[1] // 2, *shape[2:])
        yield (shape[0] // 2, shape[1] * 2, *shape[2:])
        yield (*shape[:-2], shape[-2] * 2, shape[-1] // 2)


@hypothesis.settings(max_examples=200)
@hypothesis.given(data=st.data())
def test_damaged_experts_are_refused_or_loaded_as_they_were(models, data):
    truth, whole, folder = models(data.draw(st.sampled_from(sorted(MODELS))))
    tensors = dict(truth.tensors)
    name = data.draw(st.sampled_from(sorted(n for n in tensors if ".experts." in n or ".mlp.mlp" in n)))
    tensor = tensors[name]
    kind = data.draw(st.sampled_from(["drop", "shape", "type", "cut", "double", "renumber"]))
    if kind == "drop":
        del tensors[name]
    elif kind == "shape":
        same_size = [s for s in other_shapes(tensor.shape) if s != tensor.shape and np.prod(s) == np.prod(tensor.shape)]
        hypothesis.assume(same_size)
        tensors[name] = synthetic.Tensor(tensor.dtype, data.draw(st.sampled_from(same_size)), tensor.data)
    elif kind == "type":
        other = data.draw(st.sampled_from(OTHER_TYPES[tensor.dtype]))
        tensors[name] = synthetic.Tensor(other, tensor.shape, tensor.data)
    elif kind in ("cut", "double"):
        hypothesis.assume(tensor.shape)
        axis = data.draw(st.integers(0, len(tensor.shape) - 1))
        array = tensor.array()
        array = np.repeat(array, 2, axis) if kind == "double" else np.delete(array, -1, axis)
        tensors[name] = synthetic.Tensor(tensor.dtype, array.shape, array.tobytes())
    else:
        number = data.draw(st.sampled_from([2, 7, 10**5, 10**9]))
        changed = re.sub(r"experts\.\d+", f"experts.{number}", name)
        hypothesis.assume(changed != name)
        tensors[changed] = tensors.pop(name)
    damaged = folder / "damaged"
    synthetic.write_model(damaged, tensors, truth.config, shards=1)
    try:
        loaded = checkpoint.load(damaged, layer=0)
    except ValueError as error:
        message = str(error)
    else:
        if kind == "drop" and "bias" in name:  # stacked biases: a format may have them or not
            stack = "down_bias" if "down" in name or "mlp2" in name else "gate_up_bias"
            assert getattr(loaded, stack) is None
            whole = whole.replace(**{stack: None})
        assert jax.tree.structure(loaded) == jax.tree.structure(whole)
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(whole), strict=True))
        return
    assert len(message) < 2_000
    assert str(damaged) in message
    assert any(word in message for word in ("expected", "Missing", "Looked for"))


@pytest.mark.parametrize("missing", ["gate", "up", "down"])
def test_a_gguf_file_without_a_bias(missing, tmp_path):
    """A gate bias without that of up, or the other way round, can only be damage."""
    truth = synthetic.gguf(tmp_path, **SIZES)
    content = truth.path.read_bytes()
    name = f"blk.0.ffn_{missing}_exps.bias".encode()
    assert content.count(name) == 1
    truth.path.write_bytes(content.replace(name, name[:-4] + b"bios"))
    if missing == "down":
        assert checkpoint.load(truth.path, layer=0).down_bias is None
    else:
        with pytest.raises(ValueError, match=rf"blk\.0\.ffn_{missing}_exps\.bias"):
            checkpoint.load(truth.path, layer=0)


CONFIG_KEYS = [
    *(
        "num_local_experts",
        "num_experts_per_tok",
        "hidden_size",
        "hidden_act",
        "swiglu_limit",
        "model_type",
        "text_config",
    ),
    *(
        "quantization_config",
        "num_hidden_layers",
        "scoring_func",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "norm_topk_prob",
    ),
]
OTHER_KEYS = ["quant_method", "global_quant_config", "config_groups", "weight", "input_tensors", "format"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([2**31, 2**70, -(2**70), 1e308, 1.5, "", "silu", "mxfp4", "quark", "x" * 10_000]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*CONFIG_KEYS, *OTHER_KEYS]), inner, max_size=3)
    ),
    max_leaves=6,
)
CHANGES = st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON, min_size=1, max_size=3)


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    name=st.sampled_from(["gpt_oss", "quark", "compressed_tensors", "deepseek_v4", "mixtral"]), changes=CHANGES
)
def test_any_configuration_is_refused_or_understood(models, name, changes):
    """A hostile config.json gives a ValueError; where it is accepted, the bytes of the experts are still those of the file."""
    truth, whole, folder = models(name)
    damaged = folder / "configured"
    if not damaged.exists():
        synthetic.write_model(damaged, truth.tensors, None, shards=1)
    (damaged / "config.json").write_text(json.dumps({**truth.config, **changes}))
    for call in (checkpoint.describe, functools.partial(checkpoint.load, layer=0)):
        try:
            result = call(damaged)
        except ValueError as error:
            message = str(error)
        else:
            message = ""
            if hasattr(result, "gate_up") and name != "mixtral":  # a configuration may change how floats are quantized
                assert np.array_equal(result.gate_up.codes, whole.gate_up.codes)
                assert np.array_equal(result.down.scales, whole.down.scales)
        assert len(message) < 2_000


# --- memory and time -------------------------------------------------------------------------------------------------

LIMITED = """
import json, os, pathlib, resource, struct, sys, time
from jax_mxfp4_moe.checkpoint.files import open_checkpoint
folder = pathlib.Path(sys.argv[1])

def sparse(name, start, size):
    path = folder / name
    path.write_bytes(start)
    os.truncate(path, size)
    return path

string = lambda text: struct.pack("<Q", len(text)) + text
start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"k") + struct.pack("<II", 9, 8)
table = b"GGUF" + struct.pack("<IQQ", 3, 2**36, 0)
# Files of a terabyte on paper: what they announce fits into them, so that only a limit on the header itself stops the reader.
cases = [
    sparse("header.safetensors", struct.pack("<Q", 2**39), 2**40),
    sparse("strings.gguf", start + struct.pack("<Q", 2**36), 2**40),
    sparse("tensors.gguf", table, 2**40),
    sparse("numbers.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 4, 2**37), 2**40),
    sparse("string.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"k") + struct.pack("<IQ", 8, 2**39), 2**40),
]
config = folder / "model" / "config.json"
config.parent.mkdir()
(config.parent / "model.safetensors").write_bytes(b"\\x02" + bytes(7) + b"{}")
sparse("model/config.json", b"{", 2**40)
cases.append(config.parent)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + 2**29, -1))
began = time.monotonic()
for path in cases:
    try:
        opened = open_checkpoint(path)
    except ValueError as error:
        print(path.name, "refused:", str(error)[-150:])
    else:
        print(path.name, "opened with", len(opened), "tensors")
print("seconds", time.monotonic() - began)
"""


def test_claims_that_a_huge_file_could_keep_are_bounded(tmp_path):
    """In a process of its own: half a gigabyte beyond what the imports take, and some seconds, are enough for all of them."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert all("refused:" in line for line in lines[:-1]), done.stdout
    assert float(lines[-1].split()[1]) < 60
