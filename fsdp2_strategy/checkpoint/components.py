"""Assign a model's tensors to the components of a checkpoint.

`model/` is a folder for ``from_pretrained``. `wrapper/` contains the other tensors: those of a wrapper around the
model, and the model's adapters. A save with ``only_trainable`` writes `trainable/` instead of both.

Another layout may have other folders; see `layout`.

Input: a sharded model. Output of a save: the components to write. Output of a load: the location of each of the
model's tensors in the files.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fsdp2_strategy.checkpoint.file_schemas import STATE_BYTES
from fsdp2_strategy.checkpoint.load_options import NOT_STRICT
from fsdp2_strategy.checkpoint.paths import TRAINABLE, WRAPPER, CheckpointPaths
from fsdp2_strategy.checkpoint.reader import opened_around
from fsdp2_strategy.checkpoint.storage import LoadTargets, stored_in, targets_by_name
from fsdp2_strategy.checkpoint.training_state import log_differences
from fsdp2_strategy.distributed.process_group import is_rank_0
from fsdp2_strategy.errors import CheckpointError, some
from fsdp2_strategy.hf.copy_folder import TOKENIZER_FILES
from fsdp2_strategy.hf.library_internals import names_not_saved
from fsdp2_strategy.hf.load_plan import LoadReport, match_tensors
from fsdp2_strategy.hf.mismatches import CHECKPOINT
from fsdp2_strategy.hf.peft.files import ADAPTER_WEIGHTS, AdapterFiles, adapter_configurations, adapter_folder
from fsdp2_strategy.hf.peft.merge import has_adapters, is_peft_model, names_without_adapters, without_adapter_modules
from fsdp2_strategy.hf.save_plan import TensorLayout, choose_layout, tensors_to_write
from fsdp2_strategy.hf.skeleton import copy_module_shell, meta_skeleton
from fsdp2_strategy.hf.transformers_models import inner_model, is_transformers_model, write_configuration
from fsdp2_strategy.hf.weights_folder import WeightsSource, folder_of, has_root_names, open_folder
from fsdp2_strategy.model.fsdp_state import class_name
from fsdp2_strategy.model.names import saved_tensors
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.storage.component import Component
from fsdp2_strategy.storage.json_files import write_text
from fsdp2_strategy.storage.regions import Region


@dataclass(frozen=True)
class ModelComponents:
    """The components that contain a model's tensors, and the sidecar files of the model's folder."""

    components: list[Component]
    sidecars: SidecarFiles

    @classmethod
    def of(cls, root: nn.Module, paths: CheckpointPaths, left_out: Container[str] | None) -> ModelComponents:
        """Lay out ``model/``, and ``wrapper/`` if a wrapper or adapters have tensors of their own.

        With ``left_out``, lay out only ``trainable/``, without the frozen weights that ``left_out`` names.
        """
        if left_out is not None:
            kept = {name: tensor for name, tensor in saved_tensors(root).items() if name not in left_out}
            return cls([Component.of(paths.state / TRAINABLE, kept)], SidecarFiles(paths.model))
        inner = inner_model(root)
        base = without_adapter_modules(inner)
        tensors = tensors_to_write(base)
        layout = cached_tensor_layout(inner, base, tensors)
        components = [Component.of(paths.model, tensors, layout.regions, metadata=layout.metadata)]
        if base is not root:
            inside = {id(tensor) for tensor in (*base.parameters(), *base.buffers())}
            rest = {name: tensor for name, tensor in saved_tensors(root).items() if id(tensor) not in inside}
            if rest:
                components.append(Component.of(paths.state / WRAPPER, rest))
        sidecars = SidecarFiles.of(paths.model, base, layout.regions, folder_of(inner))
        if base is not inner:
            wrapper, configurations = paths.state / WRAPPER, adapter_configurations(inner)
            folders = {adapter_folder(name, wrapper): each for name, each in configurations.items()}
            sidecars = replace(sidecars, adapter_configurations=folders)
        return cls(components, sidecars)


def adapter_components(
    adapters: AdapterFiles | None, tensors: Mapping[str, torch.Tensor], folder: Path
) -> list[Component]:
    """Return a component for the file of each adapter, in peft's format."""
    if adapters is None:
        return []
    options: dict[str, Any] = {"stem": ADAPTER_WEIGHTS, "max_file_bytes": sys.maxsize}
    return [
        Component.of(adapters.adapter_folder(name, folder), tensors, regions, **options)
        for name, regions in adapters.regions.items()
    ]


class FolderContent(Protocol):
    """Files that a layout writes into the model's folder."""

    @property
    def total_bytes(self) -> int:
        """Size of the weights among them."""

    def write(self, folder: Path) -> None:
        """Write the files; one rank calls it."""


