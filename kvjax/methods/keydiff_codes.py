"""KeyDiff in 8-bit codes (no paper): retains nearly twice as many entries as bfloat16 does in the same bytes.

It is the best of the policies for dialogues that `scripts/search_policy.py` compared. A document of 512 tokens is
decoded token by token in the bytes of 128 entries in bfloat16, and a question about it follows. The table has the bits
for each token of the known answer, on two halves of the tasks, beside the published preset of the same bytes that needs
the fewest on that half:

| model | this preset | published |
|---|---|---|
| SmolLM2-135M-Instruct | 0.65 and 0.42 | 1.10 (`vase`) and 1.38 (`keydiff`) |
| demo model | 0.07 and 0.03 | 0.27 and 0.35 (`keydiff`) |

The differences are outside of their 95 % intervals. On prompts drawn anew it has the fewest bits again: 0.48 and 0.40
on SmolLM2, 0.02 and 0.02 on the demo model, where one of the differences to `keydiff` is within its interval. See
`docs/results/smollm2/long_answers.md` and `docs/results/demo_model.md`.
"""

from __future__ import annotations

from typing import Literal

from kvjax.policy import Policy

from .keydiff import keydiff
from .quantize import quantize
from .registry import preset


@preset
def keydiff_codes(budget: int | float = 1920, recent: int = 32, bits: Literal[8, 4] = 8) -> Policy:
    """Retains the entries whose keys are least similar to the others, in codes, in a cache of constant size.

        score[h, c] = -cos(k_c, mean over cached j of k_j / |k_j|)

    The score is that of `keydiff`, and the codes are those of `quantize`. A full head evicts one entry at a time. Codes
    of 8 bits hold 1.88 times as many entries as bfloat16 in the same bytes: 1920 for 1024, or 240 for 128.

    Args:
        budget: the number of entries that a query sees per kv head. An integer >= 1, or a float in (0, 1] for that
            share of each row's prompt.
        recent: the number of most recent tokens that are always retained.
        bits: the size of a code, 8 or 4.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than recent + 1.
    """
    return quantize(keydiff(budget, recent=recent, every=1), bits)
