"""A sharded model -> a Hugging Face folder: every rank writes its own ranges into the final files.

Input: a model, sharded or not, and a tokenizer or processor. Output: a folder that ``from_pretrained`` loads.

Order of work: names and offsets, which every rank computes alike -> rank 0 makes the files, under names that nothing
loads -> all ranks write and force to disk -> rank 0 renames, and adds index, configuration and tokenizer.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.errors import CheckpointError, did_you_mean
from fsdp2_strategy.hf.container import Entry, lay_out, total_bytes
from fsdp2_strategy.hf.conversions import hub_regions
from fsdp2_strategy.hf.folder import is_transformers_model
from fsdp2_strategy.hf.region import Computed, Region, assemble, sources_of
from fsdp2_strategy.hf.twin import original_class, twin
from fsdp2_strategy.hf.write import Job, force_to_disk, write_all
from fsdp2_strategy.names import named_parameters, persistent_buffers
from fsdp2_strategy.ranks import agree, all_or_none, is_rank_0, log
from fsdp2_strategy.residency import local_box, reshard, unwrap_model

_SHORTEST_RUN_BYTES = 4096
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_TO_HUB = ("repo_id", "commit_message", "token", "private", "create_pr", "revision")
_KNOWN = ("push_to_hub", "variant", "save_original_format", "is_main_process", "safe_serialization", *_TO_HUB)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What of ``save_pretrained``'s arguments means something here."""

    push_to_hub: bool
    variant: str | None
    save_original_format: bool
    to_hub: dict[str, Any]


def save_model(
    model: nn.Module,
    tokenizer: Any,
    output_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    **kwargs: Any,
) -> None:
    """Write a model as a Hugging Face folder that ``from_pretrained`` loads; collective.

    A transformers model gets its configuration, its generation configuration and the hub's names and arrangement of
    weights. Any other model gets ``model.safetensors`` and nothing else. No rank gathers more than one parameter, and
    that only where the hub's arrangement is a permutation of the model's.

    Args:
        model: sharded or not, or a wrapper.
        tokenizer: tokenizer or processor to save along, or None.
        output_dir: the folder, seen by every rank; files of an earlier export are replaced.
        dtype: of the floating parameters in the files. By default that of the shards: after training the fp32 masters,
            about twice the size of bf16, and nothing lost.
        max_shard_size: bytes of one file of a transformers model, or a number with a unit of 10^3 ("5GB") or 2^10
            ("5GiB").
        **kwargs: of ``save_pretrained``: push_to_hub with repo_id, commit_message, private, token, revision and
            create_pr; variant; save_original_format=False for the model's own names. Others are an error.

    Raises:
        CheckpointError: on every rank: a file cannot be written, the model has no values, or an argument is unknown. An
            earlier export is then still there, unless the final renaming failed: then nothing loads, and no mix.
    """
    with all_or_none("export", CheckpointError):
        root = unwrap_model(model)
        name = original_class(root).__name__
        folder = Path(output_dir)
        options = _options(kwargs)
        reshard(root)
        copied = twin(root)
        tensors = _tensors(root, copied)
        regions = _regions(copied, tensors, dtype, options)
        most_bytes = _in_bytes(max_shard_size)
        if not is_transformers_model(copied):
            most_bytes = sum(region.numel() * region.dtype.itemsize for region in regions.values())
        files = _files(folder, regions, most_bytes, options.variant)
    facts = [(f.final.name, f.header) for f in files]
    agree(f"export {name}", facts, CheckpointError, "the same model and arguments everywhere. Call it alike.")
    with all_or_none(f"export {name}", CheckpointError):
        if is_rank_0():
            _create(folder, files)
    entries = {entry_name: entry for file in files for entry_name, entry in file.entries.items()}
    direct = {n: r for n, r in regions.items() if _is_direct(r, tensors)}
    with all_or_none(f"export {name}", CheckpointError):
        write_all(list(_own_jobs(direct, tensors, entries)))
    gathered: dict[str, torch.Tensor] = {}
    for tensor_name in (n for n in regions if n not in direct):
        # A phase each: the next gather needs every rank.
        with all_or_none(f"export {name}", CheckpointError):
            write_all([_gathered_job(regions[tensor_name], tensors, gathered, entries[tensor_name])])
    with all_or_none(f"export {name}", CheckpointError):
        force_to_disk([file.partial for file in files])
    with all_or_none(f"export {name}", CheckpointError):
        if is_rank_0():
            _publish(folder, files, options.variant)
            _write_configuration(folder, copied, regions)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            if options.push_to_hub:
                _push(folder, copied, options.to_hub)
    size = sum(entry.nbytes for entry in entries.values())
    log("exported %s to %s: %d tensors, %.2f GB in %d files", name, folder, len(entries), size / 1e9, len(files))


