"""Export a sharded model to a Hugging Face folder: every rank writes its own ranges into the final files.

Input: a model, sharded or not, and a tokenizer or processor. Output: a folder that ``from_pretrained`` loads.

Every rank computes the same names and offsets. Rank 0 creates the files under temporary names that nothing loads. All
ranks write and fsync them. Rank 0 renames them, and writes the index, configuration and tokenizer.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.agreement import agree, all_or_none
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError, did_you_mean
from fsdp2_strategy.hf.peft.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterFiles
from fsdp2_strategy.hf.peft.merge import without_adapters
from fsdp2_strategy.hf.regions import Region
from fsdp2_strategy.hf.round_trip import round_trips
from fsdp2_strategy.hf.save_plan import (
    File,
    check_free,
    check_shared,
    create,
    files_for,
    gathered_jobs,
    index_of,
    is_direct,
    jobs_of,
    own_shares,
    regions_to_write,
    tensors_to_write,
    values_of_shares,
    write_configuration,
)
from fsdp2_strategy.hf.skeleton import original_class, twin
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.hf.write import force_to_disk, write_all
from fsdp2_strategy.model.failed_loads import check_usable
from fsdp2_strategy.model.fsdp_state import reshard
from fsdp2_strategy.model.ranks import on_its_ranks
from fsdp2_strategy.model.wrappers import unwrap_model

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_TO_HUB = ("repo_id", "commit_message", "token", "private", "create_pr", "revision")
_KNOWN = ("push_to_hub", "variant", "save_original_format", "is_main_process", "safe_serialization", *_TO_HUB)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The arguments of ``save_pretrained`` that have an effect here."""

    push_to_hub: bool
    variant: str | None
    save_original_format: bool
    to_hub: dict[str, Any]


@on_its_ranks
def save_model(
    model: nn.Module,
    tokenizer: Any,
    output_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    merge_adapters: bool = True,
    **kwargs: Any,
) -> None:
    """Write a model as a Hugging Face folder that ``from_pretrained`` loads; collective.

    For a transformers model, write its configuration, its generation configuration, and the weights in the Hugging Face
    names and layout; for any other model, write only the weights to ``model.safetensors``. Parameters are gathered one
    tensor at a time, and only if shards are not long byte ranges of the files. A peft model is written as its base
    model with the active adapters merged; the model itself is not changed.

    Args:
        model: sharded or not, or a wrapper.
        tokenizer: tokenizer or processor to save with the model, or None.
        output_dir: the folder, on a file system that all ranks share; files of an earlier export are replaced.
        dtype: dtype of floating-point parameters in the files. By default that of the shards: after training the fp32
            master weights, which need twice the space of bf16 and lose nothing.
        max_shard_size: maximum size of a transformers model's files: bytes, or a number with a unit of 10^3 ("5GB") or
            2^10 ("5GiB").
        merge_adapters: write a peft model as its base model, with adapters merged in the dtype of the base weights. If
            false, write only its adapters, as a folder that ``PeftModel.from_pretrained`` loads.
        **kwargs: arguments of ``save_pretrained``: push_to_hub with repo_id, commit_message, private, token, revision
            and create_pr; variant; save_original_format=False for the model's own names. Others are an error.

    Raises:
        CheckpointError: on every rank: a file cannot be written, the model has no values, an argument is unknown,
            adapters cannot be merged, or from_pretrained would not restore the weights. An earlier export stays intact
            until the new files are renamed. If renaming fails, the folder does not load as a mix of both.
    """
    if not merge_adapters:
        save_adapters(model, tokenizer, output_dir, dtype=dtype, **kwargs)
        return
    with all_or_none("export", CheckpointError):
        root = unwrap_model(model)
        check_usable(root)
        name = original_class(root).__name__
        folder = Path(output_dir)
        options = _options(kwargs)
        reshard(root)
        merged = without_adapters(root)
        copied = twin(merged.model)
        tensors = tensors_to_write(merged.model, copied)
        regions = _regions_that_load(copied, tensors, dtype, hub_names=options.save_original_format)
        most_bytes = _in_bytes(max_shard_size)
        if not is_transformers_model(copied):
            most_bytes = sum(region.numel() * region.dtype.itemsize for region in regions.values())
        stem = f"model{_suffix(options.variant)}"
        files = files_for(folder, stem, regions, most_bytes, partial=True)
    facts = [(f.name, f.header) for f in files]
    agree(f"export {name}", facts, CheckpointError, "the same model and arguments everywhere. Call it alike.")
    if merged.adapters:
        with all_or_none(f"export {name}", CheckpointError):
            merged.gather()
    _write(name, folder, files, regions, tensors)
    with all_or_none(f"export {name}", CheckpointError):
        if is_rank_0():
            _publish(folder, files, options.variant)
            write_configuration(folder, copied, regions)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            if options.push_to_hub:
                _push(folder, copied, options.to_hub)
    size = sum(entry.nbytes for file in files for entry in file.entries.values())
    log("exported %s to %s: %d tensors, %.2f GB in %d files", name, folder, len(regions), size / 1e9, len(files))


