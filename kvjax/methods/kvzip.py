"""KVzip (Kim et al., arXiv 2505.23416): entries that the model attends to when it repeats the prompt.

Differences from the paper. `sinks` first tokens are always retained, where the released code retains the system prompt.
The total is exact; `strict=True` retains only what exceeds a threshold, as released. Instructions are text without a
chat template, unless `score.suffix` gives one. The context-independent variant with head-level scores is not here.
`score.normalise=True` is KVzip+, after kvpress, whose scores the networks of KVzap (arXiv 2601.07891) predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.heads import Heads
from kvjax.models import join_sinks
from kvjax.pallas_kernels import Reduction, compact, prompt_attention, window_scores
from kvjax.policy import (
    AllocatedBudget,
    Attended,
    LayerShape,
    Layout,
    Moment,
    Needs,
    Pass,
    Policy,
    Protect,
    Score,
    Texts,
    check_choice,
    check_integer,
    check_kind,
)
from kvjax.shown import shown

from .adakv import AdaptiveShares
from .common.allocation import check_limited
from .common.budgets import budget_of
from .common.drop import Drop
from .common.global_shares import GlobalShares
from .common.projected_norms import projected_norms
from .common.top_tokens import TopTokens
from .registry import preset

REPEATED = 8  # the number of tokens before a chunk that its instruction quotes


@dataclass(frozen=True)
class Reconstruction(Score):
    """The largest weight that any query of any head of the group gave to an entry while its chunk was repeated.

    The prompt is replayed in chunks, after the complete cache: an instruction, then the chunk itself. From the second
    chunk on the instruction quotes the tokens before the chunk. Replayed tokens attend to everything, as they would if
    they were generated. The weights that count are those of a softmax over the first `sinks` entries, the chunk's own
    entries and the tokens replayed so far. On a mesh where devices share a kv head its queries are gathered, once per
    chunk, and the norms of projected values with them.

    KVzip+ scales the weight a[g, t, c] that query head g of the replayed token t gives to entry c before the maximum:

        score[h, c] = max over g and t of a[g, t, c] |W_O[g] v_c| / |x_t|

    x_t is the hidden state of the replayed token that attention reads, after the norm before attention if the family
    has one. It belongs to t in the replay, not to the prompt's token that t repeats.

    Attributes:
        sinks: the number of first entries that every chunk's softmax covers.
        chunk: the number of tokens that are repeated at a time.
        instruction: before the first chunk: text, which needs a tokenizer, or token ids. '' is nothing.
        starting: before the other chunks, followed by the 8 tokens that precede the chunk.
        suffix: between the instruction and the chunk, such as what the model's chat template puts before an answer.
        normalise: whether weights are scaled as in KVzip+.

    Raises:
        ValueError: for a value that is not accepted.
    """

    sinks: int = 4
    chunk: int = 2048
    instruction: str | tuple[int, ...] = "\n\nRepeat the previous context exactly."
    starting: str | tuple[int, ...] = "\n\nRepeat the part of the previous context exactly, starting with"
    suffix: str | tuple[int, ...] = "\n"
    normalise: bool = False

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, least=0)
        check_integer("chunk", self.chunk, least=1)
        for name in ("instruction", "starting", "suffix"):
            text = getattr(self, name)
            if not isinstance(text, str | tuple):
                raise ValueError(f"{name}={shown(text)}: expected a text or a tuple of token ids")

    @property
    def needs(self) -> Needs:
        return Needs(
            queries="rotated",
            whole_prompt=True,
            texts=(self.instruction, self.starting, self.suffix),
            weighs_values=self.normalise,
            hidden=self.normalise,
        )

    def check(self, policy: Policy) -> None:
        if policy.every is not None:
            raise ValueError(
                f"Reconstruction scores a prompt, and nothing that is decoded; with every={policy.every} it cannot be "
                "combined"
            )
        if not policy.allocates:
            raise ValueError(
                f"Reconstruction runs tokens over the complete prompt, and under {policy.budget} each layer is "
                "compressed before the next one reads it: expected a budget that is allocated, such as UniformShares"
            )

    def init(self, shape: LayerShape, slots: int) -> tuple[Float[Array, "B H S"], None]:
        return jnp.zeros((shape.batch, shape.kv_heads, slots), jnp.float32), None

    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        instruction, starting, suffix = texts
        chunk = min(self.chunk, tokens.shape[1])
        quoted = min(REPEATED, chunk)
        firsts = range(0, tokens.shape[1], chunk)
        return [
            _chunk(tokens, lengths, first, chunk, (*starting, *[-1] * quoted) if first else instruction, suffix)
            for first in firsts
        ]

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], None]:
        if attended.replay is None:
            return entries.per_slot, None
        own = attended.queries.shape[2]
        past = entries.slots - own
        of_prompt = jnp.arange(entries.slots) < past
        first, last = (x[:, None, None] for x in attended.replay)
        positions = entries.positions
        repeated = of_prompt & (positions >= first) & (positions < last)
        sinks = of_prompt & (positions >= 0) & (positions < self.sinks)
        visible = compact((repeated | sinks)[..., :past], min(past, self.sinks + self.chunk))
        replayed = jnp.broadcast_to(jnp.arange(past, entries.slots), (*visible.shape[:2], own))
        index = jnp.concatenate([visible, replayed], axis=-1)
        among = entries.gather(index)
        weights = _normalised(among, attended) if self.normalise else _largest(among, attended)
        counts = (index >= 0) & jnp.take_along_axis(repeated, jnp.maximum(index, 0), axis=-1)
        b, h = jnp.arange(index.shape[0])[:, None, None], jnp.arange(index.shape[1])[:, None]
        index = jnp.where(counts, index, entries.slots)
        return entries.per_slot.at[b, h, index].set(weights, mode="drop"), None

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot


def _largest(among: Slots, attended: Attended) -> Float[Array, "B H M"]:
    """The largest weight of each entry in a softmax over these entries."""
    lse = None if attended.layer.sinks is None else attended.heads.whole_groups(_sums(among, attended))
    return window_scores(
        attended.heads.whole_groups(attended.queries),
        among.keys,
        attended.positions,
        among.positions,
        lse=lse,
        **attended.layer.logits,
        reduction=Reduction(rows="max", group="max"),
    )


def _normalised(among: Slots, attended: Attended) -> Float[Array, "B H M"]:
    """The same with weights times the norm of the projected value, divided by that of the query's hidden state."""
    assert attended.hidden is not None
    B, H, M, _ = among.keys.shape
    size = jnp.linalg.norm(attended.hidden.astype(jnp.float32), axis=-1)
    lse = _sums(among, attended) + jnp.log(jnp.maximum(size, 1e-30))[:, None]  # divides the weights by the size
    norms = projected_norms(among.values, attended.layer.output, order=2).reshape(B, -1, M)
    whole = map(attended.heads.whole_groups, (attended.queries, lse, norms))

    def of_head(head: tuple[Array, Array, Array]) -> Float[Array, "B H M"]:
        """From one query head of each group."""
        queries, lse, norms = head
        weights = window_scores(
            queries,
            among.keys,
            attended.positions,
            among.positions,
            lse=lse,
            **attended.layer.logits,
            reduction=Reduction(rows="max"),
        )
        return weights * norms

    by_group = tuple(jnp.moveaxis(x.reshape(B, H, -1, *x.shape[2:]), 2, 0) for x in whole)
    return jnp.max(jax.lax.map(of_head, by_group), axis=0)


