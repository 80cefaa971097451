"""KVCompose (Akulov et al., arXiv 2509.05165): lets heads choose their own tokens, and layers compete for numbers.

Differences from the paper and its code, which is part of kvpress:

- Without a task, the prompt runs again at positions N .. 2N - 1, and only its own entries are scored, as released.
  `score.source="self"` takes the attention of the first pass. `score.source="prompt"` takes task prompts, each of which
  runs alone behind the prompt; the released code would run them one behind the other.
- A layer may retain nothing, and `min_tokens` reserves entries out of the same total. kvpress adds at least one token
  per layer.
- The total is L times a share of the prompt that was rounded down, counted in integers. The paper rounds the total, and
  the released code multiplies in floating point.
- The released code raises the first layer's composites to the largest of their rank in any layer, which is
  `first_layer=True` here.
- Attention and means are float32.
- With `structured=False` heads store different numbers of entries. kvpress masks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.checks import check_truth, shown
from kvjax.mesh.heads import Heads
from kvjax.pallas_kernels import Reduction, fold, top_counts
from kvjax.policy import (
    AllocatedBudget,
    Attended,
    LayerShape,
    Moment,
    Needs,
    Pass,
    Policy,
    Protect,
    Received,
    Score,
    Texts,
    check_choice,
    check_integer,
)

from .common.allocation import check_mean, raise_best
from .common.budgets import budget_of
from .common.projected_norms import projected_norms
from .common.refusals import check_prompts_only
from .common.shares import GlobalShares
from .registry import preset


class TaskWeights(NamedTuple):
    """The reduced softmax weights of the task's queries so far on each slot, and how many queries saw it."""

    weights: Float[Array, "B H G S"]
    queries: Int[Array, "B H S"]


