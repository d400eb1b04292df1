"""Checkpoints that were changed on purpose, with checksums and digests that agree: what each call does with them."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import shutil
import time
from collections import Counter
from dataclasses import astuple

import torch
import torch.distributed as dist
import transformers
from torch import nn

from fsdp2_strategy import EMA, FSDPV2Strategy, StrategyConfig, list_checkpoints, verify_checkpoint
from fsdp2_strategy.checkpoint.listing import digest_of_manifest
from fsdp2_strategy.checkpoint.paths import CHECKSUMS, CheckpointPaths
from fsdp2_strategy.cli import main
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.errors import CheckpointError, DataError
from fsdp2_strategy.integrations.lerobot import LeRobotLayout
from fsdp2_strategy.integrations.trl import TrainerLayout
from fsdp2_strategy.storage.checksums import blocks_of, digest_of
from fsdp2_strategy.storage.safetensors_format import DTYPES

DEEP = "@deep@"
VALUES = [
    None, True, False, -1, 0, 1, 7, 1.5, -0.5, 10**400, 2**63, 2**64, 1e308, "", "x", "3", "../../x", "/etc/passwd",
    "a\0b", "\ud800", "\x1b[2J", "x" * 3000, [], {}, [1], [[]], {"a": 1}, {"__float__": "x"},
    {"__tensor__": [1], "dtype": "load"}, {"__dict__": [[[{}], 1]]}, {"__counter__": 3}, [None] * 5, DEEP,
    float("nan"), float("inf"),
]  # fmt: skip
"""What an entry is replaced by."""
RAW = re.compile(r"\b(?!CheckpointError|DamageError)(?:[A-Z]\w*(?:Error|Exception)|StopIteration)(?:\(|: )")
"""An error of Python or of another library in the text of one of ours."""
SAME_SIZE = [[name for name, dtype in DTYPES.items() if dtype.itemsize == size] for size in (1, 2, 4, 8)]
"""Dtypes that a tensor may be said to have without another length."""
SECONDS = 6
"""Limit for one call on one checkpoint, on a busy machine."""


class RankLoader:
    """A loader with a state of its own on each rank."""

    def state_dict(self):
        return {"rows": torch.arange(5), "name": b"abc", "at": (1, [2.5, None]), 3: {"x": torch.rand(2).numpy()}}

    def load_state_dict(self, state):
        self.state = state


class Run:
    """A model with all that a checkpoint of a layout can have."""

    def __init__(self, layout):
        self.layout = layout
        self.strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, seed=3, fp16=layout == "several"))
        self.models = {name: self._model(name) for name in (["actor", "critic"] if layout == "several" else [""])}
        optimizers = {name: self.strategy.create_optimizer(model, lr=0.01) for name, model in self.models.items()}
        schedule = {"name": "cosine", "num_training_steps": 9}
        schedulers = {name: self.strategy.create_scheduler(each, **schedule) for name, each in optimizers.items()}
        self.emas = {name: EMA(model, 0.5) for name, model in self.models.items()}
        for name, model in self.models.items():
            self.strategy.backward(self._loss(model), model)
            self.strategy.optimizer_step(optimizers[name], model, schedulers[name])

    def _model(self, name):
        torch.manual_seed(1)
        if self.layout in ("several", "lerobot"):
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
        else:
            config = transformers.LlamaConfig(
                vocab_size=8, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=1,
                num_key_value_heads=1, max_position_embeddings=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(config)
        if self.layout == "only_trainable":
            model.model.requires_grad_(False)
        return self.strategy.prepare_model(model, is_training=True)

    def _loss(self, model):
        if self.layout in ("several", "lerobot"):
            return model(torch.ones(2, 3)).float().square().mean()
        ids = torch.arange(8)[None]
        return model(input_ids=ids, labels=ids).loss

    def _common(self):
        loader = RankLoader() if self.layout in ("trainer", "lerobot") else ResumableLoader(list(range(12)), 2)
        several = self.layout == "several"
        return {"ema": self.emas if several else self.emas[""], "dataloader": loader}

    @property
    def _given(self):
        return self.models if self.layout == "several" else self.models[""]

    def save(self, folder, tag):
        options = {"only_trainable": True} if self.layout == "only_trainable" else {}
        if self.layout == "lerobot":
            options["layout"] = LeRobotLayout(total_steps=10, batch_size=2, train_config={"seed": 1})
        if self.layout == "trainer":
            options["layout"] = TrainerLayout(files={"trainer_state.json": '{"global_step": 1}'})
        state = {"note": "x", "best": [1.5, {"deep": [None, True]}]}
        self.strategy.save_ckpt(
            self._given, folder, tag, max_num=None, client_state=state, metric=0.5, **options, **self._common()
        )

    def load(self, folder, tag, **options):
        return self.strategy.load_ckpt(self._given, folder, tag=tag, **options, **self._common())


LAYOUTS = ("own", "several", "lerobot", "trainer", "only_trainable")


# --- changes ---------------------------------------------------------------------------------------------------------


def places(value, at=()):
    """Yield the path of each entry of a JSON value, of the value itself first."""
    yield at
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(entries)[:40]:
        yield from places(entry, (*at, key))


def changed(value, at, kind, new):
    """Return a copy of a JSON value with a change at a path, as text."""
    value = copy.deepcopy(value)
    if kind == "replace":
        if not at:
            return as_text(new)
        inner(value, at[:-1])[at[-1]] = new
    elif kind == "delete" and at:
        del inner(value, at[:-1])[at[-1]]
    elif kind == "nest" and at:
        inner(value, at[:-1])[at[-1]] = [{"x": inner(value, at)}]
    elif kind == "duplicate" and at and isinstance(inner(value, at[:-1]), dict):
        entry = as_text(inner(value, at))
        inner(value, at[:-1])["\x01"] = 0
        twice = f"{json.dumps(at[-1])}: {entry}"
        return as_text(value).replace('"\\u0001": 0', twice)
    return as_text(value)


def inner(value, at):
    for key in at:
        value = value[key]
    return value


def as_text(value):
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)


def change_json(text, random_, kinds=("replace", "replace", "replace", "delete", "nest", "duplicate")):
    value = json.loads(text)
    at, kind, new = random_.choice(list(places(value))), random_.choice(kinds), random_.choice(VALUES)
    return changed(value, at, kind, new), f"{kind} {at} {str(new)[:40]!r}"


def change_header(content, random_):
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    what = random_.randrange(9)
    if what == 0:
        wrong = random_.choice([0, 1, 2**32, 2**63, length - 1, length + 8, len(content)])
        return wrong.to_bytes(8, "little") + header + data, f"length {wrong}"
    if what == 1:
        value = json.loads(header)
        names = [name for name in value if name != "__metadata__"]
        entry = value[random_.choice(names)]
        shape = random_.choice([[1] * 100_000, [0, 2**62], [2**31] * 8, entry["shape"][::-1], [True], [2**64]])
        entry["shape"] = shape
        text, said = json.dumps(value), f"shape {str(shape)[:40]}"
    elif what == 2:
        value = json.loads(header)
        names = [name for name in value if name != "__metadata__"]
        value[random_.choice(["y" * 2_000_000, "\ud800", "\n", "a" * 900])] = value.pop(random_.choice(names))
        text, said = json.dumps(value), "another name"
    elif what == 3:
        value = json.loads(header)
        entry = value[random_.choice([name for name in value if name != "__metadata__"])]
        same = [names for names in SAME_SIZE if entry["dtype"] in names]
        entry["dtype"] = random_.choice(same[0] if same else list(DTYPES))
        text, said = json.dumps(value), f"dtype {entry['dtype']}"
    else:
        text, said = change_json(header, random_)
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded + data, f"header: {said}"


def change_bytes(content, random_):
    content = bytearray(content)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(max(1, min(len(content), 600)))
        what = random_.randrange(3)
        if what == 0 and content:
            content[at] = random_.randrange(256)
        elif what == 1:
            del content[at : at + random_.choice([1, 8, 10_000])]
        else:
            content[at:at] = random_.choice([b"\0", b"[", b'"', b"1e999", b"\xff\xfe", b"{" * 50])
    return bytes(content), "bytes"


def change(path, random_):
    """Change one file of a checkpoint; return what was changed."""
    paths = CheckpointPaths.found_in(path)
    files = sorted(file for file in path.rglob("*") if file.suffix in (".json", ".safetensors"))
    state = [file for file in files if file.name in ("manifest.json", "trainer_state.json") or "checksums" in str(file)]
    file = random_.choice(random_.choice([files, state]))
    content = file.read_bytes()
    if random_.random() < 0.15:
        content, said = change_bytes(content, random_)
    elif file.suffix == ".json":
        text, said = change_json(content, random_)
        content = text.encode("utf-8", "surrogatepass")
    else:
        content, said = change_header(content, random_)
    seal(paths, file, content)
    return f"{file.relative_to(path)}: {said}"


def seal(paths, file, content):
    """Write a file of a checkpoint, and make checksums and manifest agree with it, as far as they can be read."""
    if file == paths.manifest:
        with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
            manifest = json.loads(content)
            if isinstance(manifest.get("digest"), str):
                manifest["digest"] = digest_of_manifest(manifest)
                if b"100000" not in content and content.count(b'": ') == len(json.dumps(manifest).split('": ')) - 1:
                    content = json.dumps(manifest).encode()
                else:  # a key occurs twice: the last one counts
                    content = content.replace(_digest_in(content), manifest["digest"].encode())
        file.write_bytes(content)
        return
    file.write_bytes(content)
    manifest = json.loads(paths.manifest.read_bytes())
    name = paths.name_of(file)
    manifest["files"][name] = len(content)
    if name not in manifest["checksums"]:
        for rank in range(len(manifest["checksums"])):
            own = paths.rank_file(CHECKSUMS, rank)
            listed = json.loads(own.read_bytes())
            listed["blocks"].pop(name, None)
            if rank == 0 and content:
                listed["blocks"][name] = [list(astuple(block)[:3]) for block in blocks_of(content)]
            own.write_text(json.dumps(listed))
    for name in manifest["checksums"]:
        own = paths.root / name
        manifest["files"][name] = own.stat().st_size
        manifest["checksums"][name] = digest_of(own.read_bytes())
    write_manifest(paths, manifest)


def _digest_in(content):
    found = re.findall(rb'"digest": "(\w{16})"', content)
    return found[-1] if found else b"\xff"


# --- calls -----------------------------------------------------------------------------------------------------------


def command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    if status == 2:
        raise CheckpointError(err.getvalue())
    out.getvalue().encode()


def calls(run, folder, good):
    """Return the calls that read the checkpoint ``bad`` of a folder, by name."""
    bad, out = folder / "bad", folder.parent / "out"

    def listed():
        assert "good" in {checkpoint.tag for checkpoint in list_checkpoints(folder)}, "the good one is not listed"

    def verified():
        report = verify_checkpoint(bad, progress=False)
        for problem in report.problems[:20]:
            check_text(problem)

    def exported():
        shutil.rmtree(out, ignore_errors=True)
        command(
            "export", "-q", "--dtype", "bfloat16", *(["--model", "actor"] if run.layout == "several" else []), bad, out
        )

    return {
        "list_checkpoints": listed,
        "verify_checkpoint": verified,
        "load_ckpt": lambda: run.load(folder, "bad"),
        "load_ckpt fallback": lambda: run.load(folder, None, fallback=True),
        "ls": lambda: command("ls", folder),
        "ls --json": lambda: command("ls", "--json", folder),
        "verify": lambda: command("verify", "-q", bad),
        "inspect": lambda: command("inspect", bad),
        "inspect --json": lambda: command("inspect", "--json", bad),
        "diff": lambda: command("diff", good, bad),
        "export": exported,
    }


def check_text(text):
    assert len(text) < 2000, f"a message of {len(text)} characters: {text[:200]}"
    assert not (found := RAW.search(text)), f"a raw {found[0]} in {text[:600]}"


def outcome(call):
    """Return what a call did, in a word, and what is wrong with that, or an empty text."""
    begin = time.monotonic()
    try:
        call()
        kind, wrong = "success", ""
    except (CheckpointError, DataError) as error:
        kind, wrong = type(error).__name__, ""
        try:
            check_text(str(error))
        except AssertionError as problem:
            kind, wrong = "bad message", str(problem)
    except Exception as error:  # noqa: BLE001  each is a finding
        kind, wrong = f"raw {type(error).__name__}", repr(error)[:800]
    seconds = time.monotonic() - begin
    if seconds > SECONDS:
        return "too slow", f"{seconds:.1f} s"
    return kind, wrong


def fuzz(layout, folder, seed, count, only=None):
    """Change a checkpoint ``count`` times, and make calls on each; return the counts of outcomes, and problems.

    Collective: on several ranks, rank 0 changes the files, and ``only`` names the calls that are collective.
    """
    run = Run(layout)
    run.save(folder / "saved", "good")
    counts, problems = Counter(), []
    for number in range(count):
        work = folder / "work"
        said = [None]
        if dist.get_rank() == 0:
            copy_good(folder / "saved", work)
            said = [change(work / "bad", random.Random(f"{layout} {seed} {number}"))]
        dist.broadcast_object_list(said)
        for name, call in calls(run, work, folder / "saved" / "good").items():
            if only and name not in only:
                continue
            kind, wrong = outcome(call)
            counts[kind] += 1
            if wrong:
                problems.append(f"{layout} {seed} {number}: {said[0]}: {name}: {kind}: {wrong}")
        dist.barrier()
    return counts, problems


def copy_good(saved, work):
    """Make a directory with the checkpoint ``good`` and a newer copy of it, ``bad``."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(saved, work)
    shutil.copytree(work / "good", work / "bad")
    paths = CheckpointPaths.found_in(work / "bad")
    write_manifest(paths, json.loads(paths.manifest.read_bytes()) | {"sequence": 2, "tag": "bad"})


def write_manifest(paths, manifest):
    """Write a manifest with the digest of its content."""
    manifest["digest"] = digest_of_manifest(manifest)
    paths.manifest.write_text(json.dumps(manifest))
