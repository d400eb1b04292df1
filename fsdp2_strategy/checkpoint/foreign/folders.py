"""Recognise the folder or file of another system by the names in it; each rule knows some systems.

Input: a path, and the names in it. Output: a `Foreign`; None if no rule applies. This module imports no torch and reads
no pickle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.foreign.sources import (
    ACCELERATE,
    DCP,
    FILE,
    FILES,
    HUGGING_FACE,
    LIGHTNING,
    LIGHTRFT,
    PER_RANK,
    PICKLES,
    PRIME_RL,
    TORCHTITAN,
    TRAINER,
    VERL,
    VITRA,
    Foreign,
    Role,
    Source,
    step_of,
)
from fsdp2_strategy.checkpoint.paths import exists, names_in
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.file_reads import read_file

DCP_METADATA = ".metadata"
_HEAD_BYTES = 1024
_OLD_TORCH_FILE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled number that begins a file of ``torch.save`` before torch 1.6, or with its old format."""
_MOST_JSON_BYTES = 64 << 20
_RANK_FILE = re.compile(
    r"(?P<before>.*?)(?:(?:local_)?rank[_-]?|(?<=trainer_))(?P<rank>\d+)(?P<after>.*)\.(?:pt|pth|bin|ckpt)"
)
_NO_RANK_FILE = re.compile(r"rng|random|data|mp_rank|.*zero_pp_rank|events")
_VERL_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
RUN_FILE = re.compile(r"(ckpt|checkpoint|model|weights|step|epoch|iter|last|latest|final|state)", re.IGNORECASE)
NOT_WEIGHTS = {"training_args.bin", "scaler.pt", "rng_state.pth"}
"""Files with the endings of weights that hold none."""


def in_folder(path: Path, names: set[str]) -> Foreign | None:
    """Return the checkpoint that a folder with these names is, else None."""
    for rule in _RULES:
        if found := rule(path, names):
            return found
    return None


def of_file(path: Path) -> Foreign | None:
    """Return the checkpoint that a file is by its ending, or by its first bytes, else None."""
    if path.suffix == ".safetensors":
        return Foreign("a safetensors file", path, (Source("model", "weights", (path,)),), step_of(path))
    if path.name in NOT_WEIGHTS or not (path.suffix in PICKLES or is_torch_file(path)):
        return None
    kind = LIGHTNING if path.suffix == ".ckpt" else FILE
    return Foreign(kind, path, (Source("", "pickle", (path,)),), step_of(path))


def is_torch_file(path: Path) -> bool:
    """Return whether a file's first bytes are those of ``torch.save``: an archive that begins with a pickle."""
    try:
        if not path.is_file():  # a named pipe would wait for a writer
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(_OLD_TORCH_FILE) or (head.startswith(b"PK\x03\x04") and b"/data.pkl" in head)


def _verl(path: Path, names: set[str]) -> Foreign | None:
    for folder in (path, *(path / name for name in ("actor", "critic") if name in names)):
        found = [match for name in names_in(folder) if (match := _VERL_FILE.fullmatch(name))]
        sizes = {int(match[2]) for match in found if match[1] == "model"}
        if not sizes:
            continue
        size = max(sizes)
        sources: list[Source] = []
        roles: tuple[tuple[str, Role], ...] = (("model", "model"), ("optim", "optimizer"), ("extra_state", ""))
        for prefix, role in roles:
            files = tuple(folder / f"{prefix}_world_size_{size}_rank_{rank}.pt" for rank in range(size))
            if not exists(files[0]):
                continue
            _check_complete(folder, files)
            # The ranks have the same schedule, and random states of their own, which are not restored.
            sources.append(Source(role, "ranks", files) if role else Source(role, "pickle", files[:1]))
        step = step_of(folder)
        return Foreign(VERL, folder, tuple(sources), step_of(folder.parent) if step is None else step)
    return None


