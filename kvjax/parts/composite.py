"""KVCompose's score: the attention that a prompt receives from the tokens of a task, the prompt itself by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerCache
from kvjax.pallas_kernels import Reduction, fold, window_scores
from kvjax.policy import Policy
from kvjax.protocols import Attended, LayerShape, Moment
from kvjax.replay import Encode, Pass, ReplayScore, Texts, as_ids

from .projected import projected_norms


class TaskWeights(NamedTuple):
    """What each slot received from the task's queries so far: softmax weights, reduced, and how many saw it."""

    weights: Float[Array, "B H G S"]
    queries: Int[Array, "B H S"]


@dataclass(frozen=True)
class TaskAttention(ReplayScore):
    """Attention from the tokens of a task, reduced over these, then over the query group (KVCompose, eq. 14 to 16).

    A row's softmax is over all that it sees, entries of the task's own tokens included; only the prompt's are scored.
    On a mesh the mean over heads is taken once a prompt and layer, and where devices share a kv head its queries are
    gathered once a pass, and projected norms once a prompt and layer.

    Attributes:
        source: whose tokens. "replay": the prompt's, run a second time behind itself; "self": the prompt's as it is
            read; "prompt": those of `prompts`.
        prompts: texts or token ids, each run on its own behind the prompt.
        rows: over the task's queries; "mean" over those that see the entry.
        group: over the query group, each of whose heads was reduced over rows first.
        head_mean: add the mean of all kv heads' scores to each (equation 16). The heads of a layer must hold the same
            tokens in the same slots.
        value_norm: weigh attention with the L2 norm of the value, "v", or of what the query head's output projection
            makes of it, "vo" (equations 26 and 27).
    """

    source: Literal["replay", "self", "prompt"] = "replay"
    prompts: tuple[str | tuple[int, ...], ...] = ()
    rows: Literal["max", "mean", "sum"] = "max"
    group: Literal["mean", "max"] = "mean"
    head_mean: bool = True
    value_norm: Literal["none", "v", "vo"] = "none"

    def __post_init__(self) -> None:
        if self.source not in ("replay", "self", "prompt"):
            raise ValueError(f"source={self.source!r}: accepted are 'replay', 'self' and 'prompt'")
        if self.group not in ("mean", "max"):
            raise ValueError(f"group={self.group!r}: accepted are 'mean' and 'max'")
        if self.value_norm not in ("none", "v", "vo"):
            raise ValueError(f"value_norm={self.value_norm!r}: accepted are 'none', 'v' and 'vo'")
        Reduction(rows=self.rows)  # which refuses an unknown one
        if (self.source == "prompt") != bool(self.prompts):
            raise ValueError(
                f"source={self.source!r} with prompts={self.prompts!r}: accepted are prompts where the source is "
                "'prompt', and none otherwise"
            )
        if not all(isinstance(prompt, str | tuple) and len(prompt) for prompt in self.prompts):
            raise ValueError(f"prompts={self.prompts!r}: accepted are strings and tuples of token ids, none empty")

    @property
    def repeats_prompt(self) -> bool:
        return self.source == "replay"

    def check(self, policy: Policy) -> None:
        if policy.every is not None:
            raise ValueError(
                f"TaskAttention scores a prompt, and nothing that is decoded; with every={policy.every} it cannot be "
                "combined"
            )
        if self.source != "self" and not policy.shares:
            raise ValueError(
                f"TaskAttention with source={self.source!r} runs tokens over the whole prompt, and under "
                f"{type(policy.budget).__name__} each layer is compressed before the next one reads it; accepted are "
                "budgets that are shared out, such as CompositeShares, or source='self'"
            )

    def init_slots(self, shape: LayerShape, slots: int) -> TaskWeights:
        B, H, G = shape.batch, shape.kv_heads, shape.heads // shape.kv_heads
        return TaskWeights(jnp.zeros((B, H, G, slots), jnp.float32), jnp.zeros((B, H, slots), jnp.int32))

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[TaskWeights, None]:
        return (self._seen(entries, attended) if self.source == "self" else entries.per_slot), None

    def texts(self, encode: Encode | None) -> Texts:
        return tuple(as_ids(prompt, encode, "a prompt of TaskAttention") for prompt in self.prompts)

    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        nothing = jnp.zeros_like(lengths)
        if self.source == "replay":
            return [Pass(tokens, lengths, nothing, lengths)]
        given = [jnp.array(ids, jnp.int32) for ids in texts]
        return [
            Pass(jnp.tile(ids, (len(lengths), 1)), jnp.full_like(lengths, len(ids)), nothing, lengths) for ids in given
        ]

    def replayed(
        self, entries: LayerCache, attended: Attended, first: Int[Array, "B"], last: Int[Array, "B"]
    ) -> tuple[TaskWeights, None]:
        return self._seen(entries, attended), None

    def _seen(self, entries: LayerCache, attended: Attended) -> TaskWeights:
        """What the entries received so far, that of some more queries included."""
        old: TaskWeights = entries.per_slot
        q, lse = (attended.heads.whole_groups(x) for x in (attended.queries, attended.lse))
        B, _, W, D = q.shape
        H, G = old.weights.shape[1:3]

        def of_head(head: tuple[Array, Array]) -> Float[Array, "B H S"]:
            """From one query head of each group."""
            q, lse = head
            return window_scores(
                q,
                entries.keys,
                attended.positions,
                entries.positions,
                lse=lse,
                scale=attended.scale,
                window=attended.window,
                bias=entries.bias,
                reduction=Reduction(rows="max" if self.rows == "max" else "sum"),
            )

        heads = (jnp.moveaxis(q.reshape(B, H, G, W, D), 2, 0), jnp.moveaxis(lse.reshape(B, H, G, W), 2, 0))
        new = jnp.moveaxis(jax.lax.map(of_head, heads), 0, 2)
        weights = jnp.maximum(old.weights, new) if self.rows == "max" else old.weights + new
        return TaskWeights(weights, old.queries + _viewers(entries.positions, attended))

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        weights, queries = entries.per_slot
        if self.rows == "mean":
            weights = weights / jnp.maximum(queries, 1)[:, :, None]
        if self.value_norm == "v":
            weights = weights * jnp.linalg.norm(entries.values.astype(jnp.float32), axis=-1)[:, :, None]
        elif self.value_norm == "vo":
            B, H, G, M = weights.shape
            own = projected_norms(entries.values, moment, order=2).reshape(B, -1, M)
            weights = weights * moment.heads.whole_groups(own).reshape(B, H, G, M)
        scores = fold(weights, self.group, axis=2)
        return scores + moment.heads.mean(scores) if self.head_mean else scores


def _viewers(positions: Int[Array, "B H S"], attended: Attended) -> Int[Array, "B H S"]:
    """How many of the queries, which are of consecutive tokens, see each entry."""
    last = attended.positions[:, -1, None, None]
    first = last - attended.lengths[:, None, None] + 1
    newest = last if attended.window is None else jnp.minimum(last, positions + attended.window - 1)
    return jnp.where(positions >= 0, jnp.maximum(newest - jnp.maximum(first, positions) + 1, 0), 0)
