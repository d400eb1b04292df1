"""An export that is killed over an earlier one leaves all files of the old one, or all of the new one; and so does an
export that fails. Files of other people stay."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers.crashes import killed_at
from helpers.folders import small_tokenizer
from helpers.models import build
from transformers import AutoModelForCausalLM

from fsdp2_strategy import load_weights, save_model, shard_model
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage import staged_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # in peft


def llama(value, **settings):
    """A model whose values tell which export they are of."""
    model = build("llama")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    for name, setting in settings.items():
        setattr(model.config, name, setting)
    return model


SMALL = {"max_shard_size": "20KB"}
SMALLER = {"max_shard_size": "10KB"}


def adapted(value, r):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=r, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(llama(value), config)
    model.add_adapter("second", config)
    return model


def policy(value, out):
    from fsdp2_strategy.integrations.lerobot import save_policy

    save_policy(llama(value), out, train_config={"value": value})


def critic(value, out):
    from fsdp2_strategy.integrations.lightrft.critic_export import save_critic

    model = torch.nn.Module()
    model.model, model.score = llama(value), torch.nn.Linear(32, 1)
    torch.nn.init.constant_(model.score.weight, value)
    save_critic(model, None, out, **SMALL)


EXPORTS = {
    "sharded": lambda value, out: save_model(llama(value), None, out, **SMALL),
    "sharded more": lambda value, out: save_model(llama(value), None, out, **SMALLER),
    "single": lambda value, out: save_model(llama(value, rms_norm_eps=0.1), None, out),
    "bf16": lambda value, out: save_model(llama(value), small_tokenizer(), out, dtype=torch.bfloat16),
    "variant": lambda value, out: save_model(llama(value), None, out, variant="fp16"),
    "other model": lambda value, out: save_model(build("gpt2"), None, out, **SMALL),
    "adapters": lambda value, out: save_model(adapted(value, 2), None, out, merge_adapters=False),
    "other adapters": lambda value, out: save_model(adapted(value, 4), None, out, merge_adapters=False),
    "merged": lambda value, out: save_model(adapted(value, 2), None, out, **SMALL),
    "policy": policy,
    "critic": critic,
}


def visible(folder):
    """Return what a reader finds: the bytes of each file by its path, links followed."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".export")}


def finished(call, folder):
    assert not killed_at(-1, call, folder)


USUAL = [("sharded", "single")]
OTHERS = [
    ("sharded", "sharded"),
    ("single", "sharded"),
    ("single", "bf16"),
    ("bf16", "single"),
    ("sharded", "sharded more"),
    ("sharded more", "sharded"),
    ("sharded", "other model"),
    ("single", "variant"),
    ("adapters", "other adapters"),
    ("adapters", "merged"),
    ("merged", "adapters"),
    ("policy", "policy"),
    ("sharded", "policy"),
    ("critic", "critic"),
    (None, "sharded"),
    (None, "policy"),
]


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [(*pair, 11) for pair in USUAL] + [pytest.param(*pair, 4, marks=pytest.mark.full) for pair in OTHERS],
)
def test_an_export_killed_at_any_moment_leaves_the_old_files_or_the_new(before, after, step, tmp_path):
    old, new, out = tmp_path / "old", tmp_path / "new", tmp_path / "out"
    old.mkdir()
    if before:
        finished(lambda: EXPORTS[before](1.0, old), old)
    for name in ("README.md", "notes/mine.txt", "pytorch_model.bin"):
        (old / name).parent.mkdir(exist_ok=True)
        (old / name).write_text("not of an export")
    shutil.copytree(old, new)
    finished(lambda: EXPORTS[after](2.0, new), new)
    expected = [visible(old), visible(new)]
    assert expected[0] != expected[1]
    found = []
    for point in itertools.count(0, step):
        shutil.copytree(old, out)
        if not killed_at(point, lambda: EXPORTS[after](2.0, out), out):
            break
        found.append(expected.index(visible(out)))  # fails if it is a mixture
        finished(lambda: EXPORTS[after](2.0, out), out)
        assert visible(out) == expected[1] and not list(out.glob(".export*"))
        assert not any(path.is_symlink() for path in out.rglob("*"))
        shutil.rmtree(out)
    assert found == sorted(found) and {*found} == {0, 1}


def value_of(folder):
    """Load an export with transformers and with this package; return its only value."""
    plain, ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), llama(0.0)
    load_weights(ours, folder)
    (value,) = {p.unique().item() for model in (plain, ours) for p in model.parameters()}
    return value


@pytest.mark.ranks(1)
def test_both_loaders_read_a_folder_in_the_middle_of_the_switch(tmp_path):
    """Of every state between two steps of the switch, both read the old values or the new ones, all of them."""
    save_model(llama(1.0), None, tmp_path, **SMALL)
    values = []
    rename = Path.rename

    def renaming(self, target):
        values.append(value_of(tmp_path))
        return rename(self, target)

    with patch.object(Path, "rename", renaming):
        save_model(llama(2.0), None, tmp_path, **SMALL)
    assert values == sorted(values) and {*values} == {1.0, 2.0} and value_of(tmp_path) == 2.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failing", [0, 1, 3, 8])
