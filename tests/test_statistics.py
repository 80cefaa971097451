"""Statistics of queries: what is measured against NumPy on all queries at once, their files, and what is refused."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.attend.causal import causal
from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import DEMO
from kvjax.checkpoint.hf import save_hf
from kvjax.checkpoint.named import load_named
from kvjax.gates.files import write_gates
from kvjax.models import Decoder, DecoderConfig, Rope
from kvjax.statistics.files import holds_statistics, read_statistics, write_statistics
from kvjax.statistics.measure import measured
from tests import tiny
from tests.checkpoint.torch_zip import save
from tests.methods.reference import rotated
from tests.products import each_once

SINKS = 3
ROPE = Rope(1e4)


def model(heads=8, kv_heads=2, rope=ROPE, unrotated=()):
    windows = (None, 8, None)
    config = DecoderConfig("llama", 64, 32, 48, heads, kv_heads, 8, windows, rope, 4096, unrotated=unrotated)
    return Decoder(config, nnx.Rngs(0))


def queries(params, texts):
    """[L, Hq, T, D] before RoPE and their positions [T], without the first tokens of each text, in float64."""
    found = []
    for text in texts:
        seen, attend = [], causal(np.arange(len(text))[None])

        def look(layer, q, *others, seen=seen, attend=attend):
            seen.append(np.asarray(q[0, :, SINKS:], np.float64))
            return attend(layer, q, *others)

        params(text[None], look)
        found.append(np.stack(seen))
    return np.concatenate(found, axis=2), np.concatenate([np.arange(SINKS, len(text)) for text in texts])


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("heads", [2, 8, 14])
def test_measured_are_the_statistics_of_all_queries_at_once(heads):
    """Batches of texts give what the singular vectors, the means and the covariance of the joined queries are."""
    params, rng = model(heads), np.random.default_rng(4)
    batches = [rng.integers(0, 64, (2, 20)), rng.integers(0, 64, (1, 12)), rng.integers(0, 64, (3, 9))]
    found = measured(params, batches, SINKS)
    before, positions = queries(params, [text for batch in batches for text in batch])
    np.testing.assert_allclose(found["query_mean"], before.mean(axis=2), atol=1e-6)
    for layer, own in enumerate(before):
        for head, q in enumerate(own):
            np.testing.assert_allclose(found["query_cov"][layer, head], np.cov(q.T), atol=1e-5)
            pairs = np.abs(q[:, :4] + 1j * q[:, 4:]).mean(axis=0)
            np.testing.assert_allclose(found["query_norms"][layer, head], pairs, atol=1e-6)
        filters = []
        for q in own:
            turned = np.stack([rotated(x, p, 1e4) for x, p in zip(q, positions, strict=True)])
            principal = np.linalg.svd(turned, full_matrices=False)[2][0]
            filters.append(-principal * np.sign(np.sum(turned @ principal)))
        expected = np.mean(np.reshape(filters, (2, -1, 8)), axis=1)
        np.testing.assert_allclose(found["q_filters"][layer], expected, atol=2e-4)


@pytest.mark.slow
def test_norms_behind_the_channels_that_turn_are_zero():
    params = model(rope=Rope(1e4, partial_rotary_factor=0.5), unrotated=(1,))
    text = np.random.default_rng(0).integers(0, 64, (1, 16))
    before, _ = queries(params, text)
    norms = measured(params, [text], SINKS)["query_norms"]
    pairs = np.abs(before[..., :2] + 1j * before[..., 2:4]).mean(axis=2)
    np.testing.assert_allclose(norms[[0, 2], :, :2], pairs[[0, 2]], atol=1e-6)
    assert not norms[[0, 2], :, 2:].any()
    assert not norms[1].any()
    for policy in ("triattention:budget=8,recent=1,every=2", "qfilter:budget=8", "expected_attention_stats:budget=8"):
        attached = kvjax.with_statistics(params, measured(params, [text], SINKS))
        assert kvjax.generate(attached, text[0], policy=policy, max_new_tokens=3).tokens.shape == (1, 3)


def test_no_queries_are_refused():
    with pytest.raises(ValueError, match="0 queries: expected two or more"):
        measured(tiny.decoder(), [], 0)


def test_numbers_that_are_not_finite_are_refused():
    """Those of queries, which overflow here, and those of statistics that a caller gives."""
    params = tiny.decoder()
    graph, state = nnx.split(params)
    large = nnx.merge(graph, state)
    large.layers[0].attention.query[...] *= 3e37
    with pytest.raises(FloatingPointError, match="queries of batch 0 are NaN or infinite, or their squares are, with"):
        measured(large, [np.arange(40)[None]], sinks=0)
    for value in (np.nan, 1e300):
        with pytest.raises(ValueError, match="statistics query_mean have NaN or infinity as float32: expected finite"):
            kvjax.with_statistics(params, {"query_mean": np.full((1, 4, 8), value)})


def test_files(tmp_path):
    """Statistics are written and read, are no part of a checkpoint, and do not change the parameters they are given."""
    params = tiny.decoder(8, 2, (None, None))
    given = tiny.random_statistics(params.config)
    write_statistics(given, tmp_path / "statistics", facts={"data": "texts"})
    card = (tmp_path / "statistics" / "README.md").read_text()
    assert "| data | texts |" in card
    assert "| q_filters | 2 x 2 x 8 |" in card
    read = read_statistics(tmp_path / "statistics")
    assert read.keys() == given.keys()
    assert all(np.array_equal(read[name], given[name]) for name in given)
    attached = kvjax.with_statistics(params, tmp_path / "statistics")
    assert not len(params.layers[0].attention.statistics)
    kvjax.save_hf(attached, tmp_path / "model")
    assert load_file(tmp_path / "model" / "model.safetensors").keys().isdisjoint(given)
    with pytest.raises(ValueError, match="is not empty"):
        write_statistics(given, tmp_path / "statistics", facts={})


def test_parameters_may_have_statistics_of_several_folders_and_gates(tmp_path):
    """Later ones replace those of the same name."""
    params = tiny.decoder(8, 2, gates=True)
    config = params.config
    filters = np.arange(16, dtype=np.float32).reshape(1, 2, 8)
    params = kvjax.with_statistics(params, {"q_filters": filters})
    attention = params.layers[0].attention
    np.testing.assert_array_equal(attention.statistics["q_filters"][...], filters[0])
    np.testing.assert_array_equal(
        attention.statistics["query_mean"][...], tiny.random_statistics(config)["query_mean"][0]
    )
    assert sorted(attention.gates) == ["fastkvzip", "kvzap", "lookaheadkv", "restorekv"]


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
    ("policy", "data", "model_axis"),
    each_once(
        [
            "qfilter:budget=8,recent=2,every=2",
            "expected_attention_stats:budget=8,sinks=1,future=4,every=2",
            "triattention:budget=8,recent=2,every=2",
            "adakv:base=qfilter,base.budget=8,base.recent=2,normalise=False,groups=2",
        ],
        [(4, 2), (2, 4)],
    ),
)
def test_meshes_retain_the_same(data, model_axis, policy):
    """The second mesh has two devices per kv head."""
    plain = tiny.decoder(8, 2, (None, None))
    given, mesh = tiny.random_statistics(plain.config), kvjax.make_mesh(data, model_axis)
    one, sharded = (kvjax.with_statistics(params, given) for params in (plain, kvjax.shard(plain, mesh)))
    rng = np.random.default_rng(3)
    rows = [rng.permutation(64)[:n] for n in (30, 5, 11, 17)]
    options = {"policy": policy, "max_new_tokens": 6}
    ours, theirs = (kvjax.generate(each, rows, **options) for each in (sharded, one))
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    assert [tiny.held(ours.cache, b) for b in range(4)] == [tiny.held(theirs.cache, b) for b in range(4)]
    again = kvjax.shard(one, mesh)  # statistics move with the parameters
    np.testing.assert_array_equal(kvjax.generate(again, rows, **options).tokens, theirs.tokens)
    (shape,) = {x.data.shape for x in again.layers[0].attention.statistics["query_cov"][...].addressable_shards}
    assert shape == (4, 8, 8)  # a kv head


@pytest.mark.parity
def test_the_published_forms(tmp_path):
    """Tensors of modules of PyTorch as kvpress and the authors have them, with the config.json of their mixin."""
    torch = pytest.importorskip("torch")
    params = tiny.decoder(8, 2, (None, None))
    given = tiny.random_statistics(params.config)
    for names, config in (
        (("q_filters",), {"num_layers": 2, "num_kv_heads": 2, "kv_head_dim": 8}),
        (("query_mean", "query_cov"), {"num_layers": 2, "num_heads": 8, "head_dim": 8, "n_sink": 4}),
    ):
        folder = tmp_path / names[0]
        folder.mkdir()
        tensors = {name: torch.nn.Parameter(torch.from_numpy(given[name])).detach().numpy() for name in names}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        assert holds_statistics(folder)
        params = kvjax.with_statistics(params, folder)
    assert sorted(params.layers[1].attention.statistics) == ["q_filters", "query_cov", "query_mean"]


def published(statistics):
    """The content of a file of TriAttention's authors, whose heads are in no order."""
    real, imaginary = np.split(statistics["query_mean"], 2, axis=-1)
    parts = {"q_mean_real": real, "q_mean_imag": imaginary, "q_abs_mean": statistics["query_norms"]}
    places = list(np.ndindex(real.shape[:2]))[::-1]
    heads = {f"layer{i:02d}_head{h:02d}": {name: part[i, h] for name, part in parts.items()} for i, h in places}
    facts = {"num_traces": 1, "head_dim": 8, "rope_style": "half", "sampled_heads": [list(at) for at in places]}
    return {"metadata": facts, "stats": heads}


