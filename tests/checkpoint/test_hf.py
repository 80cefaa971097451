"""Loading and saving Hugging Face checkpoints, and the errors for those that are refused."""

import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.checkpoint import CheckpointError, load, load_named, read_headers, save_hf, source_of
from kvjax.checkpoint.errors import one_line
from kvjax.checkpoint.folder import MODEL
from kvjax.checks import installs
from kvjax.models import UnsupportedModelError
from kvjax.runtime.progress import watched
from tests.checkpoint.folders import EMBED, HEAD, HF, INDEX, QUERY, WEIGHTS, assert_equal, decoder, problems


def edit(folder: Path, **tensors: np.ndarray | None) -> None:
    """Replaces or adds tensors, or removes those that are None. `__` in a name stands for a dot."""
    content: dict[str, np.ndarray | None] = dict(load_file(folder / WEIGHTS))
    for name, tensor in tensors.items():
        content[name.replace("__", ".")] = tensor
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, folder / WEIGHTS)


def shard(folder: Path) -> dict[str, str]:
    """Splits the weights into two files with an index, and returns the index's map from names to files."""
    content = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    placed = {name: files[i % 2] for i, name in enumerate(sorted(content))}
    for file in files:
        save_file({name: content[name] for name in content if placed[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    return placed


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_decoder_loads_equal_in_its_own_dtype(tmp_path, dtype, tied):
    params = decoder(dtype, tie_word_embeddings=tied)
    save_hf(params, tmp_path)
    loaded, tokenizer = load(str(tmp_path))
    assert_equal(loaded, params)
    assert tokenizer is None


def test_linear_maps_are_stored_as_out_by_in(folder):
    params, _ = load(folder)
    stored = load_file(folder / WEIGHTS)
    query, output = stored[QUERY], stored["model.layers.0.self_attn.o_proj.weight"]
    assert query.shape == (24, 16)
    assert output.shape == (16, 24)
    np.testing.assert_array_equal(params.layers[0].attention.query[3, 2, 5], query[2 * 6 + 5, 3])
    np.testing.assert_array_equal(params.layers[0].attention.output[2, 5, 3], output[3, 2 * 6 + 5])


def test_dtype_casts_all_weights(folder):
    params, _ = load(folder, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(params.embed[...], decoder().embed[...].astype(jnp.bfloat16))


def test_dtype_of_mixed_weights_represents_them_all(folder):
    edit(folder, **{QUERY.replace(".", "__"): np.ones((24, 16), jnp.bfloat16)})
    params, _ = load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_dtype_that_is_not_accepted(folder, dtype):
    with pytest.raises(ValueError, match=f"dtype {dtype} is not supported; accepted: float32, bfloat16, float16"):
        load(folder, dtype=dtype)


def test_shards_load_as_one_file(folder):
    shard(folder)
    assert_equal(load(folder)[0], decoder())


def test_rope_frequencies_of_old_checkpoints_are_ignored(folder):
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(3, np.float32))
    assert_equal(load(folder)[0], decoder())


def test_output_matrix_beside_tied_embeddings_unties_them_if_it_differs(tmp_path):
    params = decoder(tie_word_embeddings=True)
    save_hf(params, tmp_path)
    edit(tmp_path, lm_head__weight=load_file(tmp_path / WEIGHTS)[EMBED])
    assert_equal(load(tmp_path)[0], params)
    edit(tmp_path, lm_head__weight=np.zeros((40, 16), np.float32))
    with pytest.warns(UserWarning, match=f"{HEAD} differs from {EMBED}, but config.json ties them") as told:
        untied = load(tmp_path)[0]
    assert {warning.filename for warning in told} == {__file__}
    assert not untied.config.tie_embeddings
    assert not np.any(untied.unembed)
    save_hf(untied, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_output_matrix_alone_is_that_of_tied_embeddings(tmp_path):
    """safetensors' `save_model` writes the first name of two tensors that are one, which is this one."""
    params = decoder(tie_word_embeddings=True)
    save_hf(params, tmp_path)
    edit(tmp_path, lm_head__weight=load_file(tmp_path / WEIGHTS)[EMBED], model__embed_tokens__weight=None)
    assert_equal(load(tmp_path)[0], params)


def test_a_missing_output_matrix_says_that_the_config_does_not_tie_it(folder):
    edit(folder, lm_head__weight=None)
    missing, untied = problems(load, folder)
    assert missing == f"missing tensor(s): {HEAD}"
    assert f"does not tie the output matrix to the embeddings: expected {HEAD}, or tie_word_embeddings=true" in untied


@pytest.mark.parametrize(("number", "dtype"), [(np.nan, None), (np.inf, None), (1e6, "float16")])
def test_weights_that_are_not_finite_are_named(folder, number, dtype):
    edit(folder, model__norm__weight=np.full(16, number, np.float32))
    with pytest.raises(CheckpointError, match=r"NaN or infinity as float\d\d in tensor\(s\): model.norm.weight$"):
        load(folder, dtype)


def test_a_tokenizer_that_cannot_be_read_does_not_block_the_weights(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match="its tokenizer cannot be read: .*loaded without a tokenizer") as told:
        _, tokenizer = load(folder)
    assert {warning.filename for warning in told} == {__file__}
    assert tokenizer is None
    assert load(folder, tokenizer=None)[1] is None
    given = types.SimpleNamespace(decode=str, eos_token_id=None)
    assert load(folder, tokenizer=given)[1] is given
    with pytest.raises(ValueError, match="tokenizer='other': expected 'own', None or a tokenizer"):
        load(folder, tokenizer="other")
    with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
        load_named(str(folder))


def test_sentencepiece_is_named_where_it_is_needed(folder, monkeypatch):
    (folder / "tokenizer.model").write_bytes(b"damaged")
    monkeypatch.setattr("kvjax.checkpoint.tokenizer_files._installed", lambda name: name != "sentencepiece")
    with pytest.warns(UserWarning, match=re.escape(f"needs sentencepiece: expected {installs('sentencepiece')}")):
        load(folder)


def test_errors_of_other_libraries_keep_their_advice():
    error = OSError("403 Client Error.\n\nCannot access gated repo.\nVisit the page to ask for access.")
    assert one_line(error) == "OSError: 403 Client Error. Cannot access gated repo. Visit the page to ask for access."
    assert len(one_line(OSError("x" * 5000))) < 1100


def test_no_such_folder(tmp_path):
    assert problems(load, tmp_path / "absent") == (f"no such folder: expected {MODEL}",)


def test_file_instead_of_folder(folder):
    assert "it is a file in another form: expected a folder" in problems(load, folder / WEIGHTS)[0]


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert problems(load, folder) == ("it has no config.json",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "is not a JSON object"),
        ("{}".encode("utf-16"), "not valid JSON: 'utf-8' codec"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", INDEX, "generation_config.json"])
def test_json_that_cannot_be_read(folder, file, content, message):
    shard(folder)
    (folder / file).write_bytes(content)
    (problem,) = problems(load, folder)
    assert problem.startswith(file)
    assert message in problem


def test_config_that_is_not_supported(folder):
    (folder / "config.json").write_text(json.dumps(HF | {"hidden_act": "gelu"}))
    with pytest.raises(UnsupportedModelError, match="hidden_act='gelu'"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_the_reason(folder, name):
    (folder / WEIGHTS).rename(folder / name)
    (problem,) = problems(load, folder)
    assert name in problem
    assert "runs any code that it contains" in problem


def test_no_weights(folder):
    (folder / WEIGHTS).unlink()
    assert problems(load, folder) == (f"it has neither {WEIGHTS} nor {INDEX}: expected weights in safetensors",)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-4], lambda data: data[:100], lambda _: b"", lambda _: b"x" * 99]
)
def test_damaged_file(folder, damage):
    file = folder / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    (problem,) = problems(load, folder)
    assert problem.startswith(f"{WEIGHTS} is truncated or not a safetensors file")


def test_damaged_shard_is_one_problem_and_others_are_still_checked(folder):
    placed = shard(folder)
    file = folder / placed[EMBED]
    file.write_bytes(file.read_bytes()[:-4])
    intact = folder / next(other for other in placed.values() if other != placed[EMBED])
    save_file(load_file(intact) | {"stray": np.ones(1, np.float32)}, intact)
    first, second = problems(load, folder)
    assert first.startswith(f"{file.name} is truncated")
    assert second == "unexpected tensor(s): stray"


def test_index_that_names_a_missing_file(folder):
    placed = shard(folder)
    (folder / placed[EMBED]).unlink()
    assert problems(load, folder) == (f"{INDEX} names {placed[EMBED]}, which does not exist",)


def test_index_that_places_a_tensor_where_it_is_not(folder):
    placed = shard(folder)
    other = next(file for file in placed.values() if file != placed[EMBED])
    (folder / INDEX).write_text(json.dumps({"weight_map": placed | {EMBED: other, "stray": other}}))
    assert problems(load, folder) == (f"{INDEX} places tensor(s) in {other} that it does not hold: {EMBED}, stray",)


def test_index_that_leaves_the_folder(folder):
    placed = shard(folder)
    shutil.move(folder / placed[EMBED], folder.parent / "elsewhere.safetensors")
    moved = {name: "../elsewhere.safetensors" if file == placed[EMBED] else file for name, file in placed.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": moved}))
    assert problems(load, folder) == (
        f"{INDEX} names '../elsewhere.safetensors', which is not a file name of this folder",
    )


def test_index_without_a_weight_map(folder):
    shard(folder)
    (folder / INDEX).write_text('{"metadata": {}}')
    assert problems(load, folder) == (f"{INDEX} lacks a weight_map from tensor names to file names",)


def test_tensor_in_two_shards(folder):
    placed = shard(folder)
    for file in {folder / name for name in placed.values()}:
        save_file(load_file(file) | {EMBED: np.zeros((40, 16), np.float32)}, file)
    assert problems(load, folder) == (f"tensor(s) in more than one file: {EMBED}",)


def test_all_problems_with_tensors_are_listed_together(folder):
    edit(
        folder,
        lm_head__weight=None,
        model__norm__weight=None,
        model__embed_tokens__weight=np.ones((41, 16), np.float32),
        model__layers__0__self_attn__q_proj__weight=np.ones((24, 16), np.int8),
        model__layers__0__self_attn__q_proj__bias=np.ones(24, np.float32),
        model__layers__2__mlp__up_proj__weight=np.ones((24, 16), np.float32),
    )
    assert problems(load, folder) == (
        f"missing tensor(s): model.norm.weight, {HEAD}",
        f"config.json does not tie the output matrix to the embeddings: expected {HEAD}, or "
        "tie_word_embeddings=true if it is the embedding matrix",
        f"{EMBED} has shape (41, 16); config.json asks for (40, 16)",
        f"{QUERY} has dtype I8; accepted: F32, BF16, F16",
        "unexpected tensor(s): model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight",
    )


def test_fused_tensor_that_is_misshapen(tmp_path):
    save_hf(decoder(model_type="phi3", head_dim=None, pad_token_id=None), tmp_path)
    edit(tmp_path, model__layers__1__self_attn__qkv_proj__weight=np.ones((31, 16), np.float32))
    name = "model.layers.1.self_attn.qkv_proj.weight"
    assert problems(load, tmp_path) == (f"{name} has shape (31, 16); config.json asks for (32, 16)",)


def test_mesh_that_does_not_fit(folder):
    with pytest.raises(ValueError, match="model=3 does not fit 4 query heads"):
        load(folder, mesh=kvjax.make_mesh(model=3))


def test_progress_counts_every_byte(folder, tmp_path):
    loading, writing, told = [], [], []
    with watched(told.append):
        params, _ = load(folder, "bfloat16", progress=lambda *numbers: loading.append(numbers))
        save_hf(params, tmp_path / "again", progress=lambda *numbers: writing.append(numbers))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for calls in (loading, writing):
        assert calls == sorted(calls)
        assert calls[-1] == (size, size)
        assert len(calls) == len(jax.tree.leaves(params))
    # A watcher that computes the time left learns when the first array began.
    for what, calls in (("loading the weights", loading), ("writing the weights", writing)):
        heard = dict.fromkeys((one.done, one.total) for one in told if one.what == what)  # again after a compilation
        assert list(heard) == [(0, size), *calls]


def test_headers_of_a_dtype_that_is_not_accepted(folder):
    edit(folder, **{QUERY.replace(".", "__"): np.ones((24, 16), np.int8)})
    assert problems(lambda folder: read_headers(source_of(folder)), folder) == (
        "tensor(s) of dtype I8; accepted: float32, bfloat16, float16",
    )


SCRIPT = """
import sys
sys.modules["torch"] = None  # as if not installed
from tokenizers import Tokenizer, models, pre_tokenizers
from kvjax.checkpoint import load, save_hf
assert "transformers" not in sys.modules
params, none = load(sys.argv[1])
assert none is None and "transformers" not in sys.modules
words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.save(sys.argv[1] + "/tokenizer.json")
open(sys.argv[1] + "/tokenizer_config.json", "w").write(
    '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}'
)
params, tokenizer = load(sys.argv[1])
assert tokenizer("world hello there")["input_ids"] == [4, 3, 0]
save_hf(params, sys.argv[1] + "/again", tokenizer)
params, tokenizer = load(sys.argv[1] + "/again")
assert tokenizer("world hello there")["input_ids"] == [4, 3, 0]
print(open(sys.argv[1] + "/again/config.json").read())
"""


@pytest.mark.long
def test_tokenizer_travels_with_the_weights_and_needs_no_torch(folder):
    done = subprocess.run([sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr + done.stdout
    config = json.loads(done.stdout)
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, None)  # as the config that was read
