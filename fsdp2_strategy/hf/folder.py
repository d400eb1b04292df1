"""Hugging Face folders: which files hold a model's weights, and models built on meta that remember their folder.

Input: a folder, or calls of ``from_pretrained`` inside `init_on_meta`. Output: models on meta, and for each of their
modules the `Origin` that `load` reads: the files, and the twin whose names the files speak.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.container import OWN_NAMES, Entry, read_header_and_metadata
from fsdp2_strategy.hf.meta.recorded_init import Tape, is_recording, recording
from fsdp2_strategy.hf.meta.skeleton import twin
from fsdp2_strategy.hf.peft.merge import bare_twin

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Origin:
    """Where the values of a model come from."""

    model: nn.Module
    """Twin of the model that the files belong to: its names, and the dtypes that it asked for."""
    files: tuple[Path, ...]
    index: Path | None = None
    """The index that lists the files, where there is one."""
    conversions: list[Any] | None = None
    """transformers' weight conversions; None where the model is not a transformers model."""
    ignore_mismatched_sizes: bool = False
    where: str = ""
    """The folder or hub id, for messages."""

    def __deepcopy__(self, _memo: object) -> Origin:
        return self  # a copied module has the same origin


# Attribute of each module of a model that was built by from_pretrained on meta: copies of the module have it, too.
_ORIGIN = "_values_in_files"


def origin_of(module: nn.Module) -> tuple[Origin, str] | None:
    """Return where a module's values are to come from, and the module's name there; None where nobody said."""
    origin: tuple[Origin, str] | None = module.__dict__.get(_ORIGIN)
    return origin


@contextmanager
def init_on_meta() -> Iterator[None]:
    """Build models inside without memory or reading: parameters and buffers are on the meta device; not collective.

    Constructors and ``from_config`` build on meta. ``from_pretrained`` reads the configuration only; dtype,
    attn_implementation and the like mean what they always do, and each module remembers the folder. `load_weights`,
    which ``prepare_model`` calls, gives the values later, to each rank those of its shard.

    Raises:
        CheckpointError: from ``from_pretrained``, where a folder has no safetensors files, or quantised ones.
    """
    if is_recording():
        yield  # nested: the outer block does it all
        return
    with ExitStack() as stack:
        tape = stack.enter_context(recording())
        for target, name, value in _stand_ins(tape):
            stack.enter_context(patch.object(target, name, value))
        from transformers import initialization  # noqa: PLC0415  models that need no transformers need not import it

        stack.enter_context(initialization.meta_device_safe_creation_ops())
        yield