def test_files_of_triattention(tmp_path):
    params = tiny.decoder(8, 2, (None, None))
    given = tiny.random_statistics(params.config)
    file = save(published(given), tmp_path / "x.pt")
    read = read_statistics(file)
    assert sorted(read) == ["query_mean", "query_norms"]
    for name, statistic in read.items():
        np.testing.assert_array_equal(statistic, given[name])
        assert statistic.dtype == np.float32
    assert holds_statistics(file)
    row, policy = [list(range(1, 20))], "triattention:budget=8,recent=1,every=2"
    of_file, of_arrays = (
        kvjax.prefill(kvjax.with_statistics(params, source), row, policy=policy) for source in (file, given)
    )
    assert tiny.held(of_file, 0) == tiny.held(of_arrays, 0)


def test_what_is_no_file_of_triattention(tmp_path):
    params = tiny.decoder(8, 2, (None, None))
    good = published(tiny.random_statistics(params.config))
    first, *others = good["stats"]
    head = good["stats"][first]
    for says, content in [
        ("it has no dictionaries 'stats' and 'metadata'", []),
        ("it has no dictionaries 'stats' and 'metadata'", {"stats": good["stats"]}),
        ("its rope_style is not 'half'", good | {"metadata": {"rope_style": "interleaved"}}),
        ("'stats' has 0 entries of 0 layers and 0 heads", good | {"stats": {}}),
        ("'stats' has 15 entries of 2 layers and 8 heads", good | {"stats": {at: good["stats"][at] for at in others}}),
        ("'stats' has 17 entries of 2 layers and 8 heads", good | {"stats": good["stats"] | {"mean": head}}),
        ("a head lacks one of q_mean_real", good | {"stats": good["stats"] | {first: {}}}),
        ("a head lacks one of q_mean_real", good | {"stats": good["stats"] | {first: 3}}),
        (
            "or their sizes differ",
            good | {"stats": good["stats"] | {first: head | {"q_abs_mean": np.zeros(3, np.float32)}}},
        ),
        (
            "query_norms has numbers that are not finite",
            good
            | {"stats": {at: x | {"q_abs_mean": np.full(4, np.nan, np.float32)} for at, x in good["stats"].items()}},
        ),
    ]:
        with pytest.raises(CheckpointError, match=says):
            read_statistics(save(content, tmp_path / "x.pt"))
    with pytest.raises(ValueError, match=r"statistics of another model: query_mean has shape \(2, 8, 8\)"):
        kvjax.with_statistics(tiny.decoder(4, 2), save(good, tmp_path / "x.pt"))


