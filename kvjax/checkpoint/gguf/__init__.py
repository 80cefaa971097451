"""Reads models in GGUF, the format of llama.cpp. It needs the extra `gguf`."""

from kvjax.checkpoint.gguf.file import GgufFile

__all__ = ["GgufFile"]
