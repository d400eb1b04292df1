"""Checkpoints that earlier commits wrote load, to the bit, and their runs go on; see fixtures/write.py."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.training import assert_same
from helpers.worlds import some
from safetensors.torch import load_file

from fsdp2_strategy import list_checkpoints, verify_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
TAGS = {"": "global_step3", "lerobot": "000003", "trainer": "checkpoint-3"}
COMMITS = sorted(path.name for path in FIXTURES.iterdir() if (path / "expected.json").is_file())


def go_on(folder):
    spec = importlib.util.spec_from_file_location("write", FIXTURES / "write.py")
    write = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write)
    run, expected = write.Run(seed=7), json.loads((folder / "expected.json").read_text())
    path, client_state = run.strategy.load_ckpt(run.model, folder / "ckpts", ema=run.ema, dataloader=run.loader)
    assert path == str(folder / "ckpts" / TAGS[folder.name.partition("-")[2]])
    assert client_state == expected["client_state"]
    assert run.strategy.global_step(run.model) == 3
    assert_same(run.state(), load_file(folder / "expected.safetensors"))
    assert run.train(3) == pytest.approx(expected["losses"], rel=1e-5)
    scheduler = run.strategy._state_of(run.model).scheduler  # which these runs never stepped
    path = folder / f"on{dist.get_world_size()}"
    run.strategy.save_ckpt(run.model, path, scheduler=scheduler, ema=run.ema, dataloader=run.loader)


@pytest.mark.each
@pytest.mark.parametrize("world_sizes", some([(3,), (2, 1)], [(3,)]), ids=["3", "2,1"])
@pytest.mark.parametrize("commit", COMMITS)
def test_a_checkpoint_of_an_earlier_commit_loads_on_any_number_of_ranks(commit, world_sizes, tmp_path, run_on):
    folder = tmp_path / commit
    shutil.copytree(FIXTURES / commit, folder, symlinks=True)
    assert verify_checkpoint(folder / "ckpts" / TAGS[commit.partition("-")[2]]).ok
    for world_size in world_sizes:
        run_on(world_size, go_on, folder=folder)
    [listed] = list_checkpoints(folder / "ckpts")
    assert (listed.step, listed.metric) == (3, 0.5)