def _regions_that_load(
    copied: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, *, hub_names: bool
) -> dict[str, Region]:
    """Describe the tensors in the files, under Hugging Face names, or under the model's own if only those load.

    Raises:
        CheckpointError: neither loads.
    """
    for names_of_hub in (True, False) if hub_names else (False,):
        regions = regions_to_write(copied, tensors, dtype, hub_names=names_of_hub)
        if round_trips(copied, regions, tensors):
            return regions
    raise CheckpointError(
        f"cannot export {type(copied).__name__}: from_pretrained would not give its tensors back, since transformers' "
        "conversions on save and on load are not inverse. Save a checkpoint, which load_ckpt and load_weights open."
    )


def save_adapters(
    model: nn.Module, tokenizer: Any, output_dir: str | Path, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> None:
    """Write the adapters of a peft model as a folder that ``PeftModel.from_pretrained`` loads; collective.

    The content is bitwise equal to that of peft's ``save_pretrained``: for each adapter its configuration and its
    tensors, including ``modules_to_save`` and biases. The adapter "default" is written to the folder itself, any other
    adapter to a subfolder of its name. Every rank writes its own ranges.

    Args:
        model: sharded or not, or a wrapper.
        tokenizer: tokenizer or processor to save with the adapters, or None.
        output_dir: the folder, on a file system that all ranks share; files of an earlier export are replaced.
        dtype: dtype of floating-point parameters in the files; by default that of the shards, the fp32 master weights.
        **kwargs: push_to_hub and its arguments; see `save_model`.

    Raises:
        CheckpointError: on every rank: the model has no adapters, or trains other parameters; or see `save_model`.
    """
    with all_or_none("export", CheckpointError):
        root = unwrap_model(model)
        check_usable(root)
        what = original_class(root).__name__
        folder = Path(output_dir)
        options = _options(kwargs)
        if options.variant or not options.save_original_format:
            raise CheckpointError(
                "cannot export adapters: variant or save_original_format is given, expected neither. Leave them out."
            )
        reshard(root)
    adapters, tensors = AdapterFiles.of(root)
    for adapter, whole in adapters.regions.items():
        own = adapters.folder_of(adapter, folder)
        regions = dict(whole)
        if dtype is not None:
            regions = {key: r.to(dtype) if r.dtype.is_floating_point else r for key, r in regions.items()}
        files = files_for(own, ADAPTER_WEIGHTS, regions, sys.maxsize, partial=True)
        agree(f"export {what}", [f.header for f in files], CheckpointError, "the same model everywhere. Call it alike.")
        _write(what, own, files, regions, tensors)
        with all_or_none(f"export {what}", CheckpointError):
            if is_rank_0():
                (own / ADAPTER_CONFIG).unlink(missing_ok=True)  # without it the folder does not load
                for file in files:
                    file.path.rename(own / file.name)
                adapters.write_configuration(adapter, own)
    with all_or_none(f"export {what}", CheckpointError):
        if is_rank_0():
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            if options.push_to_hub:
                _push(folder, adapters.copied, options.to_hub)
    log("exported the adapters of %s to %s: %s", what, folder, ", ".join(adapters.regions))


def _write(
    name: str,
    folder: Path,
    files: Sequence[File],
    regions: Mapping[str, Region],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write files under their temporary names; collective."""
    with all_or_none(f"export {name}", CheckpointError):
        if is_rank_0():
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".*model*.safetensors.partial"):  # of an interrupted export
                leftover.unlink()
            check_free(folder, sum(file.nbytes for file in files))
            create(files)
    entries = {entry_name: entry for file in files for entry_name, entry in file.entries.items()}
    direct = {n: r for n, r in regions.items() if is_direct(r, tensors)}
    with all_or_none(f"export {name}", CheckpointError):
        check_shared(files)
        for shares in values_of_shares(own_shares(direct, tensors), tensors):
            write_all(jobs_of(shares, entries))
    gathered: dict[str, torch.Tensor] = {}
    for tensor_name in (n for n in regions if n not in direct):
        # One phase per tensor: the next gather needs every rank.
        with all_or_none(f"export {name}", CheckpointError):
            write_all(gathered_jobs(regions[tensor_name], tensors, gathered, entries[tensor_name]))
    with all_or_none(f"export {name}", CheckpointError):
        force_to_disk([file.path for file in files])


def _options(kwargs: Mapping[str, Any]) -> _Options:
    """Check the arguments of ``save_pretrained``, and return those that have an effect.

    Raises:
        CheckpointError: an argument is unknown, or asks for another format than safetensors.
    """
    for name, value in kwargs.items():
        if name not in _KNOWN:
            raise CheckpointError(
                f"cannot export: unknown argument {name!r}, expected one of {', '.join(_KNOWN)}."
                f"{did_you_mean(name, _KNOWN)}"
            )
        if name == "safe_serialization" and not value:
            raise CheckpointError("cannot export: safe_serialization is False, expected safetensors. Leave it out.")
    to_hub = {name: kwargs[name] for name in _TO_HUB if kwargs.get(name) is not None}
    return _Options(
        push_to_hub=bool(kwargs.get("push_to_hub")),
        variant=kwargs.get("variant"),
        save_original_format=kwargs.get("save_original_format", True),
        to_hub=to_hub,
    )


def _in_bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise CheckpointError(
            f"cannot export: max_shard_size is {size!r}, expected bytes or a number with a unit. Use '5GB', say."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _suffix(variant: str | None) -> str:
    return f".{variant}" if variant else ""


def _publish(folder: Path, files: Sequence[File], variant: str | None) -> None:
    """Remove stale files of an earlier export, rename the new files to their final names, then write the index.

    Several files do not load without the index. So a failure before the end leaves no loadable mix of two exports.
    """
    names = {file.name for file in files}
    suffix = _suffix(variant)
    index = folder / f"model.safetensors.index{suffix}.json"
    index.unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        ours = re.fullmatch(rf"model{re.escape(suffix)}(-\d{{5}}-of-\d{{5}})?\.safetensors", old.name)
        if ours and old.name not in names:
            old.unlink()
    for file in files:
        file.path.rename(folder / file.name)
    if len(files) > 1:
        partial = index.with_name(f".{index.name}.partial")
        partial.write_text(json.dumps(index_of(files), indent=2) + "\n")
        partial.rename(index)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _push(folder: Path, copied: Any, options: Mapping[str, Any]) -> None:
    """Upload the folder to the Hugging Face hub, as ``save_pretrained`` does."""
    import huggingface_hub  # noqa: PLC0415  a dependency of transformers

    api = huggingface_hub.HfApi(token=options.get("token"))
    repo = api.create_repo(options.get("repo_id", folder.name), private=options.get("private"), exist_ok=True).repo_id
    api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        commit_message=options.get("commit_message") or f"Upload {type(copied).__name__}",
        revision=options.get("revision"),
        create_pr=options.get("create_pr", False),
        ignore_patterns=[".*"],
    )
