"""Named methods: short compositions of parts with their papers' defaults."""

from .full import full
from .h2o import h2o
from .morphkv import morphkv
from .snapkv import snapkv
from .streaming_llm import streaming_llm
from .text import PRESETS, parse
from .tova import tova

__all__ = ["PRESETS", "full", "h2o", "morphkv", "parse", "snapkv", "streaming_llm", "tova"]
