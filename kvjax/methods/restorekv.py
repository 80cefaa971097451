"""RestoreKV (Baek et al., arXiv 2608.01247): learned tokens read the complete cache, and their entries stay in it.

Sources: the abstract, the authors' project page, and the press that they contributed to kvpress (pull request 259),
which defines inference. The paper's text beyond the abstract could not be read, training code is not published, and the
published weights were not read. `kvjax train-gates` trains tokens and adapters by self-distillation, whose loss was
therefore not compared with the authors'.

- As in kvpress, the tokens run at the positions N .. N + n - 1 after the base has scored, before anything is evicted.
  The base retains n entries of the mean kv head less, and does not see theirs. Text that follows begins at N + n.
- kvpress puts the entries of a context that is compressed once before all its questions. Here later turns follow them
  too: those of the first prompt stay, and no others are added.
- A prompt that fits into its budget has no learned tokens, as in kvpress with a compression ratio of 0. So it is too
  under a base that compresses such a prompt (`dms`, `fastgen`, `simlayerkv`), whose default budget is the whole prompt.
- kvpress gives a budget below n to the learned tokens alone. Here it is raised to n, the protected entries and 1.
- kvpress has KVzip and KVzip+ as bases. The paper names five methods; here the base is any policy that compresses
  prompts and does not evict while decoding.
- Recurrent layers go on from the prompt's states. Experts of a mixture have no adapters.
"""

from __future__ import annotations

from dataclasses import replace

from kvjax.policy import LearnedTokens, Policy, check_integer, check_kind

from .common.shares import UniformShares
from .kvzip import kvzip
from .registry import preset

GATES = "restorekv"
KVZIP = kvzip()


@preset
def restorekv(base: Policy = KVZIP, tokens: int = 8) -> Policy:
    """Compresses the prompt by the base, and gives a part of its budget to entries of learned tokens.

    After the prompt of N tokens, n learned tokens run once at the positions N .. N + n - 1, through layers with
    adapters, over the complete cache. Their keys and values stay in every kv head of every layer:

        entries of the mean kv head = n learned + (budget - n) of the prompt

    The text that follows begins at N + n, without adapters. Training lets the model answer from this cache as it would
    from the complete one. The answer is added to the entries.

    Tokens and adapters are gates beside the parameters: `kvjax.with_gates(params, PATH)` reads those that `kvjax
    train-gates` writes.

    Variants, as text:

    - `restorekv:base=kvzip,base.budget=0.1,base.score.normalise=True` is RestoreKV+, with KVzip+ as its base. It has
      gates of its own in kvpress.
    - `restorekv:base=snapkv,base.budget=256` has another base. Heads retain equally many entries if the base does not
      allocate its budget.

    Args:
        base: the policy that scores and retains entries of the prompt. Its budget pays for the learned tokens.
        tokens: the number n of learned tokens (paper: 8), the first of those that there are.

    Raises:
        ValueError: for a value that is not accepted, and for a base that evicts while decoding, rotates keys by their
            place, does not limit every layer, or has learned tokens itself. Parameters without these gates, or with
            fewer learned tokens, are refused when a prompt is read.
    """
    check_kind("base", base, Policy)
    check_integer("tokens", tokens, least=1)
    if base.learned is not None:
        raise ValueError("its base has learned tokens of its own, which would be lost; choose a base without them")
    budget = base.budget if base.allocates else UniformShares(base.budget)
    return replace(base, budget=budget, learned=LearnedTokens(GATES, tokens))
