"""Export a sharded model to a Hugging Face folder: every rank writes its own ranges into the final files.

Input: a model, sharded or not, and a tokenizer or processor. Output: a folder that ``from_pretrained`` loads.

Every rank computes the same names and offsets. Rank 0 creates the files in a hidden subfolder. All ranks write and
fsync them. Rank 0 adds the index, configuration and tokenizer, and then replaces the files of an earlier export all at
once; see [Note: staged folder] in `staged_folder`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2_strategy import sizes
from fsdp2_strategy.distributed.agreement import all_or_none, check_equal
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import ArgumentError, CheckpointError, counted, did_you_mean, size_text
from fsdp2_strategy.hf.peft.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterFiles
from fsdp2_strategy.hf.peft.merge import Merged, without_adapters
from fsdp2_strategy.hf.round_trip import round_trips
from fsdp2_strategy.hf.save_plan import regions_to_write, tensors_to_write
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.tokenizers import check_tokenizer
from fsdp2_strategy.hf.transformers_models import is_transformers_model, write_configuration
from fsdp2_strategy.hf.weights_folder import write_index
from fsdp2_strategy.model.failed_loads import check_usable
from fsdp2_strategy.model.fsdp_state import class_name, reshard
from fsdp2_strategy.model.ranks import on_model_ranks
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.storage.output_files import File, check_shared_folder, create_files, file_bytes, files_for
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.shares import (
    gathered_write_requests,
    needs_gather,
    own_shares,
    values_of_shares,
    write_requests,
)
from fsdp2_strategy.storage.staged_folder import StagedFolder
from fsdp2_strategy.storage.write import force_to_disk, write_all

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
WriteFiles = Callable[[Path], None]
"""Writes further files of an export to a folder; called on rank 0."""

_KNOWN = ["push_to_hub", "variant", "save_original_format", "is_main_process", "safe_serialization"]
_KNOWN += ["repo_id", "commit_message", "token", "private", "create_pr", "revision"]


@collective
@on_model_ranks
def save_model(
    model: nn.Module,
    tokenizer: Any = None,
    output_dir: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    merge_adapters: bool = True,
    **kwargs: Any,
) -> None:
    """Write a model as a Hugging Face folder that ``from_pretrained`` loads; collective.

    For a transformers model, write its configuration, its generation configuration, and the weights in the Hugging Face
    names and layout; for any other model, write only the weights to ``model.safetensors``. A tensor is gathered only if
    ranks cannot write it in long byte ranges from their shards; such tensors are gathered one at a time. A peft model
    is written as its base model with the active adapters merged; the model itself is not changed.

    Args:
        model: sharded or not, or a wrapper.
        tokenizer: tokenizer or processor to save with the model, or None.
        output_dir: the folder, on a file system that all ranks share; files of an earlier export are replaced. This
            argument is required.
        dtype: dtype of floating-point parameters in the files. By default that of the shards: for
            trained parameters fp32 (twice the space of bf16), unless ``use_mp_opt`` is true.
        max_shard_size: maximum size of a transformers model's files: bytes, or a number with a decimal ("5GB") or
            binary ("5GiB") unit. By default a 32nd of the weights, but at least 256 MiB and at most 5 GB: the ranks
            write several files at the same time, while they would wait for each other to write one.
        merge_adapters: write a peft model as its base model, with adapters merged in the dtype of the base weights. If
            false, write only its adapters, as a folder that ``PeftModel.from_pretrained`` loads.
        **kwargs: arguments of ``save_pretrained``: push_to_hub with repo_id, commit_message, private, token, revision
            and create_pr; variant; save_original_format=False for the model's own names. is_main_process and
            safe_serialization=True have no effect. Other arguments are an error.

    Raises:
        ArgumentError: on every rank: ``output_dir`` is missing or not a path, or the model is not an nn.Module.
        CheckpointError: on every rank: a file cannot be written, the model has no values, an argument is unknown,
            adapters cannot be merged, from_pretrained would not restore the weights, or another export to the folder
            is running. An earlier export stays intact until all new files are on disk; then all of its files are
            replaced at once.
    """
    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "merge_adapters": merge_adapters}
    save_with_further_files(model, tokenizer, output_dir, None, **options, **kwargs)


@collective
@on_model_ranks
def save_with_further_files(
    model: nn.Module,
    tokenizer: Any,
    output_dir: str | Path | None,
    further: WriteFiles | None,
    *,
    max_shard_size: int | str | None = None,
    merge_adapters: bool = True,
    **kwargs: Any,
) -> None:
    """Write a model as `save_model` does, and with ``further`` more files of the same export; collective."""
    with all_or_none("export", ArgumentError):
        _check_output_dir(tokenizer, output_dir)
    assert output_dir is not None
    kwargs["further"] = further
    if not merge_adapters:
        save_adapters(model, tokenizer, output_dir, **kwargs)
    else:
        save_all_weights(model, tokenizer, output_dir, without_adapters, max_shard_size=max_shard_size, **kwargs)


def save_all_weights(
    model: nn.Module,
    tokenizer: Any,
    output_dir: str | Path,
    merge: Callable[[nn.Module], Merged],
    /,  # so that an unknown argument of one of these names is refused as unknown
    *,
    max_shard_size: int | str | None,
    dtype: torch.dtype | None = None,
    further: WriteFiles | None = None,
    **kwargs: Any,
) -> None:
    """Write a model as `save_model` does; ``merge`` is `without_adapters`, or `Merged` to keep adapters; collective."""
    with all_or_none("export", CheckpointError):
        root, staged = _begin(model, tokenizer, output_dir, kwargs)
        name = class_name(root)
        suffix = f".{kwargs['variant']}" if kwargs.get("variant") else ""
        merged = merge(root)
        skeleton = meta_skeleton(merged.model)
        tensors = tensors_to_write(merged.model, skeleton)
        regions = _regions_that_load(skeleton, tensors, dtype, hub_names=kwargs.get("save_original_format", True))
        max_bytes = _default_file_bytes(regions) if max_shard_size is None else _in_bytes(max_shard_size)
        if not is_transformers_model(skeleton):
            max_bytes = sys.maxsize
        files = files_for(staged.path, f"model{suffix}", regions, max_bytes)
    names_and_headers = [(file.name, file.header) for file in files]
    fix = "the same model and arguments on all ranks. Pass the same everywhere."
    check_equal(f"export {name}", names_and_headers, CheckpointError, fix)
    if merged.adapters:
        with all_or_none(f"export {name}", CheckpointError):
            merged.gather()
    with staged:
        _create(name, staged, files)
        _write(name, files, regions, tensors)
        with all_or_none(f"export {name}", CheckpointError):
            if is_rank_0():
                index_name = f"model.safetensors.index{suffix}.json"
                write_index(staged.path, files, index_name)
                write_configuration(staged.path, skeleton, regions)
                _save_tokenizer(staged.path, tokenizer, further)
                staged.publish(_earlier(staged.folder, suffix, index_name))
                _push(staged.folder, skeleton, kwargs)
    size = sum(entry.nbytes for file in files for entry in file.entries.values())
    tensors_written, in_files = counted(len(regions), "tensor"), counted(len(files), "file")
    log("exported %s to %s: %s, %s in %s", name, staged.folder, tensors_written, size_text(size), in_files)


def save_in_one_process(
    model: nn.Module,
    output_dir: Path,
    merge: Callable[[nn.Module], Merged],
    *,
    dtype: torch.dtype | None,
    further: WriteFiles,
) -> None:
    """Write an unsharded model as `save_all_weights` does, without a process group; not collective.

    Args:
        model: tensors may be placeholders, whose values are computed when they are written.
        output_dir: the folder.
        merge: `without_adapters`, or `Merged` to keep adapters.
        dtype: dtype of floating-point tensors in the files; by default that of the model.
        further: writes the other files of the folder, next to the configuration.
    """
    staged = StagedFolder(output_dir)
    merged = merge(model)
    skeleton = meta_skeleton(merged.model)
    tensors = tensors_to_write(merged.model, skeleton)
    regions = _regions_that_load(skeleton, tensors, dtype, hub_names=True)
    files = files_for(staged.path, "model", regions, _default_file_bytes(regions))
    entries = {name: entry for file in files for name, entry in file.entries.items()}
    direct = {name: region for name, region in regions.items() if not needs_gather(region, tensors)}
    merged.gather()
    with staged:
        staged.create(sum(file.nbytes for file in files))
        create_files(files)
        for shares in values_of_shares(own_shares(direct, tensors), tensors):
            write_all(write_requests(shares, entries))
        full: dict[str, torch.Tensor] = {}
        for name in (name for name in regions if name not in direct):
            write_all(gathered_write_requests(regions[name], tensors, full, entries[name]))
        force_to_disk([file.path for file in files])
        write_index(staged.path, files)
        write_configuration(staged.path, skeleton, regions)
        further(staged.path)
        staged.publish()


def _regions_that_load(
    skeleton: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, *, hub_names: bool
) -> dict[str, Region]:
    """Return the regions of the files, with Hugging Face names or, if a load would fail, with the model's own names."""
    for names_of_hub in (True, False) if hub_names else (False,):
        regions = regions_to_write(skeleton, tensors, dtype, hub_names=names_of_hub)
        if round_trips(skeleton, regions, tensors):
            return regions
    raise CheckpointError(
        f"cannot export {type(skeleton).__name__}: from_pretrained would not restore its tensors, because "
        "transformers' conversions on load do not reverse those on save. Save a checkpoint instead: load_ckpt and "
        "load_weights can load it."
    )


