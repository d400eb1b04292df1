"""Kill ranks at random moments of saves, commits, rotations, loads and exports, in all layouts; count what was hit.

    python -m helpers.soak --kills 1000 --counts benchmarks/results/kills.json     # in tests/; see make soak

Each round forks one or two ranks. They load the newest checkpoint of a layout's directory, check that it is bitwise one
of the saved states and that nothing is lost, and go on saving and exporting until one of them or both are killed. The
file of counts is read at the start and written after each round, so a soak that is stopped can be continued.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import itertools
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, list_checkpoints, save_model, verify_checkpoint
from fsdp2_strategy.checkpoint import directory, find, listing, save
from fsdp2_strategy.checkpoint.paths import TRAINER_STATE, CheckpointPaths
from fsdp2_strategy.hf.weights_folder import INDEX, WEIGHTS, read_index
from fsdp2_strategy.integrations.lerobot import LeRobotLayout, save_policy
from fsdp2_strategy.integrations.trl import TrainerLayout
from fsdp2_strategy.model.shards import local_shard
from fsdp2_strategy.storage import staged_folder
from helpers.models import build

LAYOUTS = ("own", "several models", "LeRobot", "Trainer", "only trainable", "signed")
KEPT = 2
PHASES = ("join", "start", "load", "check", "between", "save", "async save", "writing", "commit", "rotation")
PHASES += ("deletion", "export", "switch of an export")
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[2]


# --- a rank -----------------------------------------------------------------------------------------------------------


class Journal:
    """What rank 0 began and finished, one JSON object in a line; it survives a kill."""

    def __init__(self, path):
        self.path = path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        self.entries = [json.loads(line) for line in lines if line.endswith("\n")]

    def note(self, **facts):
        if dist.get_rank() == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(facts) + "\n")

    def of(self, what):
        return [entry for entry in self.entries if entry["what"] == what]


@dataclass
class Run:
    """One rank of a round."""

    kind: str
    folder: Path
    phases: mmap.mmap
    rng: random.Random

    def phase(self, name):
        self.phases[dist.get_rank()] = PHASES.index(name)

    def noting(self, phase, call):
        def noted(*args, **kwargs):
            before = self.phases[dist.get_rank()]
            self.phase(phase)
            result = call(*args, **kwargs)
            self.phases[dist.get_rank()] = before
            return result

        return noted

    def go(self):
        """Load, check, and save until killed."""
        for owner, name, phase in (
            (directory, "commit", "commit"),
            (directory, "remove", "rotation"),
            (directory, "delete", "deletion"),
            (save, "write_components", "writing"),
            (find, "recover", "load"),
            (staged_folder.StagedFolder, "publish", "switch of an export"),
        ):
            setattr(owner, name, self.noting(phase, getattr(owner, name)))
        self.saves, self.out = self.folder / "checkpoints", self.folder / "out"
        key = self.folder.parent / "key" if self.kind == "signed" else None
        self.strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, checkpoint_key_file=key))
        self.journal = Journal(self.folder / "journal")
        self.models, optimizers = self.prepare()
        self.tensors = [p for model in self.models.values() for p in model.parameters() if p.requires_grad]
        for optimizer in optimizers:
            state = [t for of_one in optimizer.state.values() for key, t in of_one.items() if key != "step"]
            self.tensors += state
        self.phase("load")
        loaded = self.load()
        self.phase("check")
        if dist.get_rank() == 0:
            check_checkpoints(self.saves, self.journal, loaded)
            check_export(self.out, self.journal, thoroughly=self.rng.random() < 0.3)
        dist.barrier()
        for value in itertools.count(max([e["value"] for e in self.journal.entries], default=0) + 1):
            self.step(value)

    def prepare(self):
        names = ("actor", "critic") if self.kind == "several models" else ("",)
        models, optimizers = {}, []
        for name in names:
            model = build("llama")
            if self.kind == "only trainable":
                model = AutoModelForCausalLM.from_pretrained(self.folder.parent / "base", dtype=torch.float32)
                model.model.embed_tokens.requires_grad_(False)
                model.model.layers[0].requires_grad_(False)
            model = self.strategy.prepare_model(model, is_training=True)
            optimizer = self.strategy.create_optimizer(model, lr=0.1)
            ids = torch.arange(3, 15)[None]
            self.strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer)
            self.strategy.optimizer_step(optimizer, model)
            models[name] = model
            optimizers.append(optimizer)
        return models, optimizers

    @property
    def given(self):
        return self.models.get("", self.models)

    @torch.no_grad()
    def fill(self, value):
        for tensor in self.tensors:
            expected(tensor, value, of=local_of(tensor))

    def load(self):
        path, state = self.strategy.load_ckpt(self.given, self.saves)
        if path is None:
            return None
        value = state["value"]
        for tensor in self.tensors:
            own = local_of(tensor)
            assert torch.equal(own, expected(tensor, value)), f"{path} is not bitwise the state {value}"
        return value

    def step(self, value):
        self.phase("between")
        rng = random.Random(f"{self.kind} {value}")  # the same on all ranks
        self.fill(value)
        options = {"layout": None, "only_trainable": self.kind == "only trainable"}
        if self.kind == "LeRobot":
            options["layout"] = LeRobotLayout(total_steps=10, batch_size=1, train_config={"value": value})
        if self.kind == "Trainer":
            options["layout"] = TrainerLayout(files={"trainer_state.json": json.dumps({"value": value})})
        tag, protected = ("same" if rng.random() < 0.2 else f"v{value}"), rng.random() < 0.01
        in_background = rng.random() < 0.5
        self.journal.note(what="begins", value=value, tag=tag, protected=protected)
        self.phase("async save" if in_background else "save")
        self.strategy.save_ckpt(
            self.given,
            self.saves,
            tag,
            max_num=KEPT,
            protect=protected,
            client_state={"value": value},
            async_save=in_background,
            **options,
        )
        self.fill(-1)  # what the trainer does next must not reach the files
        if rng.random() < 0.3:
            self.export(value, rng)
        self.phase("async save" if in_background else "between")
        self.strategy.wait_for_checkpoint()
        self.journal.note(what="saved", value=value, tag=tag, protected=protected)
        self.phase("load")
        if rng.random() < 0.15:
            assert self.load() == value

    def export(self, value, rng):
        model = next(iter(self.models.values()))
        with torch.no_grad():
            for parameter in model.parameters():
                local_of(parameter).fill_(value)
        inner = getattr(model, "module", model)
        inner.config.export_value = value
        self.journal.note(what="exports", value=value)
        before = self.phases[dist.get_rank()]
        self.phase("export")
        if self.kind == "LeRobot":
            save_policy(model, self.out, train_config={"value": value})
        else:
            save_model(model, output_dir=self.out, max_shard_size=rng.choice(["10KB", "20KB", "20KB", "5GB"]))
        self.phases[dist.get_rank()] = before
        self.journal.note(what="exported", value=value)


def local_of(tensor):
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def expected(tensor, value, of=None):
    """Return this rank's part of a tensor of a state; or fill ``of`` with it."""
    full = (torch.arange(tensor.numel()) % 997 + 1000 * value).to(tensor.dtype).view(tensor.shape)
    part = local_shard(tensor).of(full) if hasattr(tensor, "to_local") else full
    return part if of is None else of.copy_(part)


