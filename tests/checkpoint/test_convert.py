"""What a conversion plans; tests/cli/test_convert.py converts."""

import jax
import pytest
from safetensors.numpy import load_file

from kvjax.checkpoint import load, plan_conversion, save, save_hf
from tests.checkpoint.folders import EMBED, WEIGHTS, decoder
from tests.checkpoint.test_hf import edit


@pytest.mark.filterwarnings("ignore:.* differs from .*, but config.json ties them")
@pytest.mark.parametrize("head", ["absent", "equal", "another"])
def test_a_conversion_of_tied_embeddings_counts_the_output_matrix_if_it_is_another(tmp_path, head, monkeypatch):
    """The plan of each form, in the working directory, is that of what `load` and `restore` read."""
    save_hf(decoder(tie_word_embeddings=True), tmp_path / "hf")
    embed = load_file(tmp_path / "hf" / WEIGHTS)[EMBED]
    edit(tmp_path / "hf", lm_head__weight={"absent": None, "equal": embed, "another": embed + 1}[head])
    params, _ = load(tmp_path / "hf")
    config = (tmp_path / "hf" / "config.json").read_text()
    save(params, tmp_path / "orbax")
    (tmp_path / "orbax" / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    for form, to in (("hf", "orbax"), ("orbax", "hf")):
        plan = plan_conversion(form, "out", to)
        assert (4 * plan.parameters, plan.parameter_bytes) == (sum(sizes), sum(sizes))