@dataclass(frozen=True)
class TaskAttention(Score):
    """Attention from the tokens of a task, reduced over these, then over the query group (eq. 14 to 16).

    A row's softmax is over all entries that it sees, those of the task's own tokens included; only the prompt's entries
    are scored. On a mesh the mean over heads is taken once per prompt and layer. Where devices share a kv head, its
    queries are gathered once per pass, and projected norms once per prompt and layer.

    Attributes:
        source: whose tokens. "replay": the prompt's, run a second time behind itself, which is the paper's
            task-agnostic form as released; "self": the prompt's as it is read, which needs no second pass; "prompt":
            those of `prompts` (task-aware).
        prompts: for source="prompt": a text, or several texts or tuples of token ids, each of which runs on its own
            behind the prompt. Texts need `tokenizer=`.
        rows: the reduction over the task's queries, Agg_task: "max" (the paper's setting), "mean" of those that see the
            entry, or "sum".
        group: the reduction over the query group, Agg_group, after rows: "mean" (the paper's setting) or "max".
        head_mean: whether the mean of all kv heads' scores is added to each (equation 16), at the prompt's end, when
            the heads of a layer hold the same tokens in the same slots. False leaves the sum out: S = S2.
        value_norm: multiplies attention (S1 of equation 14) by the L2 norm of the value, "v", or of the value behind
            the query head's output projection, "vo" (A.1.3, equations 26 and 27).

    Raises:
        ValueError: for a value that is not accepted, and for prompts with a source that does not use them.
    """

    source: Literal["replay", "self", "prompt"] = "replay"
    prompts: str | tuple[str | tuple[int, ...], ...] = ""
    rows: Literal["max", "mean", "sum"] = "max"
    group: Literal["mean", "max"] = "mean"
    head_mean: bool = True
    value_norm: Literal["none", "v", "vo"] = "none"

    def __post_init__(self) -> None:
        check_choice("source", self.source, "replay", "self", "prompt")
        check_choice("rows", self.rows, "max", "mean", "sum")
        check_choice("group", self.group, "mean", "max")
        check_choice("value_norm", self.value_norm, "none", "v", "vo")
        if (self.source == "prompt") != bool(self.prompts):
            raise ValueError(
                f"source={self.source!r} with prompts={shown(self.prompts)}: expected prompts where the source is "
                "'prompt', and none otherwise"
            )
        usable = isinstance(self.prompts, str | tuple) and all(
            isinstance(prompt, str | tuple) and len(prompt) for prompt in self._texts
        )
        if not usable:
            raise ValueError(
                f"prompts={shown(self.prompts)}: expected a text, or a tuple of texts and tuples of token ids, none of "
                "them empty"
            )

    @property
    def _texts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts one by one."""
        if isinstance(self.prompts, str):
            return (self.prompts,) if self.prompts else ()
        return self.prompts

    @property
    def needs(self) -> Needs:
        reduction = Reduction(rows="max" if self.rows == "max" else "sum", group="none")
        return Needs(
            received=Received(reduction, calls="prompts" if self.source == "self" else "replays"),
            whole_prompt=self.source == "replay",
            texts=self._texts,
            marks=frozenset({"weighs_values"}) if self.value_norm != "none" else frozenset(),
        )

    def check(self, policy: Policy) -> None:
        check_prompts_only(policy)
        if self.source != "self" and not policy.allocates:
            raise ValueError(
                f"source={self.source!r} runs tokens over the complete prompt, and under {policy.budget} each layer is "
                "compressed before the next one reads it; expected a budget that is allocated, such as "
                "CompositeShares, or source='self'"
            )

    def init(self, shape: LayerShape) -> tuple[TaskWeights, None]:
        weights = shape.per_slot(shape.heads // shape.kv_heads)
        return TaskWeights(weights, shape.per_slot(dtype=jnp.int32)), None

    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        zeros = jnp.zeros_like(lengths)
        if self.source == "replay":
            return [Pass(tokens, lengths, zeros, lengths)]
        given = [jnp.array(ids, jnp.int32) for ids in texts]
        return [
            Pass(jnp.tile(ids, (len(lengths), 1)), jnp.full_like(lengths, len(ids)), zeros, lengths) for ids in given
        ]

    def observe(self, entries: Slots, attended: Attended) -> tuple[TaskWeights, None]:
        """Adds the weights of these queries, if they are the task's, to those of the queries before."""
        old: TaskWeights = entries.per_slot
        if (attended.replay is None) != (self.source == "self"):
            return old, None
        new = attended.received
        assert new is not None
        weights = jnp.maximum(old.weights, new) if self.rows == "max" else old.weights + new
        return TaskWeights(weights, old.queries + _viewers(entries.positions, attended)), None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        weights, queries = entries.per_slot
        if self.rows == "mean":
            weights = weights / jnp.maximum(queries, 1)[:, :, None]
        if self.value_norm == "v":
            weights = weights * jnp.linalg.norm(entries.values.astype(jnp.float32), axis=-1)[:, :, None]
        elif self.value_norm == "vo":
            B, H, G, M = weights.shape
            own = projected_norms(entries.values, moment.layer.output, order=2).reshape(B, -1, M)
            weights = weights * moment.heads.whole_groups(own).reshape(B, H, G, M)
        scores = fold(weights, self.group, axis=2)
        return scores + moment.heads.mean(scores) if self.head_mean else scores


def _viewers(positions: Int[Array, "B H S"], attended: Attended) -> Int[Array, "B H S"]:
    """Returns the number of the queries, which are of consecutive tokens, that see each entry."""
    last = attended.positions[:, -1, None, None]
    first = last - attended.lengths[:, None, None] + 1
    newest = last if attended.window is None else jnp.minimum(last, positions + attended.window - 1)
    return jnp.where(positions >= 0, jnp.maximum(newest - jnp.maximum(first, positions) + 1, 0), 0)


@dataclass(frozen=True)
class CompositeShares(AllocatedBudget):
    """The k-th best entries of all kv heads form composite k of a layer, and layers compete with their composites.

    A composite's importance is the mean or the maximum of its entries' scores. The best L * mean composites of all
    layers are retained, so that each layer retains the same number of entries in all of its heads (eq. 17 to 24). On a
    mesh the heads exchange the mean, or for the maximum all their scores, once per prompt.

    Attributes:
        budget: entries of the mean layer, the same for all layers.
        min_tokens: no layer retains fewer, as far as it has them; out of the same total. 0 may leave a layer empty.
        first_layer: whether the composites of the first layer are raised to the largest of the same rank in any layer,
            as in the released code.
        heads: the reduction over the kv heads, Agg_head of equation 19.

    Raises:
        ValueError: for a value that is not accepted, or a budget that is not the same for all layers.
    """

    min_tokens: int = 0
    first_layer: bool = False
    heads: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        check_integer("min_tokens", self.min_tokens, least=0)
        check_choice("heads", self.heads, "mean", "max")
        check_mean(self.budget)
        if (smallest := self.budget.smallest) is not None and smallest < self.min_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} of a mean of {smallest}: expected at most that mean")

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        ranked = jnp.moveaxis(jnp.flip(jnp.sort(scores, axis=-1), axis=-1), 0, 2)
        maximum = self.heads == "max"
        composites = jnp.max(heads.whole_layer(ranked), axis=1) if maximum else heads.mean(ranked)[:, 0]
        if self.first_layer:
            composites = composites.at[:, 0].max(jnp.max(composites, axis=1))
        counts = top_counts(raise_best(composites, max(least, self.min_tokens)), jnp.sum(means, axis=0))
        return jnp.broadcast_to(counts.T[..., None], scores.shape[:3])