def _sums(among: Slots, attended: Attended) -> Float[Array, "B Hq W"]:
    """The log-sum-exp of each query over these entries, and over the sinks that every softmax of the layer has."""
    context, lse = prompt_attention(
        attended.queries, among.keys, among.values, attended.positions, among.positions, **attended.layer.logits
    )
    return join_sinks(context, lse, attended.layer.sinks)[1]


def _chunk(
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    first: int,
    size: int,
    lead: Sequence[int],
    suffix: Sequence[int],
) -> Pass:
    """The pass that repeats `size` tokens of each row from position `first` on, or those of them that the row has.

    In `lead`, before the suffix, -1 stands for the tokens that precede the chunk.
    """
    N = tokens.shape[1]
    fixed = jnp.array([*lead, *suffix, -1], jnp.int32)
    before = fixed.shape[0] - 1
    repeated = jnp.clip(lengths - first, 0, size)
    total = jnp.where(repeated > 0, before + repeated, 0)
    place = jnp.arange(before + size) - (before + size - total[:, None])  # in a row's replayed text
    position = first + jnp.where(place < before, place - len(lead), place - before)
    of_prompt = jnp.take_along_axis(tokens, jnp.clip(position + N - lengths[:, None], 0, N - 1), axis=1)
    of_lead = fixed[jnp.clip(place, 0, before)]
    text = jnp.where(of_lead >= 0, of_lead, of_prompt)
    begin = jnp.minimum(first, lengths)
    return Pass(jnp.where(place >= 0, text, 0).astype(tokens.dtype), total, begin, begin + repeated)


