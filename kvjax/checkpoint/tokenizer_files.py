"""Reads and writes the files of a tokenizer."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.checkpoint.errors import one_line
from kvjax.checkpoint.folder import TOKENIZER, read_json, unfetched
from kvjax.checks import installs, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN = "own"  # the argument that stands for the tokenizer of the checkpoint
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
OTHERS = ("tekken.json", "tiktoken.model", "tokenizer_config.json")  # files of tokenizers that may lack all of these
# The families whose own tokenizer, which is code of the checkpoint, puts the first token before a text by default.
BEGIN = ("internlm2",)


def check_given(tokenizer: Any) -> None:
    """Raises ValueError unless `tokenizer` is "own", None or a tokenizer."""
    named = isinstance(tokenizer, str) and tokenizer == OWN
    if not (named or tokenizer is None or (hasattr(tokenizer, "decode") and hasattr(tokenizer, "eos_token_id"))):
        raise ValueError(f"tokenizer={shown(tokenizer)}: expected 'own', None or a tokenizer of transformers")


def read_tokenizer(folder: Path, problems: list[str]) -> PreTrainedTokenizerBase | None:
    """Returns the folder's tokenizer, or None if it has none. Appends to `problems` if the tokenizer is unreadable."""
    files = [folder / name for name in VOCABULARIES if (folder / name).is_file()]
    if not files:
        if others := [name for name in OTHERS if (folder / name).is_file()]:
            problems.append(f"its tokenizer has {', '.join(others)}: expected one of {', '.join(VOCABULARIES)}")
        return None
    with transformers_quietly():
        from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig
    try:
        if pointers := [pointer for file in files if (pointer := unfetched(file))]:
            problems.append(f"its tokenizer cannot be read: {', '.join(pointers)}")
            return None
        said, own = (_fields(folder / name) for name in ("config.json", "tokenizer_config.json"))
        # transformers would check the config of the model, of which only the kind matters for a tokenizer.
        kind = said.get("model_type")
        config = CONFIG_MAPPING[kind]() if kind in CONFIG_MAPPING else PreTrainedConfig()
        config.model_type = kind or config.model_type
        config.tokenizer_class = said.get("tokenizer_class")
        begins = kind in BEGIN and files == [folder / "tokenizer.model"] and "add_bos_token" not in own
        return AutoTokenizer.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            mistral_format=False,  # not the tokenizer of mistral-common, which has no chat template
            **({"add_bos_token": True} if begins else {}),
        )
    except Exception as error:  # the parsers raise many exception types, bare Exception among them
        reason = f"{_advice(folder)}{one_line(error)}"
        if "trust_remote_code" in reason:
            reason = "it is code of the checkpoint (auto_map in tokenizer_config.json), which kvjax never runs"
        problems.append(f"its tokenizer cannot be read: {reason}")
        return None


def _fields(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _advice(folder: Path) -> str:
    """Names the package that the tokenizer needs and that is not installed; empty if there is none."""
    if (folder / "tokenizer.json").is_file() or not (folder / "tokenizer.model").is_file():
        return ""
    absent = [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]
    if not absent:
        return ""
    named = " and ".join(name.removeprefix("google.") for name in absent)
    return f"tokenizer.model alone needs {named}: expected {installs('sentencepiece')}. "


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes a tokenizer. One that is as its folder has it keeps the files of that folder.

    transformers leaves out files and fields when it writes, such as special_tokens_map.json.
    """
    tokenizer.save_pretrained(folder)
    named = getattr(tokenizer, "name_or_path", "")
    if not named or not Path(named).is_dir():
        return
    stored = read_tokenizer(Path(named), [])
    if stored is None:
        return
    with tempfile.TemporaryDirectory() as again:
        stored.save_pretrained(again)
        if _contents(Path(again)) != _contents(folder):
            return
    for name in _contents(folder):
        (folder / name).unlink()
    copy_tokenizer(Path(named), folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the files of a tokenizer."""
    for name in tokenizer_files(source):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)


def tokenizer_files(folder: Path) -> list[str]:
    """The files of a tokenizer, relative to the folder and with forward slashes."""
    files = (file.relative_to(folder).as_posix() for file in (*folder.iterdir(), *folder.glob("*/*")) if file.is_file())
    return sorted(name for name in files if TOKENIZER.fullmatch(name))


def _contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in tokenizer_files(folder)}


@contextmanager
def transformers_quietly() -> Iterator[None]:
    """Imports transformers without its advice to install torch, which tokenizers do not need."""
    advice = os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    try:
        yield
    finally:
        del os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"]
        if advice is not None:
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = advice
