"""Reads and writes Hugging Face checkpoints: config.json, safetensors, tokenizer. No pickle, no remote code.

This file knows folders and files; the families of `kvjax.models` say what tensors are called and how they are laid out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.models import Decoder, DecoderConfig, config_from_hf, family, hf_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
DOWNLOADED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    INDEX,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}
# RoPE's frequencies, which old checkpoints carry: they follow from the config.
DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class CheckpointError(ValueError):
    """A checkpoint cannot be read.

    Attributes:
        problems: everything that is wrong with it, a sentence each.
    """

    def __init__(self, source: object, problems: Sequence[str]):
        self.problems = tuple(problems)
        listed = problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"cannot load {source}: {listed}")


def load(
    path_or_hub_id: str | os.PathLike[str], dtype: DTypeLike | None = None
) -> tuple[Decoder, PreTrainedTokenizerBase | None]:
    """Reads a decoder and its tokenizer from a folder in Hugging Face form, or from the Hugging Face hub.

    Weights are `model.safetensors`, or the files that `model.safetensors.index.json` names; they go to the default
    device one tensor at a time. RoPE frequencies in a checkpoint are ignored, since they follow from the config. An
    `lm_head.weight` beside tied embeddings must equal them.

    Args:
        path_or_hub_id: an existing folder, or else a hub id such as `mistralai/Mistral-7B-v0.3`.
        dtype: float32, bfloat16 or float16, which all weights are cast to. By default the one they are stored in;
            where they are stored in several, the smallest that represents them all.

    Returns:
        The decoder, a pytree with its `DecoderConfig` as `params.config`, and the tokenizer, None if there is none.

    Raises:
        CheckpointError: the checkpoint is absent, incomplete, corrupt or not in safetensors; lists all problems.
        UnsupportedModelError: config.json asks for a computation that is not implemented; names the field.
        ValueError: `dtype` is not one of those accepted.
    """
    if dtype is not None and jnp.dtype(dtype) not in DTYPES.values():
        accepted = ", ".join(map(str, DTYPES.values()))
        raise ValueError(f"dtype {jnp.dtype(dtype).name} is not supported; accepted: {accepted}")
    folder = locate(path_or_hub_id)
    config = read_config(folder)
    problems: list[str] = []
    tokenizer = _read_tokenizer(folder, problems)
    with ExitStack() as stack:
        tensors, unreadable = _open_tensors(folder, stack, problems)
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
        parameters = {".".join(map(str, path)): parameter for path, parameter in nnx.to_flat_state(state)}
        problems += _compare(tensors, unreadable, config, {path: p.shape for path, p in parameters.items()})
        if problems:
            raise CheckpointError(folder, problems)
        table = family(config.family).weights(config)
        if dtype is None:
            headers = (tensors[weight.name].get_slice(weight.name) for weight in table)
            dtype = jnp.result_type(*{DTYPES[header.get_dtype()] for header in headers})
        for weight in table:
            parameter = parameters[weight.path]
            tensor = tensors[weight.name].get_slice(weight.name)
            whole = (slice(None),) * len(parameter.shape)
            array = jax.device_put(weight.read(tensor, parameter.shape, whole, dtype))
            parameter.set_value(array.block_until_ready())  # so that no second tensor waits in host memory
    return nnx.merge(graph, state), tokenizer


def save_hf(params: Decoder, path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files to a folder that `load` and transformers read.

    The folder is made where it does not exist, and files of these names in it are replaced. Weights keep their dtype.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = params.config
    kind = family(config.family)
    hf = kind.config_to_hf(config) | {"dtype": str(params.embed.dtype)}
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        hf |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    arrays = {".".join(map(str, path)): parameter[...] for path, parameter in nnx.to_flat_state(nnx.state(params))}
    table = kind.weights(config)
    shapes = hf_shapes(table, {path: array.shape for path, array in arrays.items()})
    tensors = {name: np.empty(shape, params.embed.dtype) for name, shape in shapes.items()}
    for weight in table:
        weight.write(np.asarray(arrays[weight.path]), tensors[weight.name])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # transformers wants to be told the layout


def locate(path_or_hub_id: str | os.PathLike[str], patterns: Sequence[str] = DOWNLOADED) -> Path:
    """The checkpoint's folder, downloaded (the files of these patterns) if it is not one. Raises CheckpointError."""
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(folder, ["it is a file; give the folder that holds config.json and the weights"])
    if not isinstance(path_or_hub_id, str) or not HUB_ID.fullmatch(path_or_hub_id):
        raise CheckpointError(folder, ["no such folder"])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_hub_id, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # not found, gated, offline, not a legal id
        reason = f"no such folder, and the Hugging Face hub did not provide it: {_first_line(error)}"
        raise CheckpointError(path_or_hub_id, [reason]) from error