@pytest.mark.slow
def test_bfloat16_files_and_models(tmp_path):
    """Statistics are float32 whatever the dtypes of their file and of the model."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.decoder(8, 2))
    given = tiny.random_statistics(params.config)
    folder = tmp_path / "low"
    folder.mkdir()
    save_file(
        {name: np.asarray(jnp.asarray(x, jnp.bfloat16)) for name, x in given.items()}, folder / "model.safetensors"
    )
    attached = kvjax.with_statistics(params, folder)
    assert {x[...].dtype for x in attached.layers[0].attention.statistics.values()} == {jnp.dtype("float32")}
    rows = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [3, 4]]
    for policy in ("triattention:budget=8,recent=1,every=2", "qfilter:budget=8", "expected_attention_stats:budget=8"):
        assert kvjax.generate(attached, rows, policy=policy, max_new_tokens=3).tokens.shape == (2, 3)


def test_commands_attach_either_kind(tmp_path):
    params = tiny.decoder(8, 2)
    save_hf(params, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path / "model")
    (gates, *_) = tiny.random_gates(1, 2, 4)
    write_gates(gates, tmp_path / "gates", facts={})
    write_statistics(tiny.random_statistics(params.config), tmp_path / "statistics", facts={})
    *_, others = tiny.random_gates(1, 2, 4)
    files = (
        save({"module": list(others.layers)}, tmp_path / "g.pt"),
        save(published(tiny.random_statistics(params.config)), tmp_path / "s.pt"),
    )
    found, _ = load_named(
        str(tmp_path / "model"), gates=[str(tmp_path / "gates"), str(tmp_path / "statistics"), *map(str, files)]
    )
    assert sorted(found.layers[0].attention.gates) == ["fastkvzip", "kvzap"]
    assert sorted(found.layers[0].attention.statistics) == sorted(tiny.random_statistics(params.config))


def bad_folders():
    good = {"q_filters": np.zeros((2, 2, 8), np.float32)}
    wide = {"q_filters": np.zeros((2, 2, 16), np.float32), "query_mean": np.zeros((3, 8, 8), np.float32)}
    return {
        "neither model.safetensors": None,
        r"unexpected tensor\(s\): other; expected some of q_filters, query_mean": good | {"other": np.zeros(1)},
        "has no tensors: expected some of q_filters": {},
        "q_filters has dtype I32: expected F32, BF16, F16": {"q_filters": np.zeros((2, 2, 8), np.int32)},
        "q_filters has numbers that are not finite": {"q_filters": np.full((2, 2, 8), np.nan, np.float32)},
        r"statistics of another model: q_filters has shape \(2, 2, 16\), expected \(2, 2, 8\); query_mean has shape "
        r"\(3, 8, 8\), expected \(2, 8, 8\)": wide,
    }


@pytest.mark.parametrize("says", bad_folders())
def test_bad_folders(tmp_path, says):
    tensors = bad_folders()[says]
    if tensors is not None:
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        kvjax.with_statistics(tiny.decoder(8, 2, (None, None)), tmp_path)


def test_unknown_names_and_absent_folders(tmp_path):
    with pytest.raises(ValueError, match="statistics keys: expected some of q_filters"):
        kvjax.with_statistics(tiny.decoder(), {"keys": np.zeros(3)})
    with pytest.raises(ValueError, match="no such folder"):
        kvjax.with_statistics(tiny.decoder(), tmp_path / "nowhere")