SCORE = TaskAttention()


@preset
def kvcompose(
    budget: int | float = 1024,
    heads: Literal["mean", "max"] = "mean",
    structured: bool = True,
    groups: int = 1,
    min_tokens: int = 0,
    first_layer: bool = False,
    recent: int = 0,
    score: TaskAttention = SCORE,
) -> Policy:
    """Compresses the prompt once, after all layers have read it, by the attention of a task; the answer is added to it.

    Without a task the prompt is its own task: it runs a second time behind itself, at positions N .. 2N - 1, and

        S1[q, c] = max over its rows m of softmax(q_m . k)_c, for the N entries c of the prompt   (equation 14)
        S2[h, c] = mean over the query group of S1                                                (equation 15)
        S[h, c] = S2[h, c] + mean over kv heads of S2[., c]                                       (equation 16)
        I[l, k] = mean over the kv heads of layer l of the k-th largest S                   (equations 17 to 19)

    The softmax is over all entries that m sees. The k-th best entries of a layer's heads are its composite k, whose
    importance is I[l, k]. The L * budget best composites of all layers are retained (equations 20 to 24). A layer may
    be left without entries, and a later token then attends to itself alone there.

    Variants, as text:

    - `kvcompose:heads=max` takes the maximum over kv heads as the importance of a composite (Agg_head, equation 19).
    - `kvcompose:structured=False` lets (layer, head) pairs compete, and each stores its own number of entries.
    - `kvcompose:score.value_norm=v` or `vo` multiplies attention by the norm of the value, or of the value behind the
      output projection.
    - `kvcompose:recent=48` also retains the last tokens of prompts that end with a question. Otherwise the question is
      scored as the text is.

    Args:
        budget: entries of the mean kv head. A float is a share of each row's prompt, 1 - r of the paper, rounded down
            before it is multiplied by the number of layers.
        heads: Agg_head, over the kv heads of a composite (eq. 19): "mean" (the paper's setting) or "max".
        structured: whether all heads of a layer retain the same number. False: (layer, head) pairs compete with their
            S, and each stores the entries that it retains.
        groups: for structured=False on a mesh: the number of groups of kv heads that compete, a multiple of the number
            of devices over which kv heads are divided.
        min_tokens: no layer (no head, if not structured) retains fewer; out of the same total.
        first_layer: whether composites of the first layer count as the largest of their rank in any layer, as released.
        recent: the number of last tokens, which are always retained (paper: none). It should cover a question at the
            end of a prompt, which is scored as the text is, and of which a small budget may retain too little.
        score: the task, whose attention counts, and how S reduces it. Its options are those of `TaskAttention`, as text
            `score.source`, `score.rows` and so on.

    Raises:
        ValueError: for a value that is not accepted, and for options that mean nothing with or without `structured`.
    """
    check_truth("structured", structured)
    allocated: AllocatedBudget
    if structured:
        if groups != 1:
            raise ValueError(f"groups={groups} with structured=True, where heads do not compete: expected groups=1")
        allocated = CompositeShares(budget_of(budget), min_tokens, first_layer, heads)
    else:
        if first_layer:
            raise ValueError("first_layer=True with structured=False, where no composites exist: expected False")
        if heads != "mean":
            raise ValueError(f"heads={heads!r} with structured=False, where no composites exist: expected 'mean'")
        allocated = GlobalShares(budget_of(budget), groups, min_tokens)
    protect = Protect(recent=recent)
    return Policy(score=score, budget=allocated, protect=protect)