def save_adapters(
    model: nn.Module,
    tokenizer: Any,
    output_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    further: WriteFiles | None = None,
    **kwargs: Any,
) -> None:
    """Write the adapters of a peft model as a folder that ``PeftModel.from_pretrained`` loads; collective.

    The content is bitwise equal to that of peft's ``save_pretrained``, including ``modules_to_save`` and biases. The
    adapter "default" is written to the folder itself, any other adapter to a subfolder of its name.
    """
    with all_or_none("export", CheckpointError):
        root, staged = _begin(model, tokenizer, output_dir, kwargs)
        name = class_name(root)
        if kwargs.get("variant") or not kwargs.get("save_original_format", True):
            raise CheckpointError(
                "cannot export adapters: variant or save_original_format=False is given, expected neither. Leave both "
                "out."
            )
    adapters, tensors = AdapterFiles.of(root)
    regions = {adapter: _cast(stored, dtype) for adapter, stored in adapters.regions.items()}
    files = {
        adapter: files_for(adapters.adapter_folder(adapter, staged.path), ADAPTER_WEIGHTS, own, sys.maxsize)
        for adapter, own in regions.items()
    }
    fix = "the same model on all ranks. Pass the same everywhere."
    headers = [file.header for own in files.values() for file in own]
    check_equal(f"export {name}", headers, CheckpointError, fix)
    with staged:
        _create(name, staged, [file for own in files.values() for file in own])
        for adapter, own in regions.items():
            _write(name, files[adapter], own, tensors)
        with all_or_none(f"export {name}", CheckpointError):
            if is_rank_0():
                for adapter in regions:
                    adapters.write_configuration(adapter, adapters.adapter_folder(adapter, staged.path))
                _save_tokenizer(staged.path, tokenizer, further)
                staged.publish()
                _push(staged.folder, adapters.skeleton, kwargs)
    log("exported the adapters of %s to %s: %s", name, staged.folder, ", ".join(adapters.regions))


