"""Convert another system's checkpoint to one of this package, without its model or a GPU, the command ``convert``.

Input: a `Foreign`. Output: a directory with one committed checkpoint: weights, optimizer state and hyper-parameters,
step, schedule and client state. It has no pickles, so that `load_ckpt` needs no trust. A few tensors are in memory at a
time.

[Note: names of a converted checkpoint] The weights keep the names of the ``state_dict`` that was saved, and the files
XX
Face folder keep their Hugging Face names.

The class of the optimizer is not in its state dict, so the checkpoint has an empty class, and a load compares
hyper-parameters instead.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint import directory
from fsdp2_strategy.checkpoint.deletion import delete_partial
from fsdp2_strategy.checkpoint.foreign.contents import Contents, read_contents
from fsdp2_strategy.checkpoint.foreign.export import sidecars_for
from fsdp2_strategy.checkpoint.foreign.parameter_ids import Parameter, name_parameters, named_optimizer
from fsdp2_strategy.checkpoint.foreign.recognise import Foreign
from fsdp2_strategy.checkpoint.foreign.stored_optimizer import StoredOptimizer, plain
from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor, read_into
from fsdp2_strategy.checkpoint.listing import PARTIAL, hidden_path
from fsdp2_strategy.checkpoint.lock import acquire, release_all
from fsdp2_strategy.checkpoint.paths import CHECKSUMS, OPTIMIZER, RNG, TRAINER_STATE, CheckpointPaths, exists, names_in
from fsdp2_strategy.checkpoint.random_state import derive_seed, rng_content, seed_everything
from fsdp2_strategy.checkpoint.training_state import CONVERTED_FROM, IMPLEMENTATION, POSITION
from fsdp2_strategy.distributed.progress import Progress
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.conversions import renames
from fsdp2_strategy.hf.known_models import build_known, check_configuration, read_configuration
from fsdp2_strategy.model.names import named_parameters
from fsdp2_strategy.storage.checksums import Block, blocks_of, blocks_of_file
from fsdp2_strategy.storage.json_files import as_json, check_json, write_bytes, write_text
from fsdp2_strategy.storage.json_values import as_json_values
from fsdp2_strategy.storage.output_files import create_files, file_bytes, files_for, index_of
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.safetensors_format import CONVERTED, ROOT_NAMES
from fsdp2_strategy.storage.staged_folder import check_free_space
from fsdp2_strategy.storage.write import WriteRequest, force_to_disk, write_all

_SEED = 42
"""As in `save_checkpoint`; a load derives the random states of all ranks from it."""
_NO_SETTINGS = IMPLEMENTATION | {"param_names", "group_name"}
_SCHEDULE = {"last_epoch", "base_lrs", "_last_lr"}
"""What the state of a complete schedule of torch has."""

Blocks = dict[Path, list[Block]]


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    path: Path
    """The new checkpoint."""
    contents: Contents
    """What the source has."""


@dataclass(frozen=True)
class _Optimizer:
    """The state of an optimizer, as our checkpoints have it."""

    tensors: dict[str, StoredTensor]
    """By the name in the files."""
    hyper: dict[str, Any]
    """The entry ``optimizer`` of ``trainer_state.json``."""


def convert_foreign(foreign: Foreign, target: Path, sidecars: Path | None, *, progress: bool) -> Converted:
    """Convert a checkpoint of another system; for a single process.

    Args:
        foreign: the checkpoint. Its pickles are read.
        target: the directory to create; ``load_ckpt`` takes it.
        sidecars: a folder to copy configuration and tokenizer from; by default the source, if it has some.
        progress: whether to show the progress.

    Raises:
        CheckpointError: the checkpoint has no weights, or a part of it cannot be converted; or ``target`` has files.
    """
    contents = read_contents(foreign)
    if not contents.weights:
        raise CheckpointError(
            f"cannot convert {foreign.path}: it is {foreign.kind} without weights, expected those of a model. Pass the "
            "path of another checkpoint."
        )
    if any(not name.startswith(".") for name in names_in(target)):  # a conversion that was killed leaves hidden files
        raise CheckpointError(f"cannot convert: {target} is not empty, expected a new directory. Name another one.")
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in contents.weights.items()}
    if sidecars is not None:
        check_configuration(sidecars, described, str(foreign.path))
    optimizer = _optimizer(contents, sidecars)
    state = _state(contents, optimizer.hyper if optimizer else None)
    tag = f"global_step{contents.step}"
    nbytes = sum(map(_nbytes, [*contents.weights.values(), *(optimizer.tensors.values() if optimizer else ())]))
    created = _missing_folders(target)
    directory.make_directory(target)
    acquire(target)
    directory.delete_leftovers(target)
    partial = CheckpointPaths.of(hidden_path(target, tag, PARTIAL), "own")
    try:
        check_free_space(target, nbytes)
        for name in (RNG, CHECKSUMS):  # first: they show that the directory is ours, which may be deleted
            (partial.state / name).mkdir(parents=True)
        with Progress("converting", nbytes, is_shown=progress) as shown:
            metadata = CONVERTED if contents.has_safetensors else ROOT_NAMES
            blocks = _write_tensors(partial.model, "model", contents.weights, metadata, shown)
            if optimizer is not None:
                blocks |= _write_tensors(partial.state / OPTIMIZER, OPTIMIZER, optimizer.tensors, CONVERTED, shown)
        _copy_sidecars(foreign, sidecars, partial.model)
        write_text(partial.state / TRAINER_STATE, as_json(state))
        _commit(partial, tag, contents.step, blocks)
    except BaseException:
        delete_partial(partial.root)
        release_all()
        with contextlib.suppress(OSError):  # another process has written into one of them
            for folder in created:
                folder.rmdir()
        raise
    finally:
        release_all()
    return Converted(target / tag, contents)


def _missing_folders(path: Path) -> list[Path]:
    """Return a path and its parents as far as they do not exist, the innermost first."""
    path = path.absolute()
    return [each for each in (path, *path.parents) if not exists(each)]


def _nbytes(tensor: StoredTensor) -> int:
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def _optimizer(contents: Contents, sidecars: Path | None) -> _Optimizer | None:
    """Return the optimizer's state by parameter name; raise if it cannot be named, or is that of flat parameters."""
    stored = _with_own_names(contents, sidecars)
    if stored is None:
        return None
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, of_name in stored.state.items():
        weight = contents.weights.get(str(name))
        momentum = of_name.get("exp_avg", of_name.get("momentum_buffer"))
        if weight is not None and isinstance(momentum, StoredTensor) and momentum.shape != weight.shape:
            raise CheckpointError(
                f"cannot convert the optimizer of {contents.foreign.path}: the state of {name} has the shape "
                f"{list(momentum.shape)}, expected {list(weight.shape)}, that of the weight. Save it with "
                "FSDP.optim_state_dict or get_optimizer_state_dict, which write no flattened parameters."
            )
        for key, value in of_name.items():
            if isinstance(value, StoredTensor):
                tensors[f"state.{name}.{key}"] = value
            elif key == "step":  # torch's optimizers expect a tensor, which early versions did not save
                tensors[f"state.{name}.{key}"] = _Number((), torch.float32, float(value))
            elif value is not None:
                values.setdefault(str(name), {})[key] = value
    settings: list[dict[str, Any]] = []
    of_parameter: dict[str, int] = {}
    by_name = stored.settings_by_name()
    for name in dict.fromkeys([*by_name, *map(str, stored.state)]):
        known = {key: plain(value) for key, value in by_name.get(name, {}).items() if key not in _NO_SETTINGS}
        own = {key: as_json_values(value) for key, value in known.items()}
        if own not in settings:
            settings.append(own)
        of_parameter[name] = settings.index(own)
    hyper = {"class": "", "settings": settings, "of_parameter": of_parameter, "values": as_json_values(values)}
    check_json(hyper, "optimizer")
    return _Optimizer(tensors, hyper)


