"""VITRA's real script `train.py` on two CPU ranks, with our strategy and with its own.

The model is its PaliGemma with random weights, the data are generated episodes in its format. docs/coming_from_vitra.md
shows the changes of the script that these tests apply, and lists what helpers/vitra puts in place of what.
"""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch
from helpers.peers import peer

if importlib.util.find_spec("decord") is None:  # imported here, it would break the writer of videos
    pytest.skip("needs the environment of `make peers`", allow_module_level=True)

from helpers.vitra import folders, redirections, run, shims, stubs

pytestmark = pytest.mark.xdist_group("vitra")  # the runs are shared

PLAIN = {"augmentation": False, "learning_rate": 1e-4, "action_model_learning_rate": 1e-4}
"""Samples without random numbers, so that both strategies see the same. Larger rates amplify rounding, by Adam."""

AS_THEIRS = {"as_flattened": True}
"""What makes our numbers those of VITRA."""


@pytest.fixture(scope="module")
def configure(tmp_path_factory):
    """Return a function that makes the folder and configuration of a run; model and data are made once."""
    shared = tmp_path_factory.mktemp("vitra")
    folders.paligemma(shared / "model")
    folders.episodes(shared / "data")
    folders.statistics(shared / "data", peer("vitra"))

    def configuration(name, **changed):
        folder = tmp_path_factory.mktemp(name)
        return folder, folders.configuration(folder, shared / "model", shared / "data", **changed)

    return configuration


@pytest.fixture(scope="module")
def theirs(configure):
    """Run six steps with VITRA's own strategy; it saves after three."""
    folder, config = configure("theirs", **PLAIN)
    return folder, run.run(folder, config, strategy="theirs", seeded=0)


def assert_same_losses(ours, theirs, tolerance=1e-4):
    assert [len(rank) for rank in ours] == [len(rank) for rank in theirs] != [0, 0]
    for rank, other in zip(ours, theirs, strict=True):
        for micro_batch, reference in zip(rank, other, strict=True):
            assert micro_batch == pytest.approx(reference, rel=tolerance)


def test_the_changed_lines_are_as_many_as_the_page_says():
    always, resumed = run.changes()
    removed, added = run.changed_lines(always)
    assert f"{removed} lines are removed and {added} added" in run.PAGE.read_text()
    assert run.changed_lines(resumed) == (1, 1)


def test_losses_are_those_of_vitras_own_strategy(configure, theirs):
    folder, config = configure("ours", **PLAIN)
    ours = run.run(folder, config, seeded=0, options=AS_THEIRS)
    assert len(ours[0]) == 12, "six steps of two micro-batches"
    assert_same_losses(ours, theirs[1])
    names = sorted(path.name for path in run.checkpoints(folder).iterdir() if "=" in path.name)
    assert names == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"]


def test_a_killed_run_goes_on_with_the_same_losses_bitwise(configure):
    settings = {"max_steps": 8}
    folder, config = configure("whole", **settings)
    whole = run.run(folder, config, patches=["seeded_colours"])
    folder, config = configure("killed", **settings)
    process = run.start(folder, config, patches=["seeded_colours"], name="killed")
    while not (run.checkpoints(folder) / "epoch=0-step=3.ckpt").is_dir() if begun(folder) else True:
        assert process.poll() is None, (folder / "killed.log").read_text()[-4000:]
        time.sleep(0.05)
    run.kill(process, folder, "killed")
    before = run.losses(folder, "killed")
    assert 6 <= len(before[0]) < 16 and all(rank == own[: len(rank)] for rank, own in zip(before, whole, strict=True))
    again = run.run(folder, config, patches=["seeded_colours"], name="again")
    saved = 16 - len(again[0])
    assert saved in (6, 12), "it goes on after three or six steps"
    assert again == [rank[saved:] for rank in whole]


def begun(folder):
    return (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())


def test_a_checkpoint_that_vitra_wrote_goes_on_as_vitra_would(configure, theirs):
    written = run.checkpoints(theirs[0]) / "epoch=0-step=3.ckpt"
    assert {path.name for path in written.iterdir()} == {"weights.pt", "optimizer.pt", "meta.json"}
    folder, config = configure("resumed", **PLAIN, model_load_path=str(written))
    with pytest.raises(AssertionError, match="trust=True"):
        run.run(folder, config, seeded=6, options=AS_THEIRS, name="untrusted")
    ours = run.run(folder, config, seeded=6, options=AS_THEIRS, more=[run.FROM_VITRA])
    assert_same_losses(ours, [rank[6:] for rank in theirs[1]])


def test_weight_decay_of_vitra_acts_on_the_cognition_token_only(theirs):
    stored = torch.load(run.checkpoints(theirs[0]) / "epoch=0-step=3.ckpt" / "optimizer.pt")
    decayed = [name for group in stored["param_groups"] if group["weight_decay"] for name in group["params"]]
    assert decayed == ["cognition_token"]


def test_the_page_lists_what_stands_in_for_what():
    page = run.PAGE.read_text()
    for table in (stubs.STUBS, redirections.REDIRECTIONS, shims.SHIMS):
        for name, text in table.items():
            assert f"| `{name}` | {text} |" in page, f"add the row of {name}"
