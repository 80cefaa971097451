"""Named methods: short compositions of parts with their papers' defaults."""

from .adakv import adakv
from .cam import cam
from .chunkkv import chunkkv
from .criticalkv import criticalkv
from .d2o import d2o
from .duo_attention import duo_attention
from .dynamickv import dynamickv
from .expected_attention import expected_attention
from .finch import finch
from .full import full
from .h2o import h2o
from .keydiff import keydiff
from .keyformer import keyformer
from .knorm import knorm
from .kvcompose import kvcompose
from .kvcrush import kvcrush
from .kvmerger import kvmerger
from .kvzip import kvzip
from .lagkv import lagkv
from .morphkv import morphkv
from .pyramidkv import pyramidkv
from .quantize import quantize
from .random import random
from .scissorhands import scissorhands
from .snapkv import snapkv
from .streaming_llm import streaming_llm
from .text import PRESETS, parse
from .tova import tova

__all__ = [
    "PRESETS",
    "adakv",
    "cam",
    "chunkkv",
    "criticalkv",
    "d2o",
    "duo_attention",
    "dynamickv",
    "expected_attention",
    "finch",
    "full",
    "h2o",
    "keydiff",
    "keyformer",
    "knorm",
    "kvcompose",
    "kvcrush",
    "kvmerger",
    "kvzip",
    "lagkv",
    "morphkv",
    "parse",
    "pyramidkv",
    "quantize",
    "random",
    "scissorhands",
    "snapkv",
    "streaming_llm",
    "tova",
]