def _trainer_or_accelerate(path: Path, names: set[str]) -> Foreign | None:
    state = _json_in(path, "trainer_state.json") if "trainer_state.json" in names else {}
    is_trainer = "global_step" in state and bool(
        names & {"training_args.bin", "optimizer.pt", "optimizer.bin", "optimizer_0"}
    )
    is_accelerate = any(re.fullmatch(r"pytorch_model_fsdp(_.*)?|random_states_\d+\.pkl|optimizer_0", n) for n in names)
    if not is_trainer and not is_accelerate:
        return None
    sources = [
        _first(path, "model", folders=["pytorch_model_fsdp_0"], files=["pytorch_model_fsdp.bin"]),
        _rank_files(path, "model", names, r"pytorch_model_fsdp(_0)?_rank(\d+)\.bin"),
        _weights_in(path, names),
        _first(path, "model", files=["pytorch_model.bin"]),
    ]
    models = [source for source in sources if source]
    if not models:
        return None
    parts = [
        _first(path, "optimizer", folders=["optimizer_0"], files=["optimizer.bin", "optimizer.pt"])
        or _rank_files(path, "optimizer", names, r"optimizer(_0)?_rank(\d+)\.bin"),
        _first(path, "scheduler", files=["scheduler.bin", "scheduler.pt"]),
        Source("client", "json", (path / "trainer_state.json",)) if is_trainer else None,
    ]
    customs = sorted((n for n in names if re.fullmatch(r"custom_checkpoint_\d+\.pkl", n)), key=_number_in)
    parts += [Source("client", "pickle", (path / name,)) for name in customs]
    found = (models[0], *(part for part in parts if part))
    if is_trainer:
        return Foreign(TRAINER, path, found, int(state["global_step"]))
    return Foreign(ACCELERATE, path, found, step_of(path))


def _lightrft(path: Path, names: set[str]) -> Foreign | None:
    if DCP_METADATA not in names or not names & {"optim_states", "client_state.pt", "scheduler_state.pt"}:
        return None
    parts = [
        Source("model", "dcp", (path,)),
        _first(path, "optimizer", folders=["optim_states", "optimizer_0", "optimizer"]),
        _first(path, "scheduler", files=["scheduler_state.pt", "scheduler.pt", "scheduler.bin"]),
        _first(path, "client", files=["client_state.pt"]),
    ]
    return Foreign(LIGHTRFT, path, tuple(part for part in parts if part), step_of(path))


def _dcp(path: Path, names: set[str]) -> Foreign | None:
    if DCP_METADATA in names:
        sources = [Source("", "dcp", (path,))]
        kind = TORCHTITAN if re.fullmatch(r"step-\d+", path.name) else DCP
        if "meta.pt" in names:
            kind = LIGHTNING
            sources.append(Source("", "pickle", (path / "meta.pt",)))
        elif path.name == "trainer" and re.fullmatch(r"step_\d+", path.parent.name):
            kind = PRIME_RL
        sources += _sidecars_of_dcp(path, names)
        step = step_of(path)
        return Foreign(kind, path, tuple(sources), step_of(path.parent) if step is None else step)
    if "trainer" in names and exists(path / "trainer" / DCP_METADATA):
        return _dcp(path / "trainer", names_in(path / "trainer"))
    model = _first(path, "model", folders=["model", "weights", "model_state"])
    if model is None:
        return None
    optimizer = _first(path, "optimizer", folders=["optimizer", "optim", "optim_states", "optimizer_state"])
    return Foreign(DCP, path, tuple(s for s in (model, optimizer, *_sidecars_of_dcp(path, names)) if s), step_of(path))


def _sidecars_of_dcp(path: Path, names: set[str]) -> list[Source]:
    """Return the files with the schedule and the trainer's values next to a folder of DCP."""
    client: list[Source] = [
        Source("client", "json", (path / name,))
        for name in ("meta.json", "train_state.json", "state.json")
        if name in names
    ]
    client += [
        Source("client", "pickle", (path / name,))
        for name in ("train_state.pt", "trainer_state.pt", "client_state.pt", "state.pt")
        if name in names
    ]
    scheduler = _first(path, "scheduler", files=["scheduler.pt", "lr_scheduler.pt", "scheduler.bin"])
    return [*([scheduler] if scheduler else []), *client]


def _vitra(path: Path, names: set[str]) -> Foreign | None:
    if not {"weights.pt", "meta.json"} <= set(names):
        return None
    step = _json_in(path, "meta.json").get("global_step")
    parts = [
        Source("model", "pickle", (path / "weights.pt",)),
        _first(path, "optimizer", files=["optimizer.pt"]),
        _first(path, "scheduler", files=["scheduler.pt"]),
        Source("client", "json", (path / "meta.json",)),
    ]
    named = step if isinstance(step, int) else step_of(path)
    return Foreign(VITRA, path, tuple(part for part in parts if part), named)


def _hugging_face(path: Path, names: set[str]) -> Foreign | None:
    weights = _weights_in(path, names)
    if weights is None or not names & {"config.json", "adapter_config.json", "model.safetensors.index.json"}:
        return None
    if names & {"optimizer.pt", "optimizer.bin"}:
        return None
    return Foreign(HUGGING_FACE, path, (weights,), step_of(path))