def check_checkpoints(saves, journal, loaded):
    """Check what is in the directory against what was begun and finished before the kill."""
    finished = {}
    for entry in journal.of("saved"):
        finished.pop(entry["tag"], None)  # saved again: the newest of its tag counts
        finished[entry["tag"]] = entry
    begun = journal.of("begins")
    last = max((entry["value"] for entry in finished.values()), default=None)
    unfinished = begun[-1] if begun and begun[-1]["value"] != last else None
    allowed = {last, unfinished and unfinished["value"]}
    assert loaded in allowed, f"loaded the state {loaded}, expected one of {allowed}"
    found = {checkpoint.tag: value_of(checkpoint.path) for checkpoint in list_checkpoints(saves)}
    for tag in {*list(found)[-KEPT:], *random.sample(list(found), min(1, len(found)))}:
        report = verify_checkpoint(saves / tag, progress=False)
        assert report.ok, f"{tag} is damaged: {report.problems}"
    if unfinished and loaded == unfinished["value"]:  # it may have been committed, and may have rotated
        finished.pop(unfinished["tag"], None)
        finished[unfinished["tag"]] = unfinished
    for tag in [t for t, e in finished.items() if not e["protected"]][-KEPT:] + [
        t for t, e in finished.items() if e["protected"]
    ]:
        assert found.get(tag) == finished[tag]["value"], f"{tag} is lost: found {found}"
    if unfinished and loaded == unfinished["value"]:
        journal.note(**unfinished | {"what": "saved"})  # now it is known, and may not be lost later
    if found:
        latest = listing.latest_tag(saves)
        is_first = latest is None and last is None  # killed between the first commit and its `latest`
        assert is_first or latest in found, f"latest names {latest}, and there are {sorted(found)}"


