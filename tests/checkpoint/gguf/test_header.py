"""The header of GGUF files: the same as the library's own reader finds, and errors for what is not one."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvjax.checkpoint.gguf.header import read_header
from tests.checkpoint.folders import problems
from tests.checkpoint.gguf.files import CASES, write

VALUES = {
    "u8": ("add_uint8", 200),
    "i8": ("add_int8", -3),
    "u16": ("add_uint16", 60_000),
    "i16": ("add_int16", -300),
    "u32": ("add_uint32", 2**32 - 1),
    "i32": ("add_int32", -(2**31)),
    "u64": ("add_uint64", 2**63),
    "i64": ("add_int64", -(2**63)),
    "f32": ("add_float32", 0.1),
    "f64": ("add_float64", 0.1),
    "bool": ("add_bool", True),
    "text": ("add_string", "Emma \u827e\u739b"),
    "texts": ("add_array", ["a", "", "ä"]),
    "numbers": ("add_array", [1, -2, 3]),
    "floats": ("add_array", [0.5, -0.1]),
    "flags": ("add_array", [True, False]),
}


def test_the_header_is_the_one_that_the_library_reads(tmp_path: Path):
    file = tmp_path / "model.gguf"
    write(CASES["llama"], file, "Q4_0")
    header, reader = read_header(file), gguf.GGUFReader(file)
    assert header.data == reader.data_offset
    for key, value in header.metadata.items():
        assert value == (
            pytest.approx(reader.fields[key].contents()) if isinstance(value, float) else reader.fields[key].contents()
        )
    assert len(header.metadata) == len(reader.fields) - 3  # the library counts the version and two counts as keys
    for tensor in reader.tensors:
        place = header.places.pop(tensor.name)
        assert place.shape == tuple(reversed(tensor.shape.tolist()))
        assert (place.kind, header.data + place.start) == (tensor.tensor_type, tensor.data_offset)
    assert not header.places


def test_values_of_all_types(tmp_path: Path):
    out = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, (method, value) in VALUES.items():
        getattr(out, method)(key, value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    found = read_header(tmp_path / "model.gguf").metadata
    assert {key: found[key] for key in VALUES} == {key: value for key, (_, value) in VALUES.items()}


def header_of(*parts: bytes) -> bytes:
    return b"".join([b"GGUF", *parts])


def u32(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def u64(*numbers: int) -> bytes:
    return np.array(numbers, "<u8").tobytes()


KEY = u64(1) + b"k"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is not a GGUF file: it starts with b''; expected b'GGUF'"),
        (b"PK\x03\x04", "it is not a GGUF file"),
        (header_of(), "truncated or damaged: 4 bytes are expected at byte 4, and the file ends at byte 4"),
        (header_of(u32(1)), "version 1 of GGUF; accepted: 2, 3, little-endian"),
        (header_of(b"\0\0\0\3"), "version 50331648 of GGUF; accepted: 2, 3, little-endian"),
        (header_of(u32(3), u64(0, 2**60)), "truncated or damaged: 8 bytes are expected at byte 24"),
        (header_of(u32(3), u64(0, 1), u64(2**62)), f"truncated or damaged: {2**62:,} bytes are expected"),
        (header_of(u32(3), u64(0, 1), u64(1), b"\xff"), "the text at byte 24 is not UTF-8"),
        (header_of(u32(3), u64(0, 1), KEY, u32(99)), "the value at byte 33 has the unknown type 99"),
        (header_of(u32(3), u64(0, 1), KEY, u32(9, 9), u64(1)), "the value at byte 33 has the unknown type 9"),
        (header_of(u32(3), u64(0, 1), KEY, u32(9, 4), u64(2**61)), f"{2**63:,} bytes are expected"),
        (header_of(u32(3), u64(0, 1), KEY, u32(9, 8), u64(2**60)), f"{2**63:,} bytes are expected"),
        (header_of(u32(3), u64(0, 2), KEY, u32(4, 7), KEY, u32(4, 7)), "the key at byte 41 occurs twice: 'k'"),
        (header_of(u32(3), u64(1, 0), KEY, u32(5)), "the tensor at byte 24 has 5 axes; accepted: at most 4"),
        (header_of(u32(3), u64(1, 0), KEY, u32(2), u64(3, 0)), "the tensor at byte 24 has shape (0, 3)"),
        (
            header_of(u32(3), u64(2, 0), *2 * [KEY + u32(1) + u64(3) + u32(0) + u64(0)]),
            "the tensor at byte 57 occurs twice: 'k'",
        ),
        (
            header_of(u32(3), u64(0, 1), u64(17), b"general.alignment", u32(4, 33)),
            "general.alignment=33: expected a power of two",
        ),
    ],
)
def test_a_bad_header_is_one_error(tmp_path, content, message):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    (problem,) = problems(read_header, file)
    assert message in problem
