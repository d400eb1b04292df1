"""VITRA's real script `train.py` on two CPU ranks, with our strategy and with its own.

The model is its PaliGemma with random weights, the data are generated episodes in its format. docs/coming_from_vitra.md
shows the changes of the script that these tests apply, and lists what helpers/vitra puts in place of what.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.peers import peer

if importlib.util.find_spec("decord") is None:  # imported here, it would break the writer of videos
    pytest.skip("needs the environment of `make peers`", allow_module_level=True)

from helpers.vitra import convert, folders, redirections, run, shims, stubs

pytestmark = pytest.mark.xdist_group("vitra")  # the runs are shared

PLAIN = {"augmentation": False, "learning_rate": 1e-4, "action_model_learning_rate": 1e-4}
"""Samples without random numbers, so that both strategies see the same."""

COMPARED = {"seeded": 0, "patches": ["open_gates"]}
"""Noise that depends on rank and micro-batch, and losses that depend on images and texts from the first step on."""

OURS = {**COMPARED, "options": {"as_flattened": True}}
"""What makes our numbers those of VITRA."""

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def configure(tmp_path_factory):
    """Return a function that makes the folder and configuration of a run; model and data are made once."""
    shared = tmp_path_factory.mktemp("vitra")
    source = peer("vitra")
    folders.paligemma(shared / "model")
    folders.episodes(shared / "data", rephrased=False)
    folders.statistics(shared / "data", source)
    folders.episodes(shared / "rephrased", rephrased=True)
    shutil.copytree(shared / "data" / "Annotation" / "statistics", shared / "rephrased" / "Annotation" / "statistics")

    def configuration(name, data="data", **changed):
        folder = tmp_path_factory.mktemp(name)
        return folder, folders.configuration(folder, shared / "model", shared / data, **changed)

    return configuration


@pytest.fixture(scope="module")
def theirs(configure):
    """Run six steps with VITRA's own strategy; it saves after three."""
    folder, config = configure("theirs", **PLAIN)
    return folder, run.run(folder, config, strategy="theirs", **COMPARED)


@pytest.fixture(scope="module")
def ours(configure):
    """Run the same steps with our strategy."""
    folder, config = configure("ours", **PLAIN)
    return folder, run.run(folder, config, **OURS)


def largest_difference(losses, reference):
    """Return the largest relative difference of a loss, or of a part of it, in any micro-batch of any rank."""
    assert [len(rank) for rank in losses] == [len(rank) for rank in reference]
    return max(
        abs(micro_batch[name] / value - 1) if value else abs(micro_batch[name])
        for rank, own in zip(losses, reference, strict=True)
        for micro_batch, expected in zip(rank, own, strict=True)
        for name, value in expected.items()
    )


# --- losses ----------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_vitras_own_strategy(ours, theirs):
    assert len(ours[1][0]) == 12, "six steps of two micro-batches"
    assert ours[1][0][0] != ours[1][1][0], "each rank has its own samples and noise"
    assert largest_difference(ours[1], theirs[1]) < TOLERANCE
    names = sorted(path.name for path in run.checkpoints(ours[0]).iterdir() if "=" in path.name)
    assert names == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"]


def test_autocast_is_that_of_vitras_published_configurations(configure, theirs):
    losses = {}
    for strategy in ("ours", "theirs"):
        folder, config = configure(strategy, **PLAIN, use_bf16=True, max_steps=2)
        losses[strategy] = run.run(folder, config, strategy=strategy, **OURS)
    assert largest_difference(losses["ours"], losses["theirs"]) < TOLERANCE
    assert largest_difference(losses["theirs"], [rank[:4] for rank in theirs[1]]) > 1e-4, "it does round"


def test_other_settings_have_the_losses_of_vitra(configure):
    """Without a field of view, the model has no MLPProjector, which the script lists among its block classes."""
    settings = {"use_fov": False, "freeze_option": "full_finetune", "sharding_strategy": "full-shard", "max_steps": 2}
    losses = {}
    for strategy in ("ours", "theirs"):
        folder, config = configure(strategy, **PLAIN, **settings)
        losses[strategy] = run.run(folder, config, strategy=strategy, **OURS)
    assert largest_difference(losses["ours"], losses["theirs"]) < TOLERANCE


def test_a_schedule_runs_that_vitras_metrics_cannot_log(configure):
    schedule = {"lr_scheduler_type": "constant", "max_steps": 1}
    folder, config = configure("constant", **PLAIN, **schedule)
    assert len(run.run(folder, config)[0]) == 2
    folder, config = configure("failing", **PLAIN, **schedule)
    with pytest.raises(AssertionError, match="the script failed"):
        run.run(folder, config, strategy="theirs")
    assert "TypeError: 'NoneType' object is not subscriptable" in (folder / "record.log").read_text()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_with_the_same_losses_bitwise(configure):
    random = {"patches": ["open_gates", "seeded_colours"]}
    folder, config = configure("whole", "rephrased", max_steps=8)
    whole = run.run(folder, config, **random)
    folder, config = configure("killed", "rephrased", max_steps=8)
    process = run.start(folder, config, name="killed", **random)
    while not any((folder / "checkpoints").glob("*/checkpoints/epoch=0-step=3.ckpt")):
        assert process.poll() is None, (folder / "killed.log").read_text()[-4000:]
        time.sleep(0.05)
    run.kill(process, folder, "killed")
    before = run.losses(folder, "killed")
    assert 6 <= len(before[0]) < 16, "it was killed after its checkpoint, in the middle of the epoch"
    assert before == [rank[: len(own)] for rank, own in zip(whole, before, strict=True)]
    again = run.run(folder, config, name="again", **random)
    done = 16 - len(again[0])
    assert done in (6, 12), "it goes on after three or six steps"
    assert again == [rank[done:] for rank in whole]