def _options(kwargs: Mapping[str, Any]) -> _Options:
    """Take the arguments of ``save_pretrained`` apart.

    Raises:
        CheckpointError: one is unknown, or asks for what an export is not.
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


def _tensors(root: nn.Module, copied: Any) -> dict[str, torch.Tensor]:
    """Return the tensors to write, each once, under the name that loading expects for tied ones."""
    if not is_transformers_model(copied):
        found = {**named_parameters(root), **persistent_buffers(root)}
    else:
        from transformers.modeling_utils import remove_tied_weights_from_state_dict  # noqa: PLC0415

        state = copied.state_dict()
        for name in copied._keys_to_ignore_on_save or ():
            state.pop(name, None)
        real = root.state_dict(keep_vars=True)
        found = {name: real[name] for name in remove_tied_weights_from_state_dict(state, copied)}
    if lost := [name for name, tensor in found.items() if tensor.is_meta]:
        raise CheckpointError(
            f"cannot export: {lost[0]} and {len(lost) - 1} others are on the meta device, expected values. Prepare the "
            "model, or load its weights, first."
        )
    return {name: tensor.detach() for name, tensor in found.items()}


def _regions(
    copied: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, options: _Options
) -> dict[str, Region]:
    """Describe what goes to the files, by its name there."""
    transformers_model = is_transformers_model(copied)
    if transformers_model and options.save_original_format:
        regions = hub_regions(copied, tensors)
    else:
        regions = {name: Region.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if dtype is None:
        return regions
    kept = copied._get_dtype_plan(dtype) if transformers_model else {}
    parameters = {name for name, _ in copied.named_parameters(remove_duplicate=False)}
    written = {}
    for name, region in regions.items():
        sources = sources_of(region)
        wider = [kept[pattern] for pattern in kept for source in sources if re.search(pattern, source)]
        cast = region.dtype.is_floating_point and all(source in parameters for source in sources)
        written[name] = region.to(wider[0] if wider else dtype) if cast else region
    return written


@dataclass(frozen=True)
class _File:
    """One file to be written."""

    partial: Path
    """Its name until all of it is on disk."""
    final: Path
    header: bytes
    entries: dict[str, Entry]


def _files(folder: Path, regions: Mapping[str, Region], most_bytes: int, variant: str | None) -> list[_File]:
    """Fill files up to the limit in the order of names; a tensor above it gets a file of its own."""
    groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, region in regions.items():
        nbytes = region.numel() * region.dtype.itemsize
        if groups[-1] and size + nbytes > most_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = (region.dtype, tuple(region.shape))
        size += nbytes
    files = []
    for i, group in enumerate(groups, 1):
        number = f"-{i:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        final = folder / f"model{_suffix(variant)}{number}.safetensors"
        partial = final.with_name(f".{final.name}.partial")
        files.append(_File(partial, final, *lay_out(partial, group, {"format": "pt"})))
    return files


def _suffix(variant: str | None) -> str:
    return f".{variant}" if variant else ""


def _in_bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise CheckpointError(
            f"cannot export: max_shard_size is {size!r}, expected bytes or a number with a unit. Use '5GB', say."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _create(folder: Path, files: Sequence[_File]) -> None:
    """Make the files in their full length, with their headers; what an export left behind that did not end goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".model*.safetensors.partial"):
        leftover.unlink()
    for file in files:
        with file.partial.open("wb") as new:
            new.write(file.header)
            new.flush()
            # A full disk shows here, on one rank, before anybody writes.
            os.posix_fallocate(new.fileno(), 0, total_bytes(file.header, file.entries.values()))


