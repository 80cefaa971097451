"""KVgrad (https://openreview.net/forum?id=cg1wTCJjjk), as in kvpress 0.5.5: scores by the gradient of a repetition.

The method was written after kvpress 0.5.5, with which scores, positions and tokens were compared. It was not compared
with the paper. The gradient is that of all tokens that run with a chunk, instructions included. Keys and values of the
prompt are constants. While a layer is differentiated, every expert of a mixture treats every token, which gives the
same derivative.

Differences from kvpress:

- The whole prompt is repeated and scored. kvpress leaves out what the chat template puts before the text.
- Norms and their product are computed in float32. kvpress computes them in the dtype of the model.
- Instructions are text without a chat template, unless `score.suffix` gives one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.policy import Attended, Needs, Pass, Policy, Protect, Texts, check_kind

from ..common.repetition import Repetition, largest_contributions
from ..kvzip import by_repetition
from ..registry import preset
from .backwards import backwards


@dataclass(frozen=True)
class Attribution(Repetition):
    """The largest contribution of an entry, by input times gradient, while the model repeats the entry's chunk.

        score[h, c] = max over g and t of a[g, t, c] |W_O[g] v_c| |d Phi / d y_t|

    a[g, t, c] is the weight of entry c for query head g of the replayed token t, in a softmax over the first
    `sinks` entries, the chunk's own entries and the tokens replayed so far. y_t is what the layer's attention gives to
    t, after the output projection. Phi = sum over t of |h_t|^2 over the hidden states behind the last layer, before the
    last norm, of all tokens that are replayed with the chunk. The prompt's entries are constants of the derivative.

    Attributes:
        sinks, chunk, instruction, starting, suffix: see `Repetition`.

    Raises:
        ValueError: for a value that is not accepted.
    """

    chunk: int = 512

    @property
    def needs(self) -> Needs:
        return replace(super().needs, marks=frozenset({"weighs_values"}))

    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        return [replace(part, run=backwards) for part in super().passes(tokens, lengths, texts)]

    def weighed(self, among: Slots, attended: Attended) -> Float[Array, "B H M"]:
        assert attended.measured is not None
        return largest_contributions(among, attended, attended.measured)


SCORE = Attribution()


@preset
def kvgrad(
    budget: int | float = 0.3,
    sinks: int = 4,
    level: Literal["global", "layer", "head"] = "global",
    groups: int = 1,
    recent: int = 0,
    score: Attribution = SCORE,
) -> Policy:
    """Compresses the prompt by how much its repetition depends on each entry, by input times gradient.

    After the prompt, each chunk of it runs again as under `kvzip`, over the complete cache: forwards through all
    layers, then backwards, where each layer runs once more and is differentiated.

        score[h, c] = max over g and t of a[g, t, c] |W_O[g] v_c| |d Phi / d y_t|,    Phi = sum over t of |h_t|^2

    a[g, t, c] is the weight of entry c for query head g of the replayed token t, in the softmax of `kvzip`. y_t is the
    attention output of the layer at t, and h_t the hidden state of t behind the last layer. The prompt's complete cache
    exists until the budget is allocated, and beside it the hidden states of one chunk between all layers.
    `kvgrad:recent=48` also retains the last tokens of prompts that end with a question.

    Args:
        budget: entries of the mean kv head, sinks included. A float is a share of each row's prompt.
        sinks: the number of first tokens, which are always retained (kvpress: n_sink).
        level: which heads compete: those of all layers ("global"), those of each layer ("layer", kvpress's layerwise),
            or none, so that each head retains its budget ("head").
        groups: the number of groups of consecutive kv heads that compete among themselves. On a mesh that divides kv
            heads over D devices it must be a multiple of D; one device with that number of groups retains the same.
        recent: the number of last tokens, which are always retained (kvpress: none).
        score: the length of chunks and the instructions. Its options are those of `Attribution`, as text `score.chunk`
            and so on; its sinks are those of the policy.

    Raises:
        ValueError: for a value that is not accepted, for `groups` with level="head", and for a score with other sinks
            than `sinks`.
    """
    check_kind("score", score, Attribution)
    return by_repetition(score, budget, Protect(sinks, recent), level, False, groups)
