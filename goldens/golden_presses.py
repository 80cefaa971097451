"""The policies of `make_goldens.py` as kvpress has them, with its random draws from fixed seeds."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import kvpress
import numpy as np
import torch
from transformers import PreTrainedModel


def finch(ratio: float, window: int, normalised: bool = True, rerotate: bool = False) -> kvpress.FinchPress:
    """Returns FINCH for a question of `window` tokens. The press itself would find the question by a delimiter."""
    press = kvpress.FinchPress(ratio, normalize_scores=normalised, rerotate_keys=rerotate)
    press.delimiter_token_id, press.window_size = -1, window
    return press


class DrawnGates(kvpress.DuoAttentionPress):
    """DuoAttention with gates from a fixed seed. The press itself would download those of a large model."""

    def load_attention_pattern(self, model: PreTrainedModel) -> tuple[int, int, np.ndarray]:
        shape = model.config.num_hidden_layers, model.config.num_key_value_heads
        self.gates = np.random.default_rng(0).random(shape)
        return 4, 28, self.gates


class DrawnCurve(kvpress.LUKVPress):
    """LU-KV with a curve from a fixed seed. The press itself would download that of a large model.

    At 160 tokens and a ratio r the heads retain 160 (1 - r) entries on average. The total of each layer is an integer,
    so that it needs no rounding, and in each layer the first head's remainder is the largest.
    """

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        self._budget_curves = None  # that of the model before
        super().post_init_from_model(model)

    def _load_budget_curves(self, model: PreTrainedModel) -> np.ndarray:
        layers, heads = self._model_curve_shape(model)
        rng = np.random.default_rng(0)
        by_layer = np.array({3: (-24, 0, 24), 4: (-24, -8, 8, 24)}[layers])[:, None]
        by_head = np.array({2: (-8, 8), 4: (-20, -8, 8, 20)}[heads])
        more = rng.permutation(by_layer) + rng.permuted(np.tile(by_head, (layers, 1)), axis=1)
        means = 160 - 1.6 * np.arange(1, 100)[:, None, None]
        retained = means + more * means / 80
        retained[..., 0] -= 0.3
        retained[..., 1] += 0.3
        self.curve = np.clip(1 - retained / 160, 0, 1)
        return self.curve


class DrawnSketches(kvpress.CompactorPress):
    """Compactor with sketches from a fixed seed. The press itself would draw other ones in float64."""

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        config = model.config
        shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim, self.sketch_dimension
        self.gaussian = np.random.default_rng(0).standard_normal(shape) * self.sketch_dimension**-0.5

    def score(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn = self.gaussian[module.layer_idx] * self.sketch_dimension**0.5
        with patch.object(torch, "randn", lambda *_, dtype, **__: torch.as_tensor(drawn, dtype=dtype)[None]):
            return super().score(module, *args, **kwargs)


# The ratios retain an integral number of tokens (such as 80 or 40 of 160), because kvpress truncates the number in
# floating point. They retain at least the window, because kvpress retains an arbitrary part of a window that is larger.
PRESSES: dict[str, kvpress.BasePress] = {
    "snapkv_w8_k5_r50": kvpress.SnapKVPress(0.5, window_size=8, kernel_size=5),
    "snapkv_w16_k5_r75": kvpress.SnapKVPress(0.75, window_size=16, kernel_size=5),
    "snapkv_w16_k7_r50": kvpress.SnapKVPress(0.5, window_size=16, kernel_size=7),
    "snapkv_w32_k7_r75": kvpress.SnapKVPress(0.75, window_size=32, kernel_size=7),
    "tova_r50": kvpress.TOVAPress(0.5),
    "tova_r75": kvpress.TOVAPress(0.75),
    "streaming_llm_r50": kvpress.StreamingLLMPress(0.5, n_sink=4),
    "streaming_llm_r75": kvpress.StreamingLLMPress(0.75, n_sink=4),
    "observed_attention_r50": kvpress.ObservedAttentionPress(0.5),
    "knorm_r50": kvpress.KnormPress(0.5),
    "keydiff_r50": kvpress.KeyDiffPress(0.5),
    "pyramidkv_w8_k5_b4_r75": kvpress.PyramidKVPress(0.75, window_size=8, kernel_size=5, beta=4),
    "pyramidkv_w8_k5_b20_r40": kvpress.PyramidKVPress(0.4, window_size=8, kernel_size=5),  # one layer retains all
    "pyramidkv_w8_k5_b20_r75": kvpress.PyramidKVPress(0.75, window_size=8, kernel_size=5),  # falls back to SnapKV
    "expected_attention_r75": kvpress.ExpectedAttentionPress(0.75),
    "expected_attention_e01_f64_r40": kvpress.ExpectedAttentionPress(
        0.4, n_future_positions=64, n_sink=2, epsilon=0.01
    ),
    "lagkv_l26_r75": kvpress.LagKVPress(0.75, lag_size=26),  # all partitions have the same size, so no ranks tie
    "lagkv_l32_r45": kvpress.LagKVPress(0.45, lag_size=32),
    "chunkkv_knorm_l20_r50": kvpress.ChunkKVPress(kvpress.KnormPress(0.5), chunk_length=20),
    "chunkkv_snapkv_l16_r50": kvpress.ChunkKVPress(kvpress.SnapKVPress(0.5, window_size=16, kernel_size=5), 16),
    "criticalkv_snapkv_r50": kvpress.CriticalKVPress(kvpress.SnapKVPress(0.5, window_size=16, kernel_size=5)),
    "criticalkv_expected_r75": kvpress.CriticalKVPress(kvpress.ExpectedAttentionPress(0.75, use_vnorm=False)),
    "finch_w16_r50": finch(0.5, 16),
    "finch_w24_r75": finch(0.75, 24, normalised=False),
    # With these ratios no two composites tie. With add_v_norm the press fails.
    "kvcompose_r45": kvpress.KVComposePress(compression_ratio=0.45),
    "kvcompose_r85": kvpress.KVComposePress(compression_ratio=0.85),
    "kvcompose_mean_r25": kvpress.KVComposePress(compression_ratio=0.25, agg_task="mean"),
    "kvcompose_heads_r75": kvpress.KVComposePress(structured=False, compression_ratio=0.75),
    "adakv_snapkv_r50": kvpress.AdaKVPress(kvpress.SnapKVPress(0.5, window_size=16, kernel_size=5)),
    "adakv_expected_a50_r75": kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(0.75, epsilon=0.01), 0.5),
    "kvzip_c64_r50": kvpress.KVzipPress(0.5, chunk_size=64),
    "kvzip_layerwise_r75": kvpress.KVzipPress(0.75, layerwise=True),
    "duo_attention_r50": DrawnGates(0.5),
    "non_causal_attention_c40_r50": kvpress.NonCausalAttnPress(0.5, chunk_size=40),  # the press pads a shorter chunk
    "compactor_c37_r75": DrawnSketches(0.75, chunk_size=37, sketch_dimension=6),  # 148 tokens are not protected
    "cur_r50": kvpress.CURPress(0.5),
    "cur_mean_r75": kvpress.CURPress(0.75, num_sinks=2, leverage_type="kv_avg", use_local_approximation=False),
    "capkv_r50": kvpress.CapPress(0.5),
    "capkv_t2_f64_r75": kvpress.CapPress(0.75, tau=2.0, n_future_positions=64, n_sink=2, epsilon=0.01),
    "finch_consecutive_w16_r75": finch(0.75, 16, rerotate=True),
    "key_rerotation_snapkv_r50": kvpress.KeyRerotationPress(kvpress.SnapKVPress(0.5, window_size=8, kernel_size=5)),
    "blockwise_keydiff_b32_r50": kvpress.BlockPress(kvpress.KeyDiffPress(0.5), 32),
    "kvzip_plus_c64_r50": kvpress.KVzipPress(0.5, chunk_size=64, kvzip_plus_normalization=True),
    "kvgrad_c64_r50": kvpress.KVgradPress(0.5, chunk_size=64),
    "kvgrad_layerwise_r75": kvpress.KVgradPress(0.75, layerwise=True),
    "per_layer_snapkv": kvpress.PerLayerCompressionPress(
        kvpress.SnapKVPress(window_size=16, kernel_size=5), [0.5, 0.75, 0.25, 0.6]
    ),
    "entropy_gated_chunkkv_knorm_r50": kvpress.EntropyGatedChunkKVPress(kvpress.KnormPress(0.5)),
    "entropy_gated_chunkkv_knorm_l16_r75": kvpress.EntropyGatedChunkKVPress(kvpress.KnormPress(0.75), 16, 3),
    "merging_snapkv_w8_k5_r50": kvpress.MergingPress(kvpress.SnapKVPress(0.5, window_size=8, kernel_size=5)),
    "merging_knorm_t10_f75_r50": kvpress.MergingPress(kvpress.KnormPress(0.5), 0.1, 0.75),
    "lukv_expected_r50": DrawnCurve(kvpress.ExpectedAttentionPress(epsilon=2e-2), 0.5),
    "lukv_snapkv_s2_r75": DrawnCurve(kvpress.SnapKVPress(window_size=8, kernel_size=5), 0.75, sink=2, window=3),
}


def described(press: kvpress.BasePress) -> dict[str, Any]:
    """Returns the class and the arguments of a press, and recursively those of a press inside it."""
    kwargs = {key: described(x) if isinstance(x, kvpress.BasePress) else x for key, x in vars(press).items()}
    return {"press": type(press).__name__, "kwargs": kwargs}


# The descriptions are made before any press runs, because some presses store state in their attributes.
DESCRIPTIONS = {label: described(press) for label, press in PRESSES.items()}