def _cast(regions: Mapping[str, Region], dtype: torch.dtype | None) -> dict[str, Region]:
    """Return the regions with another dtype of floating-point tensors; unchanged if it is None."""
    return {n: r.to(dtype) if dtype is not None and r.dtype.is_floating_point else r for n, r in regions.items()}


def _create(name: str, staged: StagedFolder, files: Sequence[File]) -> None:
    """Create the hidden subfolder and its files; collective."""
    with all_or_none(f"export {name}", CheckpointError):
        if is_rank_0():
            staged.create(sum(file.nbytes for file in files))
            for folder in {file.path.parent for file in files}:
                folder.mkdir(exist_ok=True)
            create_files(files)


def _write(
    name: str, files: Sequence[File], regions: Mapping[str, Region], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write and fsync files; collective."""
    entries = {entry_name: entry for file in files for entry_name, entry in file.entries.items()}
    direct = {n: r for n, r in regions.items() if not needs_gather(r, tensors)}
    with all_or_none(f"export {name}", CheckpointError):
        check_shared_folder(files)
        for shares in values_of_shares(own_shares(direct, tensors), tensors):
            write_all(write_requests(shares, entries))
    gathered: dict[str, torch.Tensor] = {}
    for tensor_name in (n for n in regions if n not in direct):
        # If one rank failed, the others would wait for it in the next gather. So ranks agree after each tensor.
        with all_or_none(f"export {name}", CheckpointError):
            write_all(gathered_write_requests(regions[tensor_name], tensors, gathered, entries[tensor_name]))
    with all_or_none(f"export {name}", CheckpointError):
        force_to_disk([file.path for file in files])


def _check_output_dir(tokenizer: object, output_dir: object) -> None:
    """Check the folder of `save_model`; a path in the place of the tokenizer is left to `check_tokenizer`."""
    is_path_as_tokenizer = isinstance(tokenizer, str | PathLike)
    if output_dir is None and is_path_as_tokenizer:
        raise ArgumentError(
            f"cannot save the model: the path {str(tokenizer)!r} is given as tokenizer and output_dir is missing, "
            f"expected the path as output_dir. Call save_model(model, output_dir={str(tokenizer)!r})."
        )
    if output_dir is None:
        raise ArgumentError(
            "cannot save the model: output_dir is missing, expected the folder to write. Call save_model(model, "
            "output_dir='out'), or save_model(model, tokenizer, 'out')."
        )
    if not isinstance(output_dir, str | PathLike) and not is_path_as_tokenizer:
        raise ArgumentError(
            f"cannot save the model: output_dir is a {type(output_dir).__name__}, expected a path. Call "
            "save_model(model, tokenizer, 'out'), in this order."
        )


def _begin(
    model: nn.Module, tokenizer: Any, output_dir: str | Path, kwargs: Mapping[str, Any]
) -> tuple[nn.Module, StagedFolder]:
    """Check the arguments of an export, and reshard the model; return it without wrappers, and the folder."""
    root = unwrap_model(model)
    check_usable(root)
    check_tokenizer(root, tokenizer)
    staged = StagedFolder(Path(output_dir).expanduser())
    for name, value in kwargs.items():
        if name not in _KNOWN:
            raise CheckpointError(
                f"cannot export: unknown argument {name!r}, expected one of {', '.join(_KNOWN)}."
                f"{did_you_mean(name, _KNOWN)}"
            )
        if name == "safe_serialization" and not value:
            raise CheckpointError(
                "cannot export: safe_serialization is False, expected True. Leave it out: all files are safetensors."
            )
    reshard(root)
    return root, staged


def _default_file_bytes(regions: Mapping[str, Region]) -> int:
    return file_bytes(regions, sizes.MIN_EXPORT_FILE_LIMIT_BYTES)


def _in_bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise CheckpointError(
            f"cannot export: max_shard_size is {size!r}, expected a number of bytes, or a number with a unit. Pass for "
            "example '5GB'."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _earlier(folder: Path, suffix: str, index_name: str) -> list[str]:
    """Return the names of an earlier export of the same variant: its weights and their index; and those of adapters.

    With ``adapter_config.json``, ``from_pretrained`` would apply adapters to weights that they are merged into.
    """
    pattern = re.compile(rf"model{re.escape(suffix)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    weights = [path.name for path in folder.glob("model*.safetensors") if pattern.fullmatch(path.name)]
    return [index_name, ADAPTER_CONFIG, f"{ADAPTER_WEIGHTS}.safetensors", *weights]


def _save_tokenizer(folder: Path, tokenizer: Any, further: WriteFiles | None) -> None:
    """Save the tokenizer and further files of the export."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if further is not None:
        further(folder)


def _push(folder: Path, skeleton: Any, kwargs: Mapping[str, Any]) -> None:
    """Upload the whole folder to the Hugging Face hub, if requested."""
    if not kwargs.get("push_to_hub"):
        return
    import huggingface_hub  # noqa: PLC0415  a dependency of transformers

    api = huggingface_hub.HfApi(token=kwargs.get("token"))
    repo_id = kwargs.get("repo_id") or folder.name
    api.upload_folder(
        repo_id=api.create_repo(repo_id, private=kwargs.get("private"), exist_ok=True).repo_id,
        folder_path=folder,
        commit_message=kwargs.get("commit_message") or f"Upload {type(skeleton).__name__}",
        revision=kwargs.get("revision"),
        create_pr=bool(kwargs.get("create_pr")),
        ignore_patterns=[".*"],
    )