def _is_direct(region: Region, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Say whether ranks can write their shards' parts of a region as they are, in runs that are not tiny."""
    for piece in region.pieces:
        if isinstance(piece.source, Computed) or not _is_in_rows(tensors[piece.source]):
            return False
        strides = [s for s, n in zip(piece.strides, piece.shape, strict=True) if n > 1]
        run = region.dtype.itemsize
        for length, whole in zip(reversed(piece.shape), reversed(region.shape), strict=True):
            run *= length
            if length != whole:
                break
        in_order = strides == sorted(strides, reverse=True)
        if not in_order or run < min(_SHORTEST_RUN_BYTES, math.prod(piece.shape) * region.dtype.itemsize):
            return False
    return True


def _is_in_rows(tensor: torch.Tensor) -> bool:
    """Say whether a rank's shard is rows of the whole, one range of its elements."""
    if not isinstance(tensor, DTensor):
        return True
    return all(p.is_replicate() or (p.is_shard() and p.dim == 0) for p in tensor.placements)  # type: ignore[attr-defined]


def _own_jobs(
    regions: Mapping[str, Region], tensors: Mapping[str, torch.Tensor], entries: Mapping[str, Entry]
) -> Iterator[Job]:
    """Return what this rank writes of the regions: its shards' parts, shared fairly among replicas."""
    ranges = {name: _range_of(tensor) for name, tensor in tensors.items()}
    total = sum(region.numel() for region in regions.values())
    before = 0
    for name, region in regions.items():
        share = before / max(1, total)
        before += region.numel()
        for piece in region.pieces:
            low, high, replica, replicas = ranges[piece.source]
            if int(share * replicas) != replica:
                continue
            local = tensors[piece.source]
            flat = (local.to_local() if isinstance(local, DTensor) else local).reshape(-1)
            for part in piece.clip(low, high):
                view = flat.as_strided(part.shape, part.strides, flat.storage_offset() + part.offset - low)
                box = tuple(zip(part.start, part.shape, strict=True))
                yield Job(entries[name], box, view)


def _range_of(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Return which elements of a tensor this rank holds, and which of how many replicas it is."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.numel(), dist.get_rank(), dist.get_world_size()
    (begin, rows), *_ = local_box(tensor)
    row = math.prod(tensor.shape[1:])
    replica, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(axis)
            replica, replicas = replica * size + tensor.device_mesh.get_local_rank(axis), replicas * size
    return begin * row, (begin + rows) * row, replica, replicas


def _gathered_job(
    region: Region, tensors: Mapping[str, torch.Tensor], gathered: dict[str, torch.Tensor], entry: Entry
) -> Job:
    """Return what this rank writes of a region that is gathered: an equal part of the whole; collective.

    Args:
        region: what to write.
        tensors: the sources.
        gathered: whole sources of the region before; kept where this one needs them, since several come from one.
        entry: where it goes.
    """
    needed = sources_of(region)
    for source in [source for source in gathered if source not in needed]:
        del gathered[source]
    for source in needed:
        if source not in gathered:
            tensor = tensors[source]
            gathered[source] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()
    stored = Region(region.shape, tensors[needed[0]].dtype, region.pieces)
    flat = assemble(stored, gathered.__getitem__).reshape(-1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    begin, end = rank * len(flat) // ranks, (rank + 1) * len(flat) // ranks
    line = Entry(entry.name, entry.path, entry.offset, entry.dtype, (len(flat),))
    return Job(line, ((begin, end - begin),), flat[begin:end])


def _publish(folder: Path, files: Sequence[_File], variant: str | None) -> None:
    """Remove what an earlier export had more, give the files their names, then the index.

    Until the index is there, several files do not load: a failure on the way leaves no mix of two exports that does.
    """
    names = {file.final.name for file in files}
    suffix = _suffix(variant)
    index = folder / f"model.safetensors.index{suffix}.json"
    index.unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        ours = re.fullmatch(rf"model{re.escape(suffix)}(-\d{{5}}-of-\d{{5}})?\.safetensors", old.name)
        if ours and old.name not in names:
            old.unlink()
    for file in files:
        file.partial.rename(file.final)
    if len(files) > 1:
        entries = [(name, entry, file) for file in files for name, entry in file.entries.items()]
        content = {
            "metadata": {
                "total_parameters": sum(math.prod(entry.shape) for _, entry, _ in entries),
                "total_size": sum(entry.nbytes for _, entry, _ in entries),
            },
            "weight_map": {name: file.final.name for name, _, file in sorted(entries, key=lambda e: e[0])},
        }
        partial = index.with_name(f".{index.name}.partial")
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.rename(index)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write_configuration(folder: Path, copied: Any, regions: Mapping[str, Region]) -> None:
    if not is_transformers_model(copied):
        return
    config = copy.deepcopy(copied.config)
    floating = [region.dtype for region in regions.values() if region.dtype.is_floating_point]
    config.dtype = str(floating[0]).removeprefix("torch.") if floating else config.dtype
    config.architectures = [type(copied).__name__]
    if copied.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save  # noqa: PLC0415

        custom_object_save(copied, folder, config=config)
    config.save_pretrained(folder)
    if copied.can_generate():
        copied.generation_config.save_pretrained(folder)


def _push(folder: Path, copied: Any, options: Mapping[str, Any]) -> None:
    """Upload the folder to the hub, as ``save_pretrained`` does after writing."""
    import huggingface_hub  # noqa: PLC0415  transformers brings it

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