def _stand_ins(tape: Tape) -> list[tuple[Any, str, Any]]:
    """Return what stands in for the three steps of from_pretrained that would touch values, and for init_weights.

    The last does what it always did, and tells the tape that transformers is done with a model.
    """
    from transformers import modeling_utils  # noqa: PLC0415

    def no_device_map(device_map: Any) -> None:
        """Accept any: where parameters lie is the mesh's affair."""

    def remember(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> tuple[Any, None]:
        if expected_keys is not None:
            raise CheckpointError(
                f"cannot build {type(model).__name__} on meta: an adapter is to be loaded into it, expected a model's "
                "own weights. Build it outside of init_on_meta."
            )
        if state_dict is not None:
            raise CheckpointError(
                f"cannot build {type(model).__name__} on meta: from_pretrained was given a state_dict, expected a "
                "folder or hub id. Build it outside of init_on_meta."
            )
        keep_dtypes(model, load_config.dtype_plan)
        with tape.paused():
            _remember(model, checkpoint_files, load_config)
        return _nothing_loaded(), None

    def tie(model: Any, _load_config: Any, loading_info: Any) -> Any:
        model.tie_weights(recompute_mapping=False)
        tape.settle(model, in_files=True)
        return loading_info

    def initialize(model: Any) -> None:
        init_weights(model)  # type: ignore[no-untyped-call]
        tape.settle(model)

    pretrained = modeling_utils.PreTrainedModel
    init_weights = pretrained.init_weights
    return [
        (modeling_utils, "check_and_set_device_map", no_device_map),
        (pretrained, "_load_pretrained_model", staticmethod(remember)),
        (pretrained, "_finalize_model_loading", staticmethod(tie)),
        (pretrained, "init_weights", initialize),
    ]


def _nothing_loaded() -> Any:
    from transformers.utils.loading_report import LoadStateDictInfo  # noqa: PLC0415

    empty: dict[str, Any] = {"conversion_errors": {}, "error_msgs": []}
    return LoadStateDictInfo(**{f.name: empty.get(f.name, set()) for f in fields(LoadStateDictInfo)})


def keep_dtypes(model: nn.Module, plan: Mapping[str, torch.dtype] | None) -> None:
    """Give the parameters that the model keeps in another dtype that dtype, as loading would."""
    from transformers.core_model_loading import build_glob_alternation  # noqa: PLC0415

    if not plan:
        return
    pattern, groups, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if match := pattern.search(name):
            tensor.data = tensor.data.to(plan[groups[match.lastgroup or ""]])


def _remember(model: Any, checkpoint_files: Any, load_config: Any) -> None:
    where = str(load_config.pretrained_model_name_or_path)
    if load_config.hf_quantizer is not None:
        raise CheckpointError(
            f"cannot build {type(model).__name__} on meta: {where} is quantised, expected plain weights. Build it "
            "outside of init_on_meta, or name an unquantised folder."
        )
    files = tuple(map(Path, checkpoint_files or ()))
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise CheckpointError(
            f"cannot build {type(model).__name__} on meta: {where} holds {[f.name for f in files]}, expected "
            "safetensors files. Convert it with from_pretrained and save_pretrained."
        )
    _empty(model)
    origin = Origin(
        model=twin(model),
        files=files,
        index=_index_of(files[0]),
        conversions=load_config.weight_mapping,
        ignore_mismatched_sizes=load_config.ignore_mismatched_sizes,
        where=where,
    )
    for name, module in model.named_modules():
        module.__dict__[_ORIGIN] = (origin, name)


def _empty(model: nn.Module) -> None:
    """Bring to meta what files hold and constructors made elsewhere: ``torch.FloatTensor`` knows no default device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


def _index_of(file: Path) -> Path | None:
    """Return the index that lists a file, by the hub's naming: model[.variant]-00001-of-00002.safetensors."""
    match = re.fullmatch(r"model(\..+)?-\d+-of-\d+\.safetensors", file.name)
    index = file.with_name(f"model.safetensors.index{match[1] or ''}.json") if match else None
    return index if index is not None and index.is_file() else None


def open_folder(model: nn.Module, path: str | Path, *, own_names: bool = False) -> Origin:
    """Say that a model's values come from a folder, or from one safetensors file or index.

    Args:
        model: the model; where it has adapters, the files are those of the model without.
        path: the folder, file or index.
        own_names: the files have the model's own names, adapters included, and not the hub's.

    Raises:
        CheckpointError: there is no such folder, or none of the files that it should hold.
    """
    path = Path(path)
    chosen = path
    if path.is_dir():
        chosen = next((path / name for name in (WEIGHTS, INDEX) if (path / name).is_file()), path / WEIGHTS)
    if not chosen.is_file():
        held = sorted(p.name for p in path.iterdir())[:8] if path.is_dir() else "nothing"
        raise CheckpointError(
            f"cannot load {path}: it holds {held}, expected {WEIGHTS} or {INDEX}. Name the folder that holds the "
            "weights."
        )
    is_index = chosen.name.endswith(".index.json")
    files = tuple(sorted({chosen.parent / name for name in read_index(chosen).values()})) if is_index else (chosen,)
    origin = Origin(model=twin(model), files=()) if own_names else origin_for(bare_twin(model))
    return replace(origin, files=files, index=chosen if is_index else None, where=str(path))


def origin_for(copied: nn.Module) -> Origin:
    """Return an origin without files for a twin of a model."""
    return Origin(model=copied, files=(), conversions=_conversions(copied))


def _conversions(model: Any) -> list[Any] | None:
    if not is_transformers_model(model):
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415

    return list(get_model_conversion_mapping(model))


def is_transformers_model(model: nn.Module) -> bool:
    """Say whether a module is a model of transformers."""
    if not hasattr(model, "config"):
        return False
    from transformers import PreTrainedModel  # noqa: PLC0415

    return isinstance(model, PreTrainedModel)


def inner_model(root: nn.Module) -> nn.Module:
    """Return the one transformers model within a wrapper; the model itself where there is none, or several."""
    models = list(outermost_models(root).values())
    return models[0] if len(models) == 1 else root


def outermost_models(root: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the outermost transformers models within a module, itself among them, by their dotted names there."""
    if is_transformers_model(root):
        return {name: root}
    found: dict[str, nn.Module] = {}
    for child_name, child in root.named_children():
        found |= outermost_models(child, f"{name}.{child_name}" if name else child_name)
    return found


def folder_of(model: nn.Module) -> Path | None:
    """Return the folder that a transformers model came from, where it is there."""
    if not is_transformers_model(model):
        return None
    origin = origin_of(model)
    source = origin[0].files[0].parent if origin else Path(str(getattr(model, "name_or_path", "") or "nowhere"))
    return source if source.is_dir() else None


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of every tensor that an index lists.

    Raises:
        CheckpointError: it cannot be read, or is no index.
    """
    try:
        index = json.loads(path.read_bytes())
        names = index["weight_map"]
        valid = all(isinstance(n, str) and isinstance(f, str) and Path(f).name == f for n, f in names.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error!r}, expected an index. Copy or download it again."
        ) from error
    if not valid:
        raise CheckpointError(
            f"cannot read {path}: its weight_map does not map names to file names, expected an index. Copy or download "
            "it again."
        )
    return dict(names)


def read_headers(origin: Origin) -> tuple[Origin, dict[str, Entry]]:
    """Return where each tensor of an origin's files lies, and the origin, without conversions if a header says so.

    Raises:
        CheckpointError: a file is missing or broken, or the index does not agree with the files.
    """
    index = read_index(origin.index) if origin.index else {}
    if missing := sorted(set(index.values()) - {file.name for file in origin.files}):
        raise CheckpointError(
            f"cannot load {origin.where}: its index names {missing[0]}, expected one of its files. Complete the folder."
        )
    entries: dict[str, Entry] = {}
    for file in origin.files:
        stored, metadata = read_header_and_metadata(file)
        if metadata.get("names") == OWN_NAMES["names"]:
            origin = replace(origin, conversions=None)
        for name, entry in stored.items():
            if index.get(name, file.name) == file.name:
                if name in entries:
                    raise CheckpointError(
                        f"cannot load {origin.where}: {entries[name].path.name} and {file.name} both hold {name}, "
                        "expected it once. Remove the file that does not belong there."
                    )
                entries[name] = entry
    if lost := [name for name in index if name not in entries]:
        raise CheckpointError(
            f"cannot load {origin.where}: its index says that {index[lost[0]]} holds {lost[0]}, which it does not "
            f"({len(lost)} such). Copy or download the folder again."
        )
    return origin, entries