_CONFIGS = ("config", "generation_config")


@dataclass
class Configuration:
    """A snapshot of the configuration of a transformers model, and the content of its files once they are written.

    transformers takes milliseconds to write them, so the next save of an equal configuration writes the same content.
    """

    skeleton: Any
    """A copy of the top-level module without parameters, buffers and children."""
    regions: Mapping[str, Region]
    """The tensors in the weight files, by their names in these files."""
    content: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, regions: Mapping[str, Region]) -> Configuration:
        """Copy the configurations of a model, unless the last snapshot has equal ones."""
        last = model_state(model).get(_CONFIGURATION)
        if last is not None and last._is_of(model, regions):
            return last
        skeleton = copy_module_shell(model)
        for name in _CONFIGS:
            if hasattr(skeleton, name):
                setattr(skeleton, name, copy.deepcopy(getattr(skeleton, name)))
        return model_state(model).set(_CONFIGURATION, cls(skeleton, regions))

    def _is_of(self, model: nn.Module, regions: Mapping[str, Region]) -> bool:
        pairs = [(getattr(self.skeleton, name, None), getattr(model, name, None)) for name in _CONFIGS]
        with contextlib.suppress(ValueError, RuntimeError):  # arrays and tensors among the values cannot be compared
            is_equal = all(type(a) is type(b) and (a is None or vars(a) == vars(b)) for a, b in pairs)
            return is_equal and self.regions is regions
        return False

    def write(self, folder: Path) -> None:
        """Write the files; one rank calls it."""
        for name, content in self.content.items():
            (folder / name).write_bytes(content)
        if not self.content:
            write_configuration(folder, self.skeleton, self.regions)
            if not self.skeleton.is_remote_code():  # whose files are written, too
                found = [path for name in _CONFIGS if (path := folder / f"{name}.json").exists()]
                self.content = {path.name: path.read_bytes() for path in found}


_CONFIGURATION = Slot[Configuration]("configuration in checkpoints")


@dataclass(frozen=True)
class SidecarFiles:
    """A snapshot of the sidecar files: an asynchronous save writes them when the trainer may have changed the model."""

    folder: Path
    configuration: Configuration | None = None
    """That of a transformers model, on rank 0."""
    source: Path | None = None
    """Folder to copy the tokenizer files from if no tokenizer is given."""
    adapters: AdapterFiles | None = None
    adapter_configurations: Mapping[Path, Any] = field(default_factory=dict)
    """peft's configurations of the adapters in ``wrapper/``, by folder: an export that merges them needs these."""
    further: FolderContent | None = None
    """Files of the layout."""
    also_in: Path | None = None
    """A second folder that gets the same files."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Files of a trainer: content by name."""

    @classmethod
    def of(cls, folder: Path, model: nn.Module, regions: Mapping[str, Region], source: Path | None) -> SidecarFiles:
        """Copy the configurations of ``model``, without adapter modules, on the rank that writes the files."""
        is_written_here = is_rank_0() and is_transformers_model(model)
        return cls(folder, Configuration.of(model, regions) if is_written_here else None, source)

    @property
    def total_bytes(self) -> int:
        """Size of the weights that the layout's own files contain; 0 on ranks that do not write them."""
        return self.further.total_bytes if self.further is not None else 0

    def write(self, tokenizer: Any) -> None:
        """Write the files, and without ``tokenizer`` copies of those in ``source``; one rank calls it."""
        if self.also_in is not None:
            replace(self, folder=self.also_in, also_in=None).write(tokenizer)
        if self.configuration is not None:
            self.configuration.write(self.folder)
        if self.adapters is not None:
            for adapter in self.adapters.regions:
                self.adapters.write_configuration(adapter, self.adapters.adapter_folder(adapter, self.folder))
        for folder, configuration in self.adapter_configurations.items():
            configuration.save_pretrained(folder)
        if self.further is not None:  # may replace the configuration that was written above
            self.further.write(self.folder)
        self._write_tokenizer(tokenizer)
        for name, content in self.texts.items():
            write_text(self.folder / name, content)

    def _write_tokenizer(self, tokenizer: Any) -> None:
        if tokenizer is not None:
            tokenizer.save_pretrained(self.folder)
        elif self.source is not None:
            opened = opened_around(self.source)
            for file in {file for name in TOKENIZER_FILES for file in self.source.glob(name) if file.is_file()}:
                if opened is not None and opened.lists(file):
                    (self.folder / file.name).write_bytes(opened.read(file, STATE_BYTES))
                else:
                    shutil.copyfile(file, self.folder / file.name)


