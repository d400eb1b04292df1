"""Two hundred kills at random moments of saves, commits, rotations and loads lose nothing that was committed.

    pytest -m soak tests/test_soak.py        # SOAK_KILLS=20 for fewer; prints what was hit

Each round two ranks load the newest checkpoint and go on saving, in front of the trainer and behind it, with rotation,
until one of them or both are killed. All values of a saved state are one number, so that a load shows at once whether
it is a state that was saved, and whether it is the last one that was known to be committed, or a later one.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2_strategy import FSDPV2Strategy, list_checkpoints, verify_checkpoint
from fsdp2_strategy.checkpoint import directory, layout, save
from fsdp2_strategy.checkpoint.paths import TRAINER_STATE

KILLS = int(os.environ.get("SOAK_KILLS", "200"))
RANKS = 2


def rank_of_a_round(rank, store, folder, number):
    """Load, check, and save until killed."""
    notes = (folder / f"notes{rank}").open("a", buffering=1)

    def note(**facts):
        print(json.dumps({"round": number, **facts}), file=notes)

    def noting(phase, call):
        def noted(*args, **kwargs):
            note(phase=phase)
            result = call(*args, **kwargs)
            note(phase=f"after {phase}")
            return result

        return noted

    directory.commit, directory.remove = noting("commit", directory.commit), noting("rotation", directory.remove)
    save.write_components = noting("writing", save.write_components)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    strategy = FSDPV2Strategy(bf16=False)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    model = strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=0.1)
    strategy.backward(model(torch.ones(1, 512)).sum(), model, optimizer)
    strategy.optimizer_step(optimizer, model)
    of_state = [t for state in optimizer.state.values() for key, t in state.items() if key != "step"]
    tensors = [t.detach().to_local() for t in (*model.parameters(), *of_state)]
    saves = folder / "checkpoints"

    def load():
        note(phase="load")
        path, state = strategy.load_ckpt(model, saves)
        value = state.get("value", 0)
        assert path is None or all((t == value).all() for t in tensors), f"{path} is no state that was saved"
        note(phase="after load", loaded=value)
        return value

    first = load()
    for value in itertools.count(first + 1):
        for tensor in tensors:
            tensor.fill_(value)
        behind = value % 3 != 0
        note(phase="async save" if behind else "save")
        tag = f"v{value}" if value % 5 else "same"
        strategy.save_ckpt(model, saves, tag, max_num=2, client_state={"value": value}, async_save=behind)
        for tensor in tensors:
            tensor.fill_(-1)  # what the trainer does next must not reach the files
        if behind:
            note(phase="beside a save")
            time.sleep(random.random() * 0.05)
            strategy.wait_for_checkpoint()
        note(phase="between", committed=value)
        if value % 7 == 0:
            load()


def notes_of(folder, rank):
    lines = (folder / f"notes{rank}").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_kills_lose_nothing(tmp_path, capsys):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fsdp2_strategy.strategy"])
    rng = random.Random(0)
    hit, waits, committed = collections.Counter(), [], 0
    for number in range(KILLS):
        store = tmp_path / f"store{number}"
        ranks = [
            context.Process(target=rank_of_a_round, args=(rank, store, tmp_path, number), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        begun = time.monotonic()
        while not any(note["round"] == number for note in started(tmp_path)):
            assert time.monotonic() < begun + 60 and all(p.is_alive() for p in ranks)
            time.sleep(0.005)
        wait_for_a_moment(tmp_path, number, rng)
        victims = rng.choice([ranks, [rng.choice(ranks)]])
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        for process in ranks:
            process.join(40)
            assert process.exitcode not in (0, None), "the others end by themselves, with an error"
        waits.append(time.monotonic() - killed)
        # What each rank was at when it was killed; and what was known to be committed, which must not be lost.
        of_round = [[n for n in notes_of(tmp_path, rank) if n["round"] == number] for rank in range(RANKS)]
        notes_of_victim = of_round[ranks.index(victims[0])]  # a survivor goes on noting until it hears of it
        hit[notes_of_victim[-1]["phase"] if notes_of_victim else "start"] += 1
        loaded = [note["loaded"] for notes in of_round for note in notes if "loaded" in note]
        assert all(value >= committed for value in loaded), (number, loaded, committed)
        committed = max([committed, *(n["committed"] for notes in of_round for n in notes if "committed" in n)])
        if committed:
            directory.recover(tmp_path / "checkpoints")  # as the next load does
            kept = list_checkpoints(tmp_path / "checkpoints")
            newest = kept[-1]
            assert layout.latest_tag(tmp_path / "checkpoints") in [c.tag for c in kept]
            state = json.loads((newest.path / TRAINER_STATE).read_text())
            assert state["client_state"]["value"] >= committed
            assert verify_checkpoint(newest.path).ok
        with contextlib.suppress(FileNotFoundError):
            store.unlink()
    with capsys.disabled():
        phases = ", ".join(f"{phase}: {count}" for phase, count in hit.most_common())
        sys.stdout.write(
            f"\n{KILLS} kills, {committed} states committed, {max(waits):.1f} s at most until all ranks had ended\n"
            f"killed at: {phases}\n"
        )


def wait_for_a_moment(folder, number, rng):
    """Sleep for a random time, or until a rank is where it rarely is, and a moment longer."""
    aim = rng.choice([None, None, None, "commit", "rotation", "after load"])
    if aim is None:
        time.sleep(rng.random() * 1.2)
        return
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and not any(
        note["phase"] == aim and note["round"] == number for note in started(folder)
    ):
        time.sleep(0.0002)
    time.sleep(rng.random() * 0.005)


def started(folder: Path):
    for rank in range(RANKS):
        if (folder / f"notes{rank}").exists():
            yield from notes_of(folder, rank)[-1:]
