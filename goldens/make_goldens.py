"""Makes tests/golden: tiny random models, and the entries that kvpress retains of a prompt on them.

tests/golden/README.md describes the format. The script needs its own environment, because kvpress pins an older
transformers than this project may have installed:

    python3.11 -m venv .venv-kvpress
    .venv-kvpress/bin/pip install torch==2.13.0 transformers==5.2.0 kvpress==0.5.5 safetensors==0.8.0 tokenizers==0.22.2
    .venv-kvpress/bin/python -m goldens.make_goldens

`--press LABEL` adds a press to the archives that exist, and leaves the others in them as they are.

Everything is drawn from fixed seeds on the CPU. The script refuses a model whose selections or tokens differ between
float32 and float64, or depend on nearly equal scores, so no golden depends on a rounding error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import kvpress.attention_patch
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from goldens.golden_models import MODELS, VOCABULARY, TinyModel
from goldens.golden_presses import DESCRIPTIONS, PRESSES, DrawnCurve, DrawnGates, DrawnSketches

# kvpress masks an entry by a key that points away from all queries. A query that is nearly orthogonal to it would still
# give the entry some weight, so this script makes the key a thousand times longer.
masking_key = kvpress.attention_patch.search_hyperplane
kvpress.attention_patch.search_hyperplane = lambda queries: 1000 * masking_key(queries)

PROMPT_LENGTH, STEPS = 160, 16
LEAST_MARGIN = 5e-5  # of `margin`
WRAPPERS = (
    kvpress.ChunkKVPress,
    kvpress.AdaKVPress,
    kvpress.KeyRerotationPress,
    kvpress.PerLayerCompressionPress,
    kvpress.LUKVPress,
    kvpress.MergingPress,
)
BY_OTHER_RULES = (kvpress.BlockPress, kvpress.EntropyGatedChunkKVPress)  # than the scores of all tokens
PACKAGES = ("torch", "transformers", "kvpress", "safetensors", "tokenizers", "numpy")


def chunk_means(scores: np.ndarray, length: int) -> np.ndarray:
    """Returns the scores that ChunkKV selects by: for every token, the mean over its chunk of the sum over heads."""
    chunks = np.arange(scores.shape[-1]) // length
    means = [scores[..., chunks == chunk].sum(1).mean(-1) for chunk in range(chunks[-1] + 1)]
    return np.broadcast_to(np.stack(means, axis=-1)[:, None, chunks], scores.shape)


def rotates(press: kvpress.BasePress) -> bool:
    """Returns whether a press rotates the retained keys to consecutive positions, which the answer then continues."""
    return isinstance(press, kvpress.KeyRerotationPress) or getattr(press, "rerotate_keys", False)


def attention_of(press: kvpress.BasePress) -> str:
    """Returns the attention implementation. Observed attention needs all weights, which only `eager` returns."""
    return "eager" if isinstance(press, kvpress.ObservedAttentionPress) else "sdpa"


@contextmanager
def recording(press: kvpress.BasePress, scores: list[torch.Tensor]) -> Iterator[None]:
    """Appends the scores [1, H, N] that a press selects by to `scores`, one item per layer."""
    if isinstance(press, DrawnGates | kvpress.BlockPress):
        yield
        return
    if isinstance(press, kvpress.KVComposePress):
        scorer, name = press, "enhance_scores"
    elif isinstance(press, kvpress.KVzipPress):
        scorer, name = press, "compress_post"
    else:
        scorer, name = press, "score"
        if isinstance(press, WRAPPERS):
            scorer = press.press
    method = getattr(scorer, name)

    def recorded(*args: Any) -> Any:
        result = method(*args)
        if name == "score":
            scores.append(result)
        else:
            scores.extend(press.score_val if isinstance(press, kvpress.KVzipPress) else press.scores[:, None].clone())
        return result

    setattr(scorer, name, recorded)
    yield
    delattr(scorer, name)  # restores the method of the class


def characters(folder: str) -> str:
    """Writes a tokenizer of single characters to a folder. KVzip encodes its instructions with it."""
    backend = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(folder)
    return folder


@torch.no_grad()
def run(
    model: PreTrainedModel, prompt: torch.Tensor, attention: str, press: kvpress.BasePress | None = None
) -> dict[str, Any]:
    """Reads the prompt, compresses it with `press`, and decodes greedily at the positions after the prompt."""
    model.set_attn_implementation(attention)
    torch.set_default_dtype(model.dtype)  # KVzip creates its mask in the default dtype
    cache = DynamicCache()
    scores: list[torch.Tensor] = []
    if press is None:
        logits = model(prompt[None], past_key_values=cache).logits[0]
    else:
        with recording(press, scores), press(model):
            logits = model(prompt[None], past_key_values=cache).logits[0]
        if isinstance(press, kvpress.KVComposePress) and not press.structured:
            cache.crop(len(prompt))  # the press does not remove the copy of the prompt that it scored with
    kept = [torch.cat([layer.keys[0], layer.values[0]], dim=-1) for layer in cache.layers]
    hidden = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]

    tokens, step_logits = [int(logits[-1].argmax())], []
    after = cache.get_seq_length() if press is not None and rotates(press) else len(prompt)
    for step in range(STEPS):
        position = torch.tensor([[after + step]])
        step_logits.append(
            model(torch.tensor([[tokens[-1]]]), past_key_values=cache, position_ids=position).logits[0, -1]
        )
        tokens.append(int(step_logits[-1].argmax()))
    torch.set_default_dtype(torch.float32)
    return {
        "logits": logits.numpy(),
        "kept": kept,
        "hidden": hidden,
        "scores": np.stack([layer[0].numpy() for layer in scores]) if scores else None,
        "tokens": np.asarray(tokens, np.int32),
        "step_logits": torch.stack(step_logits).numpy(),
    }


def positions(kept: list[torch.Tensor], full: list[torch.Tensor], press: kvpress.BasePress) -> np.ndarray:
    """Returns the original positions [L, H, n] of the retained rows, ascending and padded with -1.

    Each row is found as the only equal row of the full cache: by the keys of a press that changes values, and by the
    values of one that rotates keys.
    """
    layers = []
    for some, every in zip(kept, full, strict=True):
        half = some.shape[-1] // 2
        if rotates(press):
            some, every = some[..., half:], every[..., half:]
        elif isinstance(press, kvpress.MergingPress):
            some, every = some[..., :half], every[..., :half]
        equal = (some[:, :, None] == every[:, None]).all(-1)  # [H, n, N]
        assert (equal.sum(-1) == 1).all(), "a cache row was changed, or two rows of the full cache are equal"
        layers.append(equal.int().argmax(-1).sort(-1).values.numpy())
    most = max(layer.shape[-1] for layer in layers)
    return np.stack([np.pad(x, ((0, 0), (0, most - x.shape[-1])), constant_values=-1) for x in layers])


def unhidden(hidden: list[tuple[torch.Tensor, ...]], heads: int, length: int) -> np.ndarray:
    """Returns the same as `positions`, for a press that masks entries of single heads instead of removing them."""
    kept = np.ones((len(hidden), heads, length), bool)
    for layer, (_, head, position) in zip(kept, hidden, strict=True):
        layer[head.numpy(), position.numpy()] = False
    pos = np.where(kept, np.arange(length), length)
    pos = np.sort(pos, axis=-1)[..., : kept.sum(-1).max()]
    return np.where(pos < length, pos, -1)


def competing(press: kvpress.BasePress, scores: np.ndarray, pos: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores and positions, with the heads that share a budget (of a layer or of all layers) as one head."""
    if not isinstance(press, kvpress.AdaKVPress | kvpress.KVzipPress):
        return scores, pos
    layers, heads, size = scores.shape
    groups = 1 if isinstance(press, kvpress.KVzipPress) and not press.layerwise else layers
    offset = np.arange(layers * heads // groups).reshape(-1, 1) * size
    together = pos.reshape(groups, -1, pos.shape[-1])
    together = np.where(together >= 0, together + offset, scores.size // groups).reshape(groups, 1, -1)
    return scores.reshape(groups, 1, -1), together


def layers_margin(press: kvpress.KVComposePress, scores: np.ndarray) -> float:
    """Returns the smallest relative gap between retained and evicted composites, over all layers or heads."""
    ranked = -np.sort(-scores, axis=-1)
    if press.structured:
        ranked = ranked.mean(axis=1)
        ranked[0] = ranked.max(axis=0)
    ranked = np.sort(ranked, axis=None)
    last = len(ranked) - int(ranked.size * (1 - press.compression_ratio))
    return float((ranked[last] - ranked[last - 1]) / ranked[last])


def margin(scores: np.ndarray, pos: np.ndarray) -> float:
    """Returns the smallest gap in a head between the retained and the evicted scores, relative to the larger one."""
    # The padding of `pos`, -1, marks an additional last column, which is then removed.
    kept = np.zeros((*scores.shape[:-1], scores.shape[-1] + 1), bool)
    np.put_along_axis(kept, pos, True, axis=-1)
    kept = kept[..., :-1]
    last, first = np.where(kept, scores, np.inf).min(-1), np.where(kept, -np.inf, scores).max(-1)
    return float(((last - first) / np.maximum(np.abs(last), np.abs(first))).min())


def make(name: str, tiny: TinyModel, folder: Path, labels: list[str]) -> None:
    """Writes a model and its goldens, those of these presses."""
    model = tiny.build()
    model.save_pretrained(folder / name)
    (folder / name / "generation_config.json").unlink(missing_ok=True)
    wide = tiny.build().double()
    with tempfile.TemporaryDirectory() as tokenizer:
        model.config.name_or_path = wide.config.name_or_path = characters(tokenizer)
        record(name, tiny, folder, model, wide, labels)


def record(
    name: str, tiny: TinyModel, folder: Path, model: PreTrainedModel, wide: PreTrainedModel, labels: list[str]
) -> None:
    """Runs presses on a model in float32 and float64 (`wide`), and writes the archive, or adds to it."""
    # The tokens are distinct, because equal tokens have equal key norms and would tie.
    prompt = np.random.default_rng(tiny.seed).permutation(VOCABULARY)[:PROMPT_LENGTH]
    ids = torch.from_numpy(prompt)

    full = {attention: run(model, ids, attention) for attention in ("sdpa", "eager")}
    full_wide = {attention: run(wide, ids, attention) for attention in ("sdpa", "eager")}
    arrays = {"prompt": prompt.astype(np.int32), "logits": full["sdpa"]["logits"]}
    arrays |= {f"full/{key}": full["sdpa"][key] for key in ("tokens", "step_logits")}
    presses = {}
    if len(labels) < len(PRESSES):
        with np.load(folder / f"{name}.npz") as archive:
            arrays |= dict(archive)
        presses = json.loads(str(arrays.pop("meta")))["presses"]
    for label in labels:
        press = PRESSES[label]
        attention = attention_of(press)
        out, out_wide = run(model, ids, attention, press), run(wide, ids, attention, press)
        if any(out["hidden"]):
            pos, pos_wide = (unhidden(x["hidden"], tiny.kv_heads, PROMPT_LENGTH) for x in (out, out_wide))
        else:
            # KVCompose needs `eager` as well, and selects it itself during prefill.
            reading = "eager" if isinstance(press, kvpress.KVComposePress) else attention
            pos = positions(out["kept"], full[reading]["kept"], press)
            pos_wide = positions(out_wide["kept"], full_wide[reading]["kept"], press)
        if isinstance(press, kvpress.ChunkKVPress) and not isinstance(press, BY_OTHER_RULES):
            out["scores"] = chunk_means(out["scores"], press.chunk_length)
        if isinstance(press, DrawnGates):
            full_heads = np.flatnonzero(~press.streaming_mask.numpy())
            gap = margin(press.gates.reshape(1, 1, -1), full_heads[None, None])
            arrays[f"{label}/gates"] = press.gates
        elif isinstance(press, BY_OTHER_RULES):
            gap = 1.0
        else:
            gap = margin(*competing(press, out["scores"], pos))
            arrays[f"{label}/scores"] = out["scores"]
        if isinstance(press, DrawnCurve):
            arrays[f"{label}/curve"] = press.curve
        if isinstance(press, DrawnSketches):
            arrays[f"{label}/gaussian"] = press.gaussian
        if isinstance(press, kvpress.KVComposePress):
            gap = min(gap, layers_margin(press, out["scores"]))
        stable = np.array_equal(pos, pos_wide) and np.array_equal(out["tokens"], out_wide["tokens"])
        if not stable or gap < LEAST_MARGIN:
            raise SystemExit(
                f"{name}/{label}: float64 differs, or margin={gap:.1e} is below {LEAST_MARGIN:.0e}; choose another seed"
            )
        arrays[f"{label}/pos"] = pos.astype(np.int16)
        arrays |= {f"{label}/{key}": out[key] for key in ("tokens", "step_logits")}
        presses[label] = {
            **DESCRIPTIONS[label],
            "attention": attention,
            "retained": pos.shape[-1],
            "margin": gap,
        }
    meta = {
        "prompt_length": PROMPT_LENGTH,
        "steps": STEPS,
        "seed": tiny.seed,
        "presses": presses,
        "versions": {package: version(package) for package in PACKAGES},
    }
    np.savez_compressed(folder / f"{name}.npz", meta=json.dumps(meta), **arrays)
    smallest = min(press["margin"] for press in presses.values())
    print(f"{name}: {len(presses)} presses, smallest margin between retained and evicted scores {smallest:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "tests" / "golden")
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS), help="default: all")
    parser.add_argument("--press", choices=PRESSES, nargs="+", default=list(PRESSES), help="default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    for name in arguments.model:
        make(name, MODELS[name], arguments.folder, arguments.press)