def test_a_checkpoint_that_vitra_wrote_goes_on_as_vitra_would(configure, theirs):
    written = run.checkpoints(theirs[0]) / "epoch=0-step=3.ckpt"
    assert {path.name for path in written.iterdir()} == {"weights.pt", "optimizer.pt", "meta.json"}
    folder, config = configure("resumed", **PLAIN, model_load_path=str(written))
    with pytest.raises(AssertionError, match="trust=True"):
        run.run(folder, config, name="untrusted")
    losses = run.run(folder, config, **{**OURS, "seeded": 6}, more=[run.FROM_VITRA])
    assert largest_difference(losses, [rank[6:] for rank in theirs[1]]) < TOLERANCE


def test_vitra_loads_the_weights_that_the_page_writes(ours, theirs):
    checkpoint, reference = (run.checkpoints(folder) / "epoch=0-step=6.ckpt" for folder, _ in (ours, theirs))
    done = subprocess.run(
        [sys.executable, convert.__file__, str(peer("vitra")), str(run.PAGE), str(ours[0] / "config.json"),
         str(checkpoint), str(reference / "weights.pt")],
        cwd=ours[0], capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["same names"] and facts["changed"] > 100
    assert facts["largest"] < 2 * 6 * 1e-4, "six steps of Adam, whose direction is that of rounding without a gradient"
    assert facts["mean"] < 1e-6, "the weights have moved by 1e-4 in the mean"


def test_vitra_decays_the_cognition_token_only(theirs):
    stored = torch.load(run.checkpoints(theirs[0]) / "epoch=0-step=3.ckpt" / "optimizer.pt")
    decayed = [name for group in stored["param_groups"] if group["weight_decay"] for name in group["params"]]
    assert decayed == ["cognition_token"]


# --- versions of transformers ----------------------------------------------------------------------------------------


def other_transformers(version):
    """Return the folder with another version of transformers, which `make peers` installs."""
    folder = Path(sys.prefix) / f"transformers-{version}"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: `make peers` installs it")
    return folder


@pytest.fixture(scope="module")
def of_4_47(configure):
    """Run the steps of ``theirs`` with the transformers that VITRA requires, and without shims."""
    packages = other_transformers("4.47.1")
    folder, config = configure("old", **PLAIN)
    return folder, run.run(folder, config, strategy="theirs", packages=packages, **COMPARED)


def test_the_shims_compute_what_transformers_4_47_computes(of_4_47, theirs):
    assert largest_difference(of_4_47[1], theirs[1]) < TOLERANCE


def test_a_checkpoint_of_transformers_4_47_goes_on_with_newer_names(configure, of_4_47):
    written = run.checkpoints(of_4_47[0]) / "epoch=0-step=3.ckpt"
    assert "backbone.language_model.model.embed_tokens.weight" in torch.load(written / "weights.pt")
    folder, config = configure("renamed", **PLAIN, model_load_path=str(written))
    losses = run.run(folder, config, **{**OURS, "seeded": 6}, more=[run.FROM_VITRA])
    assert largest_difference(losses, [rank[6:] for rank in of_4_47[1]]) < TOLERANCE


def test_with_newer_transformers_the_script_needs_another_class(configure, theirs):
    newer = {"packages": other_transformers("5.24.0"), **OURS}
    folder, config = configure("newer", **PLAIN)
    with pytest.raises(AssertionError, match="the script failed"):
        run.run(folder, config, name="failing", **newer)
    assert "ImportError: cannot import name 'SiglipVisionTransformer'" in (folder / "failing.log").read_text()
    losses = run.run(folder, config, more=[run.NEWER], **newer)
    assert largest_difference(losses, theirs[1]) < TOLERANCE


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_changed_lines_are_as_many_as_the_page_says():
    removed, added = run.changed_lines(run.changes()[run.CHANGES])
    assert f"{removed} lines are removed and {added} added" in run.PAGE.read_text()
    assert run.changes().keys() == {run.CHANGES, run.FROM_VITRA, run.NEWER}


def test_the_page_lists_what_stands_in_for_what():
    page = run.PAGE.read_text()
    for table in (stubs.STUBS, redirections.REDIRECTIONS, shims.SHIMS):
        for name, text in table.items():
            assert f"| `{name}` | {text} |" in page, f"add the row of {name}"
