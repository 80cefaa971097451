"""Files of torch.save are read without torch, and whatever is not a dictionary of tensors is refused."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.torch_files import locate_file, read_torch
from tests.checkpoint.torch_zip import KINDS, Raw, called, named, pickled, save, storage, tensor, write

RNG = np.random.default_rng(3)
FLOATS = named("torch", "FloatStorage")
BOMB = Raw(b"N" + b"q\x01h\x01\x86" * 40)  # a tuple of the same tuple twice, 40 deep, whose hash takes 2 ** 40 steps


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    match expected:
        case dict():
            assert list(found) == list(expected)
            for name in expected:
                same(found[name], expected[name])
        case list() | tuple():
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                same(one, other)
        case np.ndarray():
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
        case _:
            assert found == expected


@pytest.mark.parametrize("order", ["little", "big", None])
def test_every_dtype_and_container(tmp_path: Path, order: str | None) -> None:
    arrays = {name: np.asarray(RNG.integers(0, 2, (2, 1, 3)) * 77.5).astype(jnp.dtype(name)) for name in KINDS}
    value: dict[Any, Any] = {
        **arrays,
        "list": [1, -2, 2.5, None, (True, False, "text")],
        7: {},
        "none": np.zeros((0, 3), np.float32),
    }
    same(read_torch(save(value, tmp_path / "x.pt", order=order)), value)


def test_views_of_one_storage(tmp_path: Path) -> None:
    numbers = np.arange(12, dtype=np.float32)
    whole = storage(FLOATS, 0, 12)
    views = [tensor(whole, 0, (3, 4), (4, 1)), tensor(whole, 1, (4, 2), (1, 4)), tensor(whole, 11, (), ())]
    parameter = called(named("torch._utils", "_rebuild_parameter"), views[0], True, None)
    path = write(b"\x80\x02(" + b"".join([*views, parameter]) + b"t.", [numbers], tmp_path / "x.pt")
    first, second, last, again = read_torch(path)
    np.testing.assert_array_equal(first, numbers.reshape(3, 4))
    np.testing.assert_array_equal(second, [[1, 5], [2, 6], [3, 7], [4, 8]])
    assert (last, last.shape) == (11, ())
    np.testing.assert_array_equal(again, first)


def test_attributes_and_arrays_of_numpy_are_left_out(tmp_path: Path) -> None:
    state = named("collections", "OrderedDict") + b")R"  # with one entry and an attribute
    state = Raw(state + pickled("bias", []) + pickled(1, []) + b"s" + pickled({"_metadata": {}}, []) + b"b")
    loss = Raw(pickle.dumps(np.ones((2, 3)), 2)[2:-1])
    assert read_torch(save({"module": [state], "loss": loss}, tmp_path / "x.pt")) == {
        "module": [{"bias": 1}],
        "loss": None,
    }


@pytest.mark.parity
def test_what_torch_writes(tmp_path: Path) -> None:
    """Modules' own dictionaries with attributes, views, arrays of NumPy, parameters, every dtype."""
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 4, dtype=torch.bfloat16)
    dtypes = {name: torch.ones(2, 3).to(getattr(torch, name)) for name in KINDS}
    stored = {
        "module": [layer.state_dict()],
        "dtypes": dtypes,
        "view": torch.arange(24.0).reshape(2, 3, 4)[1, :, 1:3].T,
        "scalar": torch.tensor(5),
        "parameter": layer.weight,
        "loss": np.ones((2, 3)),
        "last": np.float32(2.5),
        "facts": [None, True, -3, 10**12, 2.5, "x" * 300, (1, 2, 3, 4), {"lr": 1e-3}],
    }
    torch.save(stored, tmp_path / "x.pt")
    found = read_torch(tmp_path / "x.pt")
    weight = layer.weight.detach().float().numpy()
    same(found["dtypes"], {name: np.ones((2, 3), jnp.dtype(name)) for name in KINDS})
    same(found["view"], stored["view"].numpy())
    same(found["scalar"], np.array(5))
    same(found["facts"], stored["facts"])
    assert found["loss"] is found["last"] is None
    for read in (found["parameter"], found["module"][0]["weight"]):
        assert read.dtype == jnp.bfloat16
        np.testing.assert_array_equal(read.astype(np.float32), weight)
    assert list(found["module"][0]) == ["weight", "bias"]