@dataclass(frozen=True, eq=False)
class _Number(StoredTensor):
    """A tensor with one element that is a number in the source."""

    number: float


def _with_own_names(contents: Contents, sidecars: Path | None) -> StoredOptimizer | None:
    """Return the optimizer with the model's own names of parameters.

    The weights of a Hugging Face folder have other names and another order than the model, which the configuration of
    ``sidecars`` or of the folder gives.
    """
    stored = contents.optimizer
    if stored is None or not contents.has_safetensors:
        return named_optimizer(contents)
    folder = sidecars or (contents.folder if contents.folder.is_dir() else contents.folder.parent)
    model = build_known(folder)
    if model is None:
        problem = f"the config.json of {folder} names no class of transformers"
        problem = problem if read_configuration(folder) else f"{folder} has no config.json"
        raise CheckpointError(
            f"cannot convert the optimizer of {contents.foreign.path}: its weights are in safetensors files, and "
            f"{problem}, expected a class, which gives the names and the order of the parameters. Pass --sidecars with "
            "the folder of the model's configuration; or load it with load_ckpt(model, ..., trust=True), and save it "
            "with save_ckpt."
        )
    parameters = [Parameter(name, tuple(p.shape)) for name, p in named_parameters(model).items()]
    named = name_parameters(stored, parameters, contents.foreign.path)
    described = {name: (tensor.shape, tensor.dtype) for name, tensor in contents.weights.items()}
    return named.renamed({old: new for old, new in renames(model, described).items() if old != new})


