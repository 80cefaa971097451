"""Checkpoints of the Hugging Face hub, and the demo model's name."""

import shutil
import threading

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from kvjax.checkpoint import CheckpointError, load
from kvjax.checkpoint.folder import DEMO, locate
from kvjax.runtime.progress import Doing, watched
from tests.checkpoint.folders import WEIGHTS, assert_equal, decoder


def test_hub_id_downloads_what_is_needed_and_nothing_else(folder, tmp_path, monkeypatch):
    for name in ("pytorch_model.bin", "consolidated.safetensors", "modeling_own.py", "tokenizer.model"):
        (folder / name).touch()
    downloaded = []

    def snapshot_download(repo_id, allow_patterns):
        assert repo_id == "someone/tiny"
        names = [file.name for file in folder.iterdir()]
        downloaded.extend(sorted(filter_repo_objects(names, allow_patterns=allow_patterns)))
        (tmp_path / "cache").mkdir()
        for name in downloaded:
            if name != "tokenizer.model":
                shutil.copy(folder / name, tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_equal(load("someone/tiny")[0], decoder())
    assert downloaded == ["config.json", WEIGHTS, "tokenizer.model"]


def test_a_download_is_told(folder, monkeypatch):
    """As the hub's client counts: in a thread, with one bar for files and two for the same bytes."""

    def snapshot_download(repo_id, allow_patterns, tqdm_class):
        def work():
            unpacked = tqdm_class(total=0, unit="B", unit_scale=True, desc="Reconstructing (incomplete total...)")
            received = tqdm_class(total=0, unit="B", unit_scale=True, desc="Downloading bytes")
            files = tqdm_class(total=2, desc="Fetching 2 files")
            for bar in (unpacked, received):
                bar.total += 100
            for count in (30, 70):
                received.update(count)
                unpacked.update(count)
                files.update()
            unpacked.set_description("Reconstruction complete")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return str(folder)

    told = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with watched(told.append):
        locate("someone/tiny")
    assert told == [Doing("downloading", 30, 100, "bytes"), Doing("downloading", 100, 100, "bytes")]


def test_hub_id_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"load someone/absent: no such folder: .* the Hugging Face hub, which did not"
    ):
        load("someone/absent")


def test_existing_folder_goes_before_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert_equal(load("model")[0], decoder())


def test_demo_is_the_model_that_ships_unless_a_folder_has_this_name(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    params, tokenizer = load("demo")
    assert_equal(params, load(DEMO)[0])
    assert tokenizer is not None
    folder.rename("demo")
    assert_equal(load("demo")[0], decoder())
