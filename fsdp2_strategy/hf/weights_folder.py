"""Find the files that contain a model's weights in a Hugging Face folder, and write their index.

Input: a folder, a file or an index. Output: a `WeightsSource` for `load`: the files, and a meta skeleton of the model
that they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fsdp2_strategy.errors import CheckpointError, shown
from fsdp2_strategy.hf.peft.merge import base_skeleton
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.transformers_models import is_transformers_model
from fsdp2_strategy.model.state import Slot, attach, attached
from fsdp2_strategy.storage.file_reads import read_file
from fsdp2_strategy.storage.json_files import write_text
from fsdp2_strategy.storage.output_files import File, index_of
from fsdp2_strategy.storage.safetensors_format import OWN_NAMES, ROOT_NAMES, Entry, read_header_and_metadata
from fsdp2_strategy.storage.schema import InvalidError, file_name, mapping, parse_json, record, tensor_name

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
INDEX_BYTES = 256 << 20
"""Maximum size of an index: 100,000 tensors take about 10 MB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightsSource:
    """The origin of a model's values: files, and the model that they belong to."""

    model: nn.Module
    """Meta skeleton of the model that the files belong to; its tensors have the requested dtypes."""
    files: tuple[Path, ...]
    index: Path | None = None
    conversions: list[Any] | None = None
    """transformers' weight conversions; None if the files use the model's own names."""
    ignore_mismatched_sizes: bool = False
    where: str = ""
    """The folder or hub id, for messages."""

    def __deepcopy__(self, _memo: object) -> WeightsSource:
        return self  # copies of a module share its origin


_ORIGIN = Slot[tuple[WeightsSource, str]]("origin")
"""A module's origin, and its name in the origin's model. Set on modules that from_pretrained built on meta; deep copies
keep it."""


def remember_origin(model: nn.Module, origin: WeightsSource) -> None:
    """Store the origin on each module of a model, together with the module's name."""
    for name, module in model.named_modules():
        attach(module, _ORIGIN, (origin, name))


def origin_of(module: nn.Module) -> tuple[WeightsSource, str] | None:
    """Return a module's origin, and its name in the origin's model; None if no origin was stored."""
    return attached(module, _ORIGIN)


def open_folder(
    model: nn.Module,
    path: str | Path,
    *,
    has_model_names: bool = False,
    has_adapters: bool = False,
    belongs: Callable[[Path], bool] | None = None,
) -> WeightsSource:
    """Return the origin for a folder, a safetensors file or an index.

    Args:
        model: the model; if it has adapters, the files are those of the model without adapters by default.
        path: the folder, file or index.
        has_model_names: whether the files use the model's own names, including adapters, instead of Hugging Face names.
        has_adapters: whether the files contain the model's adapters in addition to the weights of the base model.
        belongs: whether a file in the folder belongs to it, and was not put there by others.
    """
    path = Path(path).expanduser()
    chosen = path
    if path.is_dir():
        known = [path / name for name in (WEIGHTS, INDEX) if belongs is None or belongs(path / name)]
        chosen = next((file for file in known if file.is_file()), path / WEIGHTS)
    if not chosen.is_file():
        found = f"contains {sorted(p.name for p in path.iterdir())[:8]}" if path.is_dir() else "does not exist"
        raise CheckpointError(
            f"cannot load {path}: it {found}, expected {WEIGHTS} or {INDEX}. Pass the folder of the weights."
        )
    index = chosen if chosen.name.endswith(".index.json") else None
    files = tuple(sorted({chosen.parent / name for name in read_index(index).values()})) if index else (chosen,)
    if has_model_names:
        origin = WeightsSource(model=meta_skeleton(model), files=())
    else:
        origin = source_of_weights(meta_skeleton(model) if has_adapters else base_skeleton(model))
    return replace(origin, files=files, index=index, where=str(path))


def source_of_weights(skeleton: nn.Module) -> WeightsSource:
    """Return an origin for a model's meta skeleton, with its weight conversions but without files."""
    conversions: list[Any] | None = None
    if is_transformers_model(skeleton):
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415

        conversions = list(get_model_conversion_mapping(skeleton))  # type: ignore[arg-type]
    return WeightsSource(model=skeleton, files=(), conversions=conversions)


def folder_of(model: nn.Module) -> Path | None:
    """Return the local folder from which a transformers model was built; None if there is no such folder."""
    if not is_transformers_model(model):
        return None
    origin = origin_of(model)
    source = origin[0].files[0].parent if origin else Path(str(getattr(model, "name_or_path", "") or "nowhere"))
    return source if source.is_dir() else None


def read_index(path: Path) -> dict[str, str]:
    """Read an index, and return the file name of each tensor."""
    try:
        index = parse_json(read_file(path, INDEX_BYTES, follow_link=True), _INDEX)
    except (OSError, InvalidError) as error:
        text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"cannot read {path}: {text}, expected an index. Copy or download it again.") from error
    return dict(index["weight_map"])


def write_index(folder: Path, files: Sequence[File], index_name: str = INDEX) -> None:
    """Write the index of several files; no-op if there is only one."""
    if len(files) > 1:
        write_text(folder / index_name, json.dumps(index_of(files), indent=2) + "\n")


def _plain_name(value: Any) -> None:
    file_name(value)
    if "/" in value:
        raise InvalidError(f"is {shown(value)}, expected the name of a file in the same folder")


_INDEX = record({"weight_map": mapping(tensor_name, _plain_name)})


def has_root_names(folder: Path, belongs: Callable[[Path], bool]) -> bool:
    """Return whether the weights in a folder have the names of the whole model; see `ROOT_NAMES`."""
    file = next(filter(belongs, sorted(folder.glob("model*.safetensors"))), None)
    return file is not None and read_header_and_metadata(file)[1].get("names") == ROOT_NAMES["names"]


def read_headers(origin: WeightsSource) -> tuple[WeightsSource, dict[str, Entry]]:
    """Return the location of each tensor, and the origin: without conversions if files are marked `OWN_NAMES`."""
    index = read_index(origin.index) if origin.index else {}
    if missing := sorted(set(index.values()) - {file.name for file in origin.files}):
        raise CheckpointError(
            f"cannot load {origin.where}: {missing[0]}, which its index lists, is missing, expected all files of the "
            "index. Copy or download the folder again."
        )
    entries: dict[str, Entry] = {}
    for file in origin.files:
        stored, metadata = read_header_and_metadata(file)
        if metadata.get("names") in (OWN_NAMES["names"], ROOT_NAMES["names"]):
            origin = replace(origin, conversions=None)
        for name, entry in stored.items():
            if index.get(name, file.name) == file.name:
                if name in entries:
                    raise CheckpointError(
                        f"cannot load {origin.where}: {name} is in {entries[name].path.name} and in {file.name}, "
                        "expected in one file only. Remove the file that does not belong to this model."
                    )
                entries[name] = entry
    if lost := [name for name in index if name not in entries]:
        raise CheckpointError(
            f"cannot load {origin.where}: {index[lost[0]]} lacks {lost[0]}, expected all tensors that the "
            f"index lists ({len(lost)} are missing). Copy or download the folder again."
        )
    return origin, entries