def value_of(path):
    state = json.loads((CheckpointPaths.found_in(path).state / TRAINER_STATE).read_text())
    return state["client_state"]["value"]


def check_export(out, journal, *, thoroughly):
    """Check that an export is complete: weights and configuration of one value, the last one or a later one."""
    begun, finished = ([e["value"] for e in journal.of(what)] for what in ("exports", "exported"))
    allowed = [value for value in begun if not finished or value >= finished[-1]]
    if not finished and not (out / WEIGHTS).exists() and not (out / INDEX).exists():
        return
    names = {WEIGHTS} if (out / WEIGHTS).exists() else {*read_index(out / INDEX).values()}
    values = {t.unique().item() for name in names for t in load_file(out / name).values()}
    values |= {json.loads((out / "config.json").read_text())["export_value"]}
    if (out / "train_config.json").exists():
        values |= {json.loads((out / "train_config.json").read_text())["value"]}
    assert len(values) == 1 and values <= {*allowed}, f"the export has the values {values}, expected one of {allowed}"
    if thoroughly:
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert {p.unique().item() for p in model.parameters()} == values


# --- the rounds -------------------------------------------------------------------------------------------------------


def forked(rank, ranks, store, run, errors):
    """Fork a rank, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a soak that is stopped leaves no ranks
        sys.stderr = (errors / f"{rank}").open("w", buffering=1)
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        run.phase("start")
        run.go()
    except AssertionError as lost:
        (errors / f"{rank}.loss").write_text(f"{lost}\n{traceback.format_exc()}")
    except BaseException:  # noqa: BLE001  the other ranks' end
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(1)


class Soak:
    """Rounds over all layouts.

    Args:
        folder: an empty folder for checkpoints and exports.
        counts: file of the counts, or None.
        seed: of the moments.
    """

    def __init__(self, folder, counts=None, seed=None):
        self.folder, self.counts, self.rng = folder, counts, random.Random(seed)
        self.results = {"kills": 0, "lost": [], "slowest end of survivors, in seconds": 0.0, "hit": {}, "runs": []}
        if counts is not None and counts.exists():
            self.results = json.loads(counts.read_text())
        command = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
        self.run_of_now = {"commit": commit, "date": date.today().isoformat(), "kills": 0}
        self.results["runs"].append(self.run_of_now)
        build("llama").save_pretrained(folder / "base")
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(os.urandom(32))
        self.phases = mmap.mmap(-1, 2)

    def round(self, kind):
        """Start ranks, kill one or all, and count it."""
        ranks = self.rng.choice([1, 2])
        folder = self.folder / kind.replace(" ", "_")
        folder.mkdir(exist_ok=True)
        errors = Path(tempfile.mkdtemp(dir=self.folder))
        store = errors / "store"
        self.phases[:] = bytes(2)
        run = Run(kind, folder, self.phases, random.Random(self.rng.random()))
        pids = [forked(rank, ranks, store, run, errors) for rank in range(ranks)]
        self._wait_for_a_moment(pids)
        victims = self.rng.choice([pids, [self.rng.choice(pids)]])
        phase = PHASES[self.phases[pids.index(victims[0])]]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        statuses = [self._status(pid) for pid in pids]
        self._count(kind, ranks, phase, time.monotonic() - begun)
        losses = [path.read_text() for path in errors.glob("*.loss")]
        survived_kill = os.WIFEXITED(statuses[pids.index(victims[0])])
        texts = [path.read_text() for path in sorted(errors.glob("[0-9]"))]
        if survived_kill and not losses:  # it ended by itself, before the kill
            losses = [f"a rank failed: {text[-3000:]}" for text in texts if "Error" in text]
        self.results["lost"] += [f"{kind}, {ranks} ranks: {loss}" for loss in losses]
        self._write()
        shutil.rmtree(errors)
        return losses

    def _wait_for_a_moment(self, pids):
        """Wait a random time from the end of the load, or until a rank is where it rarely is, and a moment longer.

        A rank that has not joined yet is not killed: the others would wait for it until the time-out of the group.
        """
        aim = self.rng.choice([None, None, *PHASES[2:4], *PHASES[7:]])
        deadline = time.monotonic() + 60
        while min(self.phases[: len(pids)]) < PHASES.index("start") and time.monotonic() < deadline:
            time.sleep(0.001)
        while self.phases[0] < PHASES.index("between") and aim not in ("load", "check"):
            if time.monotonic() > deadline or os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return
            time.sleep(0.001)
        if aim is None:
            time.sleep(self.rng.random() * 0.6)
            return
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and all(PHASES[p] != aim for p in self.phases[: len(pids)]):
            time.sleep(0.0002)
        time.sleep(self.rng.choice([0, 0.003, 0.02]) * self.rng.random())

    @staticmethod
    def _status(pid):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return status
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError("a rank went on for 60 s after the other one was killed")

    def _count(self, kind, ranks, phase, seconds):
        self.results["kills"] += 1
        self.run_of_now["kills"] += 1
        hit = self.results["hit"].setdefault(kind, {}).setdefault(f"{ranks} ranks", {})
        hit[phase] = hit.get(phase, 0) + 1
        slowest = "slowest end of survivors, in seconds"
        self.results[slowest] = max(self.results[slowest], round(seconds, 2))

    def _write(self):
        if self.counts is not None:
            temporary = self.counts.with_suffix(".new")
            temporary.write_text(json.dumps(self.results, indent=1) + "\n")
            temporary.replace(self.counts)


def summary(results):
    """Return the phases that were hit, over all layouts."""
    phases = collections.Counter()
    for of_layout in results["hit"].values():
        for of_ranks in of_layout.values():
            phases.update(of_ranks)
    hit = ", ".join(f"{phase}: {count}" for phase, count in phases.most_common())
    return f"{results['kills']} kills, {len(results['lost'])} losses; killed at: {hit}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="kills in all, with those in the file of counts")
    parser.add_argument("--counts", type=Path, default=ROOT / "benchmarks/results/kills.json")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="by default all")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        soak = Soak(Path(folder), parsed.counts)
        for kind in itertools.cycle(parsed.layout or LAYOUTS):
            if soak.results["kills"] >= parsed.kills:
                break
            if losses := soak.round(kind):
                sys.stdout.write("\n".join(losses) + "\n")
                return 1
        sys.stdout.write(summary(soak.results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