@dataclass(frozen=True)
class UniformShares(AllocatedBudget):
    """All heads of a layer retain the same number, for scores that are known only once all layers have read a prompt.

    Attributes:
        budget: entries of each kv head.
    """

    def __post_init__(self) -> None:
        check_limited(self.budget, "UniformShares")

    @property
    def layout(self) -> Layout:
        return Layout()

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        return jnp.broadcast_to(means[..., None], scores.shape[:3])


SCORE = Reconstruction()


@preset
def kvzip(
    budget: int | float = 0.3,
    sinks: int = 4,
    level: Literal["global", "layer", "head"] = "global",
    strict: bool = False,
    groups: int = 1,
    score: Reconstruction = SCORE,
) -> Policy:
    """Compresses the prompt by what the model attends to when it repeats the prompt, whatever is asked later.

    After the prompt, each chunk of it runs once more behind "Repeat the previous context exactly.", over the complete
    cache, and leaves no entries. score[h, c] = the largest weight that any of these queries, of any head of the group,
    gave to entry c, in a softmax over the sinks, the chunk's entries and the tokens replayed so far (section 3).
    Prefill takes two to three times as long, and the prompt's complete cache exists until the budget is allocated.

    Args:
        budget: entries of the mean kv head, sinks included. A float is a share of each row's prompt.
        sinks: the number of first tokens, which are always retained (the released code: the system prompt).
        level: which heads compete: those of all layers ("global"), those of each layer ("layer", kvpress's layerwise),
            or none, so that each head retains its budget ("head", uniform as released).
        strict: whether the score of the last entry that would fit is a threshold that must be exceeded, as released:
            one entry less is retained. Only with level="global".
        groups: the number of groups of consecutive kv heads that compete among themselves. On a mesh that divides kv
            heads over D devices it must be a multiple of D; one device with that number of groups retains the same.
        score: the length of chunks, the instructions, and whether weights are scaled (KVzip+). Its options are those of
            `Reconstruction`, as text `score.chunk`, `score.normalise` and so on; its sinks are those of the policy.

    Raises:
        ValueError: for a value that is not accepted, for `strict` or `groups` at a level where they mean nothing, and
            for a score with other sinks than `sinks`.
    """
    check_choice("level", level, "global", "layer", "head")
    check_kind("score", score, Reconstruction)
    if strict and level != "global":
        raise ValueError(f"strict=True with level={level!r}: expected level='global'")
    if groups != 1 and level == "head":
        raise ValueError(f"groups={groups} with level='head', where no heads compete: expected groups=1")
    if score.sinks not in (SCORE.sinks, sinks):
        raise ValueError(
            f"score.sinks={score.sinks} with sinks={sinks}: expected sinks={score.sinks}, or no score.sinks"
        )
    entries = budget_of(budget)
    allocated: AllocatedBudget = UniformShares(entries)
    if level == "global":
        allocated = GlobalShares(entries, groups, strict=strict)
    elif level == "layer":
        allocated = AdaptiveShares(entries, alpha=0.0, normalise=False, groups=groups)
    return Policy(
        score=replace(score, sinks=sinks),
        budget=allocated,
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(sinks=sinks),
    )