def _one_file_per_rank(path: Path, names: set[str]) -> Foreign | None:
    of_prefix: dict[tuple[str, str], dict[int, str]] = {}
    is_set = {"rank0.pt", "rank1.pt"} <= names or {"rank_0.pt", "rank_1.pt"} <= names
    for name in names:
        match = _RANK_FILE.fullmatch(name)
        is_named = bool(RUN_FILE.search(name) or RUN_FILE.search(path.name) or "optim" in name or is_set)
        if match and (is_named or name.startswith(("trainer_", "local_rank_"))) and not _NO_RANK_FILE.match(name):
            of_prefix.setdefault((match["before"], match["after"]), {})[int(match["rank"])] = name
    sources = []
    for (before, _), of_rank in sorted(of_prefix.items()):
        role: Role = "optimizer" if "optim" in before else "model" if "model" in before else ""
        if "sched" in before:
            role = "scheduler"
        files = tuple(path / of_rank.get(rank, f"rank {rank}") for rank in range(max(of_rank) + 1))
        _check_complete(path, files)
        sources.append(Source(role, "ranks", files))
    if not any(source.role in ("model", "") for source in sources):
        return None
    kind = PRIME_RL if any(re.fullmatch(r"(trainer_|local_rank_)0\.pt", name) for name in names) else PER_RANK
    return Foreign(kind, path, tuple(sources), step_of(path))


_MODEL_FILES = [
    "pytorch_model_fsdp.bin",
    "pytorch_model.bin",
    *(
        f"{name}{suffix}"
        for name in ("model", "weights", "model_state", "model_state_dict", "trainer")
        for suffix in PICKLES
    ),
]
_OPTIMIZER_FILES = [
    f"{name}{suffix}"
    for name in ("optimizer", "optim", "optimizer_state", "optimizer_state_dict")
    for suffix in PICKLES
]


def _files(path: Path, names: set[str]) -> Foreign | None:
    model = _weights_in(path, names) or _first(path, "model", files=_MODEL_FILES)
    optimizer = _first(path, "optimizer", files=_OPTIMIZER_FILES)
    if model is None or (model.form == "weights" and optimizer is None):
        return None
    if optimizer is None and model.paths[0].name in ("model.pt", "trainer.pt", "model.pth", "model.bin"):
        model = Source("", "pickle", model.paths)  # it may hold all parts
    rest = _sidecars_of_dcp(path, names)
    return Foreign(FILES, path, tuple(s for s in (model, optimizer, *rest) if s), step_of(path))


_RULES: tuple[Callable[[Path, set[str]], Foreign | None], ...] = (
    _verl,
    _trainer_or_accelerate,
    _lightrft,
    _dcp,
    _vitra,
    _hugging_face,
    _one_file_per_rank,
    _files,
)
"""The rules by which a folder is recognised: the first that finds a checkpoint decides."""


def _first(path: Path, role: Role, folders: Iterable[str] = (), files: Iterable[str] = ()) -> Source | None:
    """Return the first named folder of DCP, else the first named file that exists, else None."""
    for name in folders:
        if exists(path / name / DCP_METADATA):
            return Source(role, "dcp", (path / name,))
    return next((Source(role, "pickle", (path / name,)) for name in files if exists(path / name)), None)


def _weights_in(path: Path, names: set[str]) -> Source | None:
    if any(
        re.fullmatch(r"(model|adapter_model|diffusion_pytorch_model).*\.safetensors(\.index\.json)?", n) for n in names
    ):
        return Source("model", "weights", (path,))
    return None


def _rank_files(path: Path, role: Role, names: set[str], pattern: str) -> Source | None:
    of_rank = {int(match[2]): name for name in names if (match := re.fullmatch(pattern, name))}
    if not of_rank:
        return None
    files = tuple(path / of_rank.get(rank, f"rank {rank}") for rank in range(max(of_rank) + 1))
    _check_complete(path, files)
    return Source(role, "ranks", files)


def _check_complete(path: Path, files: Collection[Path]) -> None:
    missing = [file.name for file in files if not exists(file)]
    if missing:
        raise CheckpointError(
            f"cannot load {path}: it lacks {len(missing)} of {len(files)} files of ranks ({', '.join(missing[:3])}), "
            "expected those of all ranks. Copy the missing files from the machines that wrote them."
        )


def _number_in(name: str) -> int:
    return int(re.sub(r"\D", "", name) or 0)


def _json_in(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(read_file(path / name, _MOST_JSON_BYTES, follow_link=True))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path / name}: {error}, expected JSON. Copy the file again.") from error
    return content if isinstance(content, dict) else {}