class Hostile:
    """What runs a command where it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_no_command_runs(tmp_path: Path) -> None:
    command = f"touch {tmp_path / 'ran'}"
    for content in (Hostile(command), {"module": [Hostile(command)]}):
        path = write(pickle.dumps(content, 2), [], tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match=rf"it names '{os.system.__module__}\.system'"):
            read_torch(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Hostile(command), 2))
    assert (tmp_path / "ran").exists()


def bad_values() -> list[tuple[str, Any]]:
    """What the error says, and a value."""
    four = storage(FLOATS, 0, 4)
    v2 = named("torch._utils", "_rebuild_tensor_v2")
    return [
        ("it names 'builtins.eval'", called(named("builtins", "eval"), "1")),
        ("it names 'torch.load'", [named("torch", "load")]),
        ("it names 'numpy.core.multiarray'", called(named("numpy.core", "multiarray"))),
        ("it has the instruction STACK_GLOBAL", Raw(pickled("os", []) + pickled("system", []) + b"\x93")),
        ("it has the instruction INST", Raw(b"(ios\nsystem\n")),
        ("it has the instruction NEWOBJ", Raw(named("torch._utils", "_rebuild_parameter") + b")\x81")),
        ("it has the instruction EXT1", Raw(b"\x82\x01")),
        ("it refers to something that is not a storage", Raw(b"NQ")),
        ("'NoneType' object is not callable", Raw(b"N)R")),
        ("'numpy.dtype.*' object is not callable", called(FLOATS)),
        ("KeyError", Raw(b"h\x07")),
        ("IndexError", Raw(b"a")),
        ("a dictionary has a key that is neither", Raw(b"}" + BOMB + b"Ns")),
        ("storage '0' has 16 bytes: expected 20", storage(FLOATS, 0, 5)),
        ("storage '0' has 16 bytes: expected 32", storage(named("torch", "DoubleStorage"), 0, 4)),
        ("There is no item named 'archive/data/1'", storage(FLOATS, 1, 4)),
        ("There is no item named 'archive/data/../data.pkl'", storage(FLOATS, "../data.pkl", 4)),
        (r"a tensor of shape \(5,\) does not fit into its storage of 4", tensor(four, 0, (5,), (0,))),
        (r"a tensor of shape \(65536, 65536\) does not fit", tensor(four, 0, (65536, 65536), (0, 0))),
        ("strides is incompatible", tensor(four, 0, (2, 2), (3, 1))),
        ("strides is incompatible", tensor(four, 3, (2,), (1,))),
        ("strides is incompatible", tensor(four, -1, (1,), (1,))),
        ("strides is incompatible", tensor(four, 0, (2,), (-1,))),
        ("strides", tensor(four, 0, (2, 2), (1,))),
        ("that are not integers", tensor(four, 0, (10**9, "text"), (1, 1))),
        ("that are not integers", tensor(four, 0.5, (1,), (1,))),
        ("not contiguous", Raw(tensor(tensor(four, 0, (2,), (2,)), 0, (2,), (1,)))),
        ("AttributeError", tensor([1], 0, (1,), (1,))),
        ("missing", called(v2, four)),
    ]


@pytest.mark.parametrize(("says", "value"), bad_values())
def test_what_is_no_tensor_is_refused(tmp_path: Path, says: str, value: Any) -> None:
    path = save(value, tmp_path / "x.pt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/0", np.ones(4, np.float32).tobytes())
    with pytest.raises(CheckpointError, match=rf"x.pt: it is not a file of tensors that torch.save wrote: .*{says}"):
        read_torch(path)


def bad_archives(whole: bytes) -> list[tuple[str, bytes]]:
    """What the error says, and a damaged file."""
    compressed, double = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        for made, folders, way in (
            (compressed, ["archive"], zipfile.ZIP_DEFLATED),
            (double, ["archive", "other"], zipfile.ZIP_STORED),
        ):
            with zipfile.ZipFile(made, "w", way) as other:
                for member in archive.infolist():
                    for folder in folders:
                        other.writestr(member.filename.replace("archive", folder), archive.read(member))
    directory = whole.rindex(b"PK\x01\x02")  # the last entry of the directory, which is that of the last storage
    grown = bytearray(whole)
    grown[directory + 20 : directory + 28] = (1 << 30).to_bytes(4, "little") * 2
    flipped = bytearray(whole)
    flipped[whole.index(np.float32(1.5).tobytes() * 4)] ^= 1
    return [
        ("File is not a zip file", whole[: len(whole) // 2]),
        ("File is not a zip file", b""),
        ("File is not a zip file", pickle.dumps({}, 2)),
        ("the archive is compressed", compressed.getvalue()),
        ("the archive has 2 members FOLDER/data.pkl: expected one", double.getvalue()),
        ("the archive is smaller than its members", bytes(grown)),
        ("Bad CRC-32", bytes(flipped)),
    ]


def test_damaged_archives(tmp_path: Path) -> None:
    whole = save({"a": np.full((4, 5), 1.5, np.float32)}, tmp_path / "x.pt").read_bytes()
    for says, content in bad_archives(whole):
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=says):
            read_torch(tmp_path / "x.pt")


def test_any_damage_is_an_error_or_harmless(tmp_path: Path) -> None:
    """Of the pickle, which no checksum covers if its writer means harm."""
    saved = save({"module": [{"a": np.ones((2, 3), np.float32), "b": [1, 2.5, None]}]}, tmp_path / "x.pt")
    with zipfile.ZipFile(saved) as archive:
        content = archive.read("archive/data.pkl")
    outcomes = set()
    for _ in range(300):
        changed = bytearray(content)
        for at in RNG.integers(0, len(content), RNG.integers(1, 4)):
            changed[at] = RNG.integers(256)
        try:
            read_torch(write(bytes(changed), [np.ones(6, np.float32)], saved))
            outcomes.add("read")
        except CheckpointError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.pt").mkdir()
    assert locate_file(tmp_path / "folder.pt") is locate_file("nvidia/KVzap-mlp-Qwen3-8B") is None
    assert locate_file(save({}, tmp_path / "x.pt")) == tmp_path / "x.pt"
    for absent in (tmp_path / "absent.pt", "absent.pt", "folder/absent.pt"):
        with pytest.raises(CheckpointError, match="no such file"):
            locate_file(absent)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: f"/hub/{name}:{file}")
    assert locate_file("someone/Gates/qwen3-8b/q4.pt") == Path("/hub/someone/Gates:qwen3-8b/q4.pt")
    with pytest.raises(CheckpointError, match="no such file"):
        locate_file(Path("someone/Gates/qwen3-8b/q4.pt"))


def test_the_hub_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="no such file, and the Hugging Face hub did not provide it"):
        locate_file("someone/absent/gates.pt")