def read_config(folder: Path) -> DecoderConfig:
    """Reads config.json. Raises CheckpointError if there is none to read, UnsupportedModelError for what it asks."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(folder, ["it has no config.json"])
    return config_from_hf(_read_json(folder / "config.json"))


def read_headers(folder: Path, config: DecoderConfig) -> tuple[int, tuple[str, ...]]:
    """The number of parameters and the dtypes they are stored in, from the safetensors headers alone.

    A folder without weights, as one has before downloading them, is taken at its config's word. RoPE frequencies, which
    follow from the config, do not count. Raises CheckpointError.
    """
    if not (folder / WEIGHTS).exists() and not (folder / INDEX).exists():
        shapes = jax.tree.leaves(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
        hf = _read_json(folder / "config.json")
        named = hf.get("dtype") or hf.get("torch_dtype") or "float32"
        return sum(shape.size for shape in shapes), (str(named),)
    problems: list[str] = []
    with ExitStack() as stack:
        tensors, _ = _open_tensors(folder, stack, problems)
        if problems:
            raise CheckpointError(folder, problems)
        headers = [file.get_slice(name) for name, file in tensors.items() if not DERIVED.search(name)]
        dtypes = {header.get_dtype() for header in headers}
        names = (str(DTYPES.get(dtype, dtype)) for dtype in dtypes)
        return sum(math.prod(header.get_shape()) for header in headers), tuple(sorted(names))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(file.parent, [f"{file.name} is not valid JSON: {error}"]) from error
    if not isinstance(content, dict):
        raise CheckpointError(file.parent, [f"{file.name} holds no JSON object"])
    return content


def _open_tensors(folder: Path, stack: ExitStack, problems: list[str]) -> tuple[dict[str, safe_open], set[str] | None]:
    """Opens the checkpoint's files, reading their headers only.

    Returns the open file of each tensor, and the names of those that should be in a file that cannot be opened: None
    for all others that there may be.
    """
    placed: dict[str, str] | None = None
    if (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif (folder / INDEX).is_file():
        placed = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
            raise CheckpointError(folder, [f"{INDEX} lacks a weight_map from tensor names to file names"])
        files = sorted(set(placed.values()))
    else:
        problems.append(_no_weights(folder))
        return {}, None
    tensors: dict[str, safe_open] = {}
    broken = set()
    for name in files:
        if Path(name).name != name:
            problem = f"{INDEX} names {name!r}, which is not a file name of this folder"
        elif not (folder / name).is_file():
            problem = f"{INDEX} names {name}, which does not exist"
        else:
            try:
                file = stack.enter_context(safe_open(folder / name, framework="numpy"))
            except (SafetensorError, OSError) as error:
                problem = f"{name} is truncated or no safetensors file: {_first_line(error)}"
            else:
                twice = sorted(tensors.keys() & set(file.keys()))
                if twice:
                    problems.append(f"tensor(s) in more than one file: {', '.join(twice)}")
                tensors |= dict.fromkeys(file.keys(), file)
                continue
        broken.add(name)
        problems.append(problem)
    if placed is None:
        return tensors, None if broken else set()
    return tensors, {tensor for tensor, name in placed.items() if name in broken}


def _no_weights(folder: Path) -> str:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        return (
            f"its weights are pickled ({', '.join(pickles)}), and unpickling a file runs whatever code it holds; "
            "only safetensors are read: convert it with transformers' save_pretrained"
        )
    return f"it has neither {WEIGHTS} nor {INDEX}"


def _compare(
    tensors: dict[str, safe_open],
    unreadable: set[str] | None,
    config: DecoderConfig,
    shapes: dict[str, tuple[int, ...]],
) -> list[str]:
    """What is wrong with the tensors: missing, misshapen, of another dtype, unexpected, untied against the config."""
    problems = []
    kind = family(config.family)
    expected = hf_shapes(kind.weights(config), shapes)
    missing = [] if unreadable is None else [name for name in expected if name not in tensors.keys() | unreadable]
    if missing:
        problems.append(f"missing tensor(s): {', '.join(missing)}")
    untied = {weight.path: weight.name for weight in kind.weights(dataclasses.replace(config, tie_embeddings=False))}
    embed, unembed = untied["embed"], untied["unembed"]
    expected[unembed] = expected[embed]  # may stand beside tied embeddings too
    sound = set()
    for name in (name for name in expected if name in tensors):
        header = tensors[name].get_slice(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != expected[name]:
            problems.append(f"{name} has shape {shape}; config.json asks for {expected[name]}")
        if dtype not in DTYPES:
            problems.append(f"{name} has dtype {dtype}; accepted: {', '.join(DTYPES)}")
        if shape == expected[name] and dtype in DTYPES:
            sound.add(name)
    if config.tie_embeddings and {embed, unembed} <= sound and not _equal(tensors, embed, unembed):
        problems.append(f"{unembed} differs from {embed}, but config.json ties them (tie_word_embeddings)")
    unexpected = sorted(name for name in tensors.keys() - expected.keys() if not DERIVED.search(name))
    if unexpected:
        problems.append(f"unexpected tensor(s): {', '.join(unexpected)}")
    return problems


def _equal(tensors: dict[str, safe_open], first: str, second: str, rows: int = 4096) -> bool:
    """Whether two tensors of one shape are equal, read a few rows at a time."""
    one, other = (tensors[name].get_slice(name) for name in (first, second))
    length = one.get_shape()[0]
    blocks = [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
    return all(np.array_equal(one[block], other[block]) for block in blocks)


def _read_tokenizer(folder: Path, problems: list[str]) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).is_file() for name in VOCABULARIES):
        return None
    # Without torch, importing transformers advises to install it; tokenizers do not need it.
    advice = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        from transformers import AutoTokenizer
    finally:
        del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        if advice is not None:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = advice
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # parsers raise errors of many kinds, bare Exception among them
        problems.append(f"its tokenizer cannot be read: {_first_line(error)}")
        return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
