"""DuoAttention (Xiao et al., arXiv 2410.10819)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kvjax.parts import Drop, Fixed, GatedShares, Recency, TopTokens
from kvjax.parts.gates import Gates, full_heads
from kvjax.policy import Policy, Protect
from kvjax.protocols import check_integer

DEMO = Path(__file__).parents[1] / "demo_model" / "duo_gates.json"


def duo_attention(
    gates: str | Gates = "demo",
    sparsity: float = 0.5,
    sinks: int = 128,
    recent: int = 256,
    every: int | None = 1,
    groups: int = 1,
) -> Policy:
    """Retrieval heads keep everything; streaming heads keep the first tokens and the most recent ones.

    Which kv head is which is a matter of the model, not of the prompt: a gate for each was trained to tell how much the
    model's answers need it to see everything (section 2.2), and those with the smallest gates stream.

    Args:
        gates: a file of them (.json or .npz as `scripts/train_duo_gates.py` writes, .tsv as the authors released), a
            tuple of numbers for each layer, or "demo" for the model that ships with kvjax. Gates of another number of
            layers or kv heads than the model's are refused when a cache is made; that is all that can be told of them.
        sparsity: the part of all kv heads that stream (the paper: 0.5 for models with query groups, 0.75 without).
        sinks: the first tokens, always kept.
        recent: the most recent tokens that a streaming head keeps; a query counts itself among them.
        every: streaming heads evict so many tokens at a time while decoding; None compresses the prompt only.
        groups: groups of consecutive kv heads, in each of which that part streams, so that they hold equally much. On a
            mesh that spreads kv heads over D devices it must be a multiple of D.
    """
    check_integer("sinks", sinks, least=0)
    check_integer("recent", recent, least=1)
    check_integer("groups", groups, least=1)
    if isinstance(sparsity, str | bool) or not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity={sparsity!r}: accepted is a number from 0 to 1")
    values = read_gates(DEMO if gates == "demo" else gates) if isinstance(gates, str) else gates
    return Policy(
        score=Recency(),
        budget=GatedShares(Fixed(sinks + recent), full_heads(_checked(values), sparsity, groups), groups),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(sinks=sinks),
        every=every,
    )


def read_gates(path: str | Path) -> Gates:
    """A gate for each layer and kv head. Raises ValueError for a file that has none."""
    path = Path(path)
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_text())["gates"]
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                rows = arrays["gates"].tolist()
        elif path.suffix == ".tsv":
            rows = np.loadtxt(path, delimiter="\t", ndmin=2).tolist()
        else:
            raise ValueError("its name ends otherwise")
        return tuple(tuple(float(gate) for gate in row) for row in rows)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"gates={str(path)!r} cannot be read ({error}); accepted are .json and .npz files with 'gates' and .tsv "
            "files, a row for each layer"
        ) from error


def _checked(gates: Gates) -> Gates:
    rows = {len(layer) if isinstance(layer, tuple) else 0 for layer in gates} if isinstance(gates, tuple) else {0}
    if len(rows) != 1 or 0 in rows or not np.isfinite(np.array(gates, float)).all():
        raise ValueError(f"gates={gates!r}: accepted are a file's name and a tuple of as many numbers for each layer")
    return gates
