"""Problems for the kernels of every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import QuantizedArray, Reduction

CHIPS = {"v5e": (1 << 19, 1), "v5p": (1 << 20, 2), "v6e": (1 << 20, 1)}  # bytes of a tile's keys, and cores
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 2e-2), "float16": (1e-3, 2e-3)}  # by the dtype of the result
DEFAULT_REDUCTION = Reduction()
quantized = jax.jit(QuantizedArray.of, static_argnums=(1, 2))


@dataclass(frozen=True)
class Case:
    """Queries and slots of three batch rows and two kv heads.

    Row 0 has a head without entries, row 1 has one entry per head, and row 2 has no query.

    Attributes:
        queries: W, or N for a prompt.
        window: the sliding window.
        softcap: of the scaled logits, which are of the order of 1.
        bias: "some" draws normal numbers; "none" is -inf everywhere.
        received: the fold of what slots receive.
        huge: whether logits reach 1e4.
        lse: whether the log-sum-exp is given to `window_scores`.
        bits: of quantised keys and values.
        per_scale: channels per scale of quantised keys and values.
        value_dim: channels of values; as many as keys have if None.
    """

    head_dim: int
    group: int
    queries: int
    slots: int
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    bias: str | None = None
    received: str | None = None
    huge: bool = False
    lse: bool = True
    causal: bool = True
    reduction: Reduction = DEFAULT_REDUCTION
    bits: int | None = None
    per_scale: int = 32
    value_dim: int | None = None

    def __str__(self) -> str:
        extras = [
            name
            for name, applies in (
                ("window", self.window is not None),
                ("softcap", self.softcap is not None),
                (f"bias_{self.bias}", self.bias is not None),
                (f"received_{self.received}", self.received is not None),
                ("huge", self.huge),
                ("all", not self.causal),
                ("own_lse", not self.lse),
                (f"{self.bits}_bits_by_{self.per_scale}", self.bits is not None),
                (f"values_of_{self.value_dim}", self.value_dim is not None),
                (
                    f"{self.reduction.rows}_{self.reduction.group}_{self.reduction.first}",
                    self.reduction != DEFAULT_REDUCTION,
                ),
            )
            if applies
        ]
        return "-".join(
            [f"D{self.head_dim}", f"G{self.group}", f"W{self.queries}", f"S{self.slots}", self.dtype, *extras]
        )

    @property
    def arrays(self):
        """NumPy arrays (q, k, v, q_positions, k_positions, bias or None)."""
        rng = np.random.default_rng(self.head_dim + self.slots + self.queries)
        heads, dtype = 2, jnp.dtype(self.dtype)
        q = rng.normal(size=(3, heads * self.group, self.queries, self.head_dim))
        k, v = rng.normal(size=(2, 3, heads, self.slots, self.head_dim))
        if self.huge:
            q, k = 64 * np.round(2 * q), 64 * np.round(2 * k)
        past = 2 * self.slots
        positions = np.full((3, heads, self.slots), -1, np.int32)
        for head in range(heads):
            positions[0, head] = rng.permutation(past)[: self.slots]
            positions[0, head, rng.permutation(self.slots)[: self.slots // 3]] = -1
            positions[2, head] = rng.permutation(past)[: self.slots]
        positions[0, :, self.slots - self.slots // 4 :] = -1  # the last slots are empty
        positions[0, 1] = -1
        positions[1, :, self.slots // 2] = 3
        t = past - self.queries + np.arange(self.queries) if self.causal else np.full(self.queries, past)
        t = np.stack([t, t, np.full(self.queries, -1)]).astype(np.int32)
        if self.causal and self.queries > 4:
            t[1, : self.queries // 2] = -1  # left padding
            t[0] = np.roll(t[0] - past // 2, 3)  # some queries see a part of the slots; queries are in ring order
        bias = None
        if self.bias is not None:
            bias = np.full(positions.shape, -np.inf, np.float32)
            if self.bias == "some":
                bias = rng.normal(size=positions.shape).astype(np.float32)
        if self.value_dim is not None:
            v = rng.normal(size=(3, heads, self.slots, self.value_dim))
        return q.astype(dtype), k.astype(dtype), v.astype(dtype), t, positions, bias

    def stored(self, x: Any) -> Any:
        """Keys or values as the kernel takes them: plain or quantised."""
        return x if self.bits is None else quantized(x, self.bits, self.per_scale)

    @property
    def scale(self) -> float:
        return 1.5 * self.head_dim**-0.5

    def typical(self, values: Any) -> tuple[float, float]:
        """Tolerances for a result, by its dtype: of 99 % of the entries, and of all."""
        if self.huge:
            return 1e-3, 2e-3  # float32 rounds a log-sum-exp of 1e4 to 1e-3
        return TOLERANCE[jnp.dtype(values.dtype).name]


THIN_CASES = [  # keys with fewer channels than values
    Case(77, 4, 1, 300, "bfloat16", value_dim=128),
    Case(77, 1, 1, 64, value_dim=128),
    Case(5, 7, 3, 130, window=60, bias="some", received="sum", value_dim=8),
    Case(48, 2, 40, 90, "float16", softcap=2.0, value_dim=64),
]
SLOT_CASES = [
    Case(64, 1, 1, 50),
    Case(64, 4, 1, 130, received="sum"),
    Case(96, 5, 1, 70, received="mean", bias="some"),
    Case(128, 8, 8, 300, "bfloat16"),
    Case(128, 4, 1, 300, "bfloat16", received="max"),
    Case(256, 7, 1, 40, "float16", window=30),
    Case(128, 4, 32, 64, window=25, received="sum"),
    Case(64, 2, 64, 90, received="mean"),
    Case(64, 1, 200, 33),
    Case(64, 4, 3, 64, bias="none"),
    Case(64, 4, 1, 40, huge=True, received="max"),
    Case(8, 2, 1, 5),
    Case(80, 3, 2, 129, bias="some", window=40),
    *(Case(16, 4, 1, slots) for slots in (512, 3000)),  # several splits, and the most of six heads
    Case(64, 4, 2, 70, softcap=0.8, bias="some", window=60, received="mean"),
]

QUANTIZED_CASES = [
    Case(128, 4, 1, 300, "bfloat16", bits=8),
    Case(64, 1, 1, 50, bits=8, per_scale=64, received="sum"),
    Case(64, 4, 3, 140, bits=8, per_scale=16, bias="some", received="max"),
    Case(128, 7, 1, 130, bits=4, bias="some", window=100),
    Case(64, 4, 3, 70, bits=4, per_scale=64, received="max"),
    Case(256, 1, 1, 140, "bfloat16", bits=4, received="mean"),
    Case(32, 2, 40, 90, bits=4, per_scale=32, received="mean"),
    Case(128, 2, 1, 40, "float16", bits=8, per_scale=128, bias="none"),
]

# (case of the attending queries, number of extra query rows X, reduction of their weights)
EXTRA_CASES = [
    (Case(64, 4, 1, 130), 4, Reduction("sum", "sum", "group")),
    (Case(64, 1, 1, 50, window=70), 1, Reduction("max", "sum", "group")),
    (Case(128, 7, 1, 200, "bfloat16"), 25, Reduction("sum", "sum", "group")),
    (Case(96, 4, 1, 90, bias="some", window=100), 25, Reduction("max", "sum", "group")),
    (Case(64, 7, 1, 70, received="sum"), 4, Reduction("max", "max", "group")),
    (Case(64, 4, 1, 64, received="max", bias="none"), 1, Reduction("sum", "max", "group")),
    (Case(80, 3, 2, 129, bias="some"), 5, Reduction("max", "mean", "rows")),
    (Case(64, 4, 1, 60), 5, Reduction("mean", "mean")),
    (Case(128, 4, 33, 64), 4, Reduction("sum", "mean")),
    (Case(64, 4, 1, 90), 150, Reduction("sum", "sum", "group")),
    (Case(64, 4, 1, 90, softcap=0.8, bias="some"), 4, Reduction("sum", "sum", "group")),
]

QUANTIZED_EXTRA_CASES = [
    (Case(128, 4, 1, 130, bits=8), 4, Reduction("sum", "sum", "group")),
    (Case(64, 7, 1, 90, bits=4, window=100), 25, Reduction("max", "sum", "group")),
]

WINDOW_CASES = [
    Case(64, 1, 1, 50),
    Case(128, 4, 32, 200, "bfloat16"),
    Case(96, 5, 8, 70, lse=False, bias="some"),
    Case(256, 7, 1, 40, "float16", window=30),
    Case(64, 8, 64, 90, causal=False),
    Case(64, 2, 200, 130, reduction=Reduction("mean", "mean")),
    Case(64, 4, 90, 90, window=40, lse=False, reduction=Reduction("max", "max")),
    Case(64, 4, 32, 64, huge=True),
    Case(64, 4, 3, 64, bias="none", lse=False),
    Case(64, 4, 5, 90, softcap=0.8, bias="some"),
    Case(64, 4, 5, 90, softcap=0.8, lse=False),
    Case(8, 2, 1, 5),
    *(
        Case(64, 3, 20, 40, reduction=Reduction(rows, group, first), window=window)
        for rows, group, first, window in (
            ("sum", "max", "rows", None),
            ("sum", "max", "group", 30),
            ("max", "mean", "rows", None),
            ("max", "sum", "group", None),
            ("mean", "max", "rows", None),
            ("mean", "max", "group", 30),
        )
    ),
]

# (case, number of lanes P)
SEGMENT_CASES = [
    (Case(64, 1, 1, 0), 4),
    (Case(96, 5, 1, 0, bias="some"), 2),
    (Case(128, 4, 3, 0, "bfloat16", window=60), 1),
    (Case(64, 4, 1, 0, softcap=0.8, bias="some"), 2),
]

QUANTIZED_SEGMENT_CASES = [
    (Case(128, 1, 1, 0, "bfloat16", bits=8), 4),
    (Case(128, 7, 1, 0, bias="some", bits=8, per_scale=128), 2),
    (Case(128, 4, 3, 0, window=60, bits=4), 1),
]

# (case with N new tokens, number of cached slots)
PROMPT_CASES = [
    (Case(64, 4, 40, 0), 0),
    (Case(96, 5, 21, 0, window=9), 50),
    (Case(128, 1, 130, 0), 20),
    (Case(16, 2, 130, 0, "bfloat16"), 30),
    (Case(64, 1, 13, 0, bias="some"), 37),
    (Case(64, 2, 40, 0, softcap=0.8, bias="some"), 37),
    (Case(128, 1, 20, 0, softcap=0.8), 0),
]