_TENSOR_LAYOUT = Slot[tuple[object, TensorLayout]]("tensor layout in checkpoints")
"""The last layout of a model. The first element of the tuple describes the tensors it was chosen for."""


def cached_tensor_layout(inner: nn.Module, base: nn.Module, tensors: Mapping[str, torch.Tensor]) -> TensorLayout:
    """Return the layout of ``model/``, cached in the state of ``inner`` until a name, shape, dtype or sharding changes.

    ``base`` is the model without its adapters, and ``tensors`` has its tensors by name.
    """
    key = [(name, tuple(t.shape), t.dtype, getattr(t, "placements", None)) for name, t in tensors.items()]
    cached = model_state(inner).get(_TENSOR_LAYOUT)
    if cached is None or cached[0] != key:
        cached = model_state(inner).set(_TENSOR_LAYOUT, (key, choose_layout(meta_skeleton(base), tensors)))
    return cached[1]


def match_model(
    root: nn.Module, paths: CheckpointPaths, left_out: Container[str], *, strict: bool
) -> tuple[LoadTargets, LoadReport]:
    """Locate a model's tensors in a checkpoint, of which only headers are read; ``left_out`` has names it omits."""
    if (paths.state / TRAINABLE).is_dir():
        found, report = _match_trainable(root, paths, left_out)
    else:
        found, report = _match_full(root, paths)
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(
            f"cannot load {class_name(root)}: the checkpoint lacks {some(report.missing)} and holds "
            f"{some(report.unexpected)} that the model does not have, expected the same names. Build the same model, "
            f"or pass {NOT_STRICT}."
        )
    log_differences(report.missing, report.unexpected, report.cast)
    return found, report


def _match_trainable(
    root: nn.Module, paths: CheckpointPaths, left_out: Container[str]
) -> tuple[LoadTargets, LoadReport]:
    stored = stored_in(paths.state / TRAINABLE, paths)
    tensors = saved_tensors(root)
    in_both = {name: tensor for name, tensor in tensors.items() if name in stored}
    report = LoadReport(
        loaded=list(in_both),
        missing=[name for name in tensors if name not in stored and name not in left_out],
        unexpected=[name for name in stored if name not in tensors],
        cast={n: (stored[n].dtype, t.dtype) for n, t in in_both.items() if stored[n].dtype != t.dtype},
    )
    return targets_by_name("model", in_both, stored), report


def _match_root(root: nn.Module, paths: CheckpointPaths) -> tuple[LoadTargets, LoadReport]:
    """Match by the names of the whole model; see [Note: names of a converted checkpoint] in `convert`."""
    origin = open_folder(root, paths.weights, has_model_names=True, belongs=paths.lists)
    known = {module: (origin, name) for name, module in root.named_modules()}
    targets, report = match_tensors(root, known, CHECKPOINT)
    missing = [each.name for each in targets if not (each.is_non_persistent or each.regions)]
    of_files = [(each.name, each.regions[0], each.tensor) for each in targets if each.regions]
    return of_files, LoadReport(report.loaded, missing, report.unexpected, report.cast)


def _match_full(root: nn.Module, paths: CheckpointPaths) -> tuple[LoadTargets, LoadReport]:
    if has_root_names(paths.weights, paths.lists):
        return _match_root(root, paths)
    inner = root if paths.is_lerobot else inner_model(root)
    wrapper = paths.state / WRAPPER
    builds_adapters = paths.is_lerobot and not is_peft_model(inner)
    origin = open_folder(inner, paths.weights, has_adapters=builds_adapters, belongs=paths.lists)
    names = {m: n for n, m in inner.named_modules()} if builds_adapters else names_without_adapters(inner)
    known: dict[nn.Module, tuple[WeightsSource, str]] = {m: (origin, name) for m, name in names.items()}
    is_wrapped = inner is not root or (has_adapters(inner) and not builds_adapters)
    if is_wrapped and wrapper.is_dir():
        rest = open_folder(root, wrapper, has_model_names=True, belongs=paths.lists)
        known = {m: (rest, name) for name, m in root.named_modules()} | known
    targets, report = match_tensors(root, known, CHECKPOINT)
    never_saved = set(names_not_saved(inner))
    missing = [t.name for t in targets if not (t.is_non_persistent or t.regions or t.name_in_origin in never_saved)]
    unexpected = list(report.unexpected)
    if not is_wrapped and wrapper.is_dir():
        unexpected.append(f"{WRAPPER}/")
    of_files = [(t.name, t.regions[0], t.tensor) for t in targets if t.regions]
    return of_files, LoadReport(report.loaded, missing, unexpected, report.cast)