def test_a_failed_switch_leaves_the_earlier_export(failing, tmp_path):
    save_model(llama(1.0), None, tmp_path, **SMALL)
    before, calls, rename = visible(tmp_path), itertools.count(), Path.rename

    def renaming(self, target):
        if next(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    torch.distributed.barrier()
    with patch.object(Path, "rename", renaming), pytest.raises(CheckpointError, match="Input/output error"):
        save_model(llama(2.0), None, tmp_path, **SMALL)
    torch.distributed.barrier()
    assert visible(tmp_path) == before
    torch.distributed.barrier()
    save_model(llama(2.0), None, tmp_path, **SMALL)
    assert value_of(tmp_path) == 2.0 and not list(tmp_path.glob(".*"))


@pytest.mark.ranks(1)
def test_a_failure_after_the_switch_is_none_of_the_export(tmp_path):
    save_model(llama(1.0), None, tmp_path, **SMALL)
    with patch.object(staged_folder, "_finish", side_effect=[None, OSError(errno.EIO, os.strerror(errno.EIO))]):
        save_model(llama(2.0), None, tmp_path, **SMALL)
    assert (tmp_path / "config.json").is_symlink() and value_of(tmp_path) == 2.0
    save_model(llama(3.0), None, tmp_path, **SMALL)
    assert value_of(tmp_path) == 3.0 and not list(tmp_path.glob(".*"))


@pytest.mark.ranks(1)
def test_two_exports_to_one_folder_are_an_error(tmp_path):
    first = staged_folder.StagedFolder(tmp_path / "out")
    with first:
        first.create()
        with pytest.raises(CheckpointError, match="another export writes into it"):
            save_model(llama(1.0), None, tmp_path / "out")
        assert first.path.is_dir(), "the second one does not delete the files of the first"
    save_model(llama(1.0), None, tmp_path / "out")
    assert value_of(tmp_path / "out") == 1.0 and not list((tmp_path / "out").glob(".*"))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("lacking", ["hardlink_to", "symlink_to"])
def test_a_file_system_without_links_replaces_an_export_too(lacking, tmp_path):
    error = OSError(errno.EPERM, os.strerror(errno.EPERM))
    with patch.object(Path, lacking, side_effect=error):
        for value, size in ((1.0, SMALL), (2.0, SMALL), (3.0, {}), (4.0, SMALLER)):
            save_model(llama(value), None, tmp_path, **size)
            assert value_of(tmp_path) == value and not list(tmp_path.glob(".*"))
            assert (tmp_path / "model.safetensors").exists() == (not size)


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(1)
def test_links_of_the_folder_are_replaced_and_their_targets_stay(tmp_path, monkeypatch):
    """As in the Hugging Face cache, whose folders have links to blobs; the folder is a link, and the current one."""
    save_model(llama(1.0), None, tmp_path / "blobs")
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/deep")
    for blob in (tmp_path / "blobs").iterdir():
        (tmp_path / "real/deep" / blob.name).symlink_to(f"../../blobs/{blob.name}")
    before = visible(tmp_path / "blobs")
    monkeypatch.chdir(tmp_path / "link")
    rename, seen = Path.rename, []

    def renaming(self, target):
        seen.append(value_of(tmp_path / "link"))
        return rename(self, target)

    with patch.object(Path, "rename", renaming):
        save_model(llama(2.0), None, ".", **SMALL)
    assert {*seen} == {1.0, 2.0} and value_of(tmp_path / "link") == 2.0
    assert visible(tmp_path / "blobs") == before
    assert not any(path.is_symlink() for path in (tmp_path / "real/deep").iterdir())


@pytest.mark.ranks(1)
def test_a_folder_with_the_name_of_a_file_and_a_link_of_others_are_errors(tmp_path):
    (tmp_path / "a/config.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"config.json is a folder there, expected a file"):
        save_model(llama(1.0), None, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/.export").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"\.export points to .*, expected the hidden folder of an export"):
        save_model(llama(1.0), None, tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/.export.partial").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointError, match="symbolic link"):
        save_model(llama(1.0), None, tmp_path / "c")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["config.json"]


@pytest.mark.full
def test_a_command_that_was_killed_can_be_repeated(tmp_path):
    from fsdp2_strategy.checkpoint import save_checkpoint
    from fsdp2_strategy.cli import main

    finished(lambda: save_checkpoint(shard_model(llama(1.0)), tmp_path / "saved"), tmp_path)
    command = ["export", str(tmp_path / "saved"), str(tmp_path / "out"), "-q"]
    for point in itertools.count(0, 3):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if not killed_at(point, lambda: main(command), tmp_path / "out"):
            break
        files = visible(tmp_path / "out")
        assert not files or "model.safetensors" in files
        assert main(command) == (2 if files else 0)  # a complete folder is not replaced
        assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        assert not list((tmp_path / "out").glob(".*")) or files