def _state(contents: Contents, hyper: dict[str, Any] | None) -> dict[str, Any]:
    """Return the content of ``trainer_state.json``."""
    client_state = as_json_values(contents.client_state)
    check_json(client_state, "client_state")
    return {
        "step": contents.step,
        "seed": _SEED,
        "world_size": 1,
        "client_state": client_state,
        "loss_scale": None,
        "left_out": None,
        "scheduler": _schedule(contents) if contents.has_position else None,
        "optimizer": hyper,
        "data": None,
        "versions": {"torch": torch.__version__, "fsdp2_strategy": version("fsdp2_strategy")},
        CONVERTED_FROM: contents.foreign.kind,
    }


def _schedule(contents: Contents) -> dict[str, Any]:
    """Return the state of the schedule; only its position if the source has not all of it, which a load advances to."""
    saved = contents.schedule or {}
    if not saved.keys() >= _SCHEDULE or contents.position != saved["last_epoch"]:
        return {POSITION: contents.position}
    state = {key: value for key, value in saved.items() if not callable(value)}
    if "lr_lambdas" in state:
        state["lr_lambdas"] = [None] * len(state["base_lrs"])
    coded: dict[str, Any] = as_json_values(state)
    check_json(coded, "scheduler")
    return coded


def _write_tensors(
    folder: Path, stem: str, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], progress: Progress
) -> Blocks:
    """Write tensors to the files of a component, a few at a time; return the checksums of all bytes."""
    regions = {name: Region.of(name, each.shape, each.dtype) for name, each in sorted(tensors.items())}
    files = files_for(folder, stem, regions, file_bytes(regions), metadata=metadata)
    folder.mkdir(parents=True)
    create_files(files)
    blocks: Blocks = {file.path: list(blocks_of(file.header)) for file in files}
    entries = {name: entry for file in files for name, entry in file.entries.items()}
    for batch in _batches(regions, tensors):
        values = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in batch.items()}
        for name, each in batch.items():
            if isinstance(each, _Number):
                values[name].fill_(each.number)
        read_into([(t, values[n]) for n, t in batch.items() if not isinstance(t, _Number)], no_dist=True)
        requests = [WriteRequest(entries[n], tuple((0, length) for length in t.shape), t) for n, t in values.items()]
        for path, written in write_all(requests, hashed=True).items():
            blocks[path].extend(written)
        progress.update(sum(tensor.nbytes for tensor in values.values()))
    force_to_disk([file.path for file in files])
    if len(files) > 1:
        write_text(folder / f"{stem}.safetensors.index.json", json.dumps(index_of(files), indent=2) + "\n")
    return blocks


def _batches(names: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Iterator[dict[str, StoredTensor]]:
    batch: dict[str, StoredTensor] = {}
    for name in names:
        batch[name] = tensors[name]
        if sum(map(_nbytes, batch.values())) > sizes.CONVERSION_BYTES:
            yield batch
            batch = {}
    if batch:
        yield batch


def _copy_sidecars(foreign: Foreign, sidecars: Path | None, folder: Path) -> None:
    for path in sidecars_for(foreign, sidecars):
        write_bytes(folder / path.name, path.read_bytes())


def _commit(partial: CheckpointPaths, tag: str, step: int, blocks: Blocks) -> None:
    """Write the random state and the checksums, and commit the checkpoint."""
    seed_everything(derive_seed(_SEED, step, 0, 1))
    rng = partial.rank_file(RNG, 0)
    content = rng_content()
    write_bytes(rng, content)
    blocks[rng] = list(blocks_of(content))
    blocks |= {path: list(blocks_of_file(path)) for path in directory.shared_files(partial) if path not in blocks}
    digest = directory.write_checksums(partial, 0, blocks)
    entries = {"step": step, "protected": False, "metric": None, "higher_is_better": True, "shard_size": 1}
    directory.commit(partial, tag, entries, [digest])
    directory.update_latest(CheckpointPaths.of(partial.root.with_name(tag), "own"))
