"""Write a checkpoint as a folder that plain `torch.distributed.checkpoint` loads, the command ``to-dcp``.

Input: an open checkpoint. Output: a folder of ``.distcp`` files with this state dict, on any number of ranks::

    {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer),
     "lr_scheduler": scheduler.state_dict(), "step": ..., "client_state": ...}

[Note: tensors on demand] DCP plans a save from names, shapes and dtypes, and asks its planner for the values of a
tensor when it writes that tensor. So the state dict has tensors on meta, and the planner reads each from the checkpoint
in turn. DCP's writer keeps the tensors of a file until it has written all of it, so there are many files, each of which
has at most ``sizes.CONVERSION_BYTES`` or one tensor.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp2_strategy import sizes
from fsdp2_strategy.checkpoint.listing import models_in
from fsdp2_strategy.checkpoint.paths import EMA, OPTIMIZER
from fsdp2_strategy.checkpoint.reader import Opened
from fsdp2_strategy.checkpoint.storage import convert_dcp_errors, stored_in
from fsdp2_strategy.checkpoint.stored_model import read_region, stored_model
from fsdp2_strategy.checkpoint.training_state import POSITION, has_position_only
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.storage.json_values import from_json_values
from fsdp2_strategy.storage.regions import Region
from fsdp2_strategy.storage.staged_folder import StagedFolder
from fsdp2_strategy.storage.verified_read import Reader

_IMPLEMENTATION = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Settings of a group that checkpoints leave out, and that a state dict of torch's optimizers has."""

_ZERO_AT_FIRST = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
"""State whose value before the first step is zero: DCP expects it of each parameter, stepped or not."""


@dataclass
class DcpState:
    """The state dict to write; see [Note: tensors on demand]."""

    content: dict[str, Any] = field(default_factory=dict)
    """Nested, with tensors on meta."""
    reads: dict[int, Callable[[Reader], torch.Tensor]] = field(default_factory=dict)
    """How to read each tensor, by the ``id`` of the tensor on meta."""
    partial: list[str] = field(default_factory=list)
    """The models, by name, whose frozen weights are not in the checkpoint."""

    def add(self, name: str, region: Region) -> torch.Tensor:
        """Return a tensor on meta for one that is in files."""
        meta = torch.empty(region.shape, dtype=region.dtype, device="meta")
        self.reads[id(meta)] = lambda reader: read_region(reader, name, region)
        return meta

    def add_zeros(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on meta whose values are zero."""
        meta = torch.empty(shape, dtype=dtype, device="meta")
        self.reads[id(meta)] = lambda _: torch.zeros(shape, dtype=dtype)
        return meta


def dcp_state(opened: Opened) -> DcpState:
    """Describe a checkpoint as a state dict; read headers and small files only."""
    state = DcpState()
    of_run = opened.state_of()
    models = models_in(opened.manifest)
    for model in models or ("",):
        of_model = opened.state_of(model) if model else of_run
        content = _content_of_model(opened, model, of_model, state)
        state.content |= {model: content} if model else content
    state.content["step"] = of_run["step"]
    if of_run["client_state"]:
        state.content["client_state"] = of_run["client_state"]
    return state


def write_dcp(opened: Opened, state: DcpState, target: Path, *, progress: bool) -> None:
    """Write a state dict to a new folder; for a single process. The folder is complete, or has no ``.metadata``."""
    staged = StagedFolder(target)
    total = sum(each.nbytes for each in _tensors_in(state.content))
    with staged, Reader("writing", opened.checksums, total if progress else 0) as reader, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        staged.create(total)
        if not staged.is_empty():
            raise CheckpointError(
                f"cannot write {target}: it is not empty, expected a new folder. Name another folder."
            )
        with convert_dcp_errors():
            # One thread: an error in one of several would be lost, and with it the tensor.
            writer = _Writer(staged.path, thread_count=1)
            save(state.content, storage_writer=writer, planner=_Planner(state.reads, reader), no_dist=True)
        staged.publish()


class _Writer(FileSystemWriter):
    """Write files of limited size, one after the other; see [Note: tensors on demand]."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items of a plan."""
        results: list[WriteResult] = []
        for number, items in enumerate(_groups(plan.items)):
            prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _groups(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Split the items of a plan into those of each file."""
    group: list[WriteItem] = []
    nbytes = 0
    for item in items:
        group.append(item)
        if (tensor := item.tensor_data) is not None:
            nbytes += tensor.size.numel() * tensor.properties.dtype.itemsize
        if nbytes > sizes.CONVERSION_BYTES:
            yield group
            group, nbytes = [], 0
    yield group


class _Planner(DefaultSavePlanner):
    """Plan a save by tensors on meta, and read the values of each tensor when it is written."""

    def __init__(self, reads: Mapping[int, Callable[[Reader], torch.Tensor]], reader: Reader) -> None:
        super().__init__()
        self._reads, self._reader = reads, reader

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the values of one item."""
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        read = self._reads[id(self.lookup_object(write_item.index))]
        return read(self._reader)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)


def _content_of_model(opened: Opened, model: str, of_model: Mapping[str, Any], state: DcpState) -> dict[str, Any]:
    paths = opened.paths.of_model(model)
    hyper = of_model.get("optimizer")
    stored = stored_model(paths, hyper["of_parameter"] if hyper else ())
    state.partial += [model] if stored.is_partial else []
    content: dict[str, Any] = {"model": {name: state.add(name, region) for name, region in stored.regions.items()}}
    if hyper:
        content["optimizer"] = _optimizer(opened, model, hyper, stored.regions, state)
    if of_model["scheduler"]:
        content["lr_scheduler"] = _schedule(of_model["scheduler"], hyper)
    averages = stored_in(paths.state / EMA, opened.paths)
    if averages:
        content[EMA] = {n: state.add(n, Region.of(entry, entry.shape, entry.dtype)) for n, entry in averages.items()}
    return content | {"step": of_model["step"]}


def _optimizer(
    opened: Opened, model: str, hyper: Mapping[str, Any], regions: Mapping[str, Region], state: DcpState
) -> dict[str, Any]:
    """Return the state dict of an optimizer, its hyper-parameters by group and, as torch flattens it, by parameter."""
    folder = opened.paths.of_model(model).state / OPTIMIZER
    of_parameters: dict[str, dict[str, Any]] = {name: {} for name in hyper["of_parameter"]}
    for full, entry in stored_in(folder, opened.paths).items():
        name, _, key = full.removeprefix("state.").rpartition(".")
        of_parameters.setdefault(name, {})[key] = state.add(full, Region.of(entry, entry.shape, entry.dtype))
    for name, values in from_json_values(hyper["values"]).items():
        of_parameters.setdefault(name, {}).update(values)
    _fill(of_parameters, regions, state)
    defaults = _defaults(hyper["class"])
    groups = [defaults | _settings(each) for each in hyper["settings"]]
    in_group = [[name for name, index in hyper["of_parameter"].items() if index == at] for at in range(len(groups))]
    flat = {
        f"param_groups.{name}.{key}": value
        for names, group in zip(in_group, groups, strict=True)
        for name in names
        if not name.isdecimal()  # else it has the name of a group
        for key, value in group.items()
    }
    nested = [{"params": names, **group} for names, group in zip(in_group, groups, strict=True)]
    return {"state": of_parameters, "param_groups": nested, **flat}


def _schedule(coded: Mapping[str, Any], hyper: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state dict of a schedule; of one that has only its position, also what the optimizer's groups give.

    Then it has all entries of a `LambdaLR` whose functions have no state. The entries of other schedules, such as the
    ``T_max`` of a cosine, are settings that the program passes to the constructor.
    """
    state: dict[str, Any] = from_json_values(dict(coded))
    if not has_position_only(state) or not hyper:
        return state
    groups = [_settings(each) for each in hyper["settings"]]
    if any("lr" not in group for group in groups):
        return state
    return {
        **state,
        "base_lrs": [group["initial_lr"] for group in groups],
        "_last_lr": [group["lr"] for group in groups],
        "_step_count": state[POSITION] + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "lr_lambdas": [None] * len(groups),
    }


def _fill(of_parameters: Mapping[str, dict[str, Any]], regions: Mapping[str, Region], state: DcpState) -> None:
    """Give parameters without state, which never had a gradient, the state before the first step."""
    example = next((values for values in of_parameters.values() if values), None)
    if example is None or not example.keys() <= _ZERO_AT_FIRST:
        return
    for name, values in of_parameters.items():
        if not values and name in regions:
            for key, like in example.items():
                shape = like.shape if key == "step" else regions[name].shape
                values[key] = state.add_zeros(shape, like.dtype)


def _defaults(kind: str) -> dict[str, Any]:
    """Return all settings of a group of a torch optimizer, with their defaults: a load by DCP asks for each of them."""
    name = re.sub(r".*\((.*)\)", r"\1", kind)
    cls = getattr(torch.optim, name, None)
    defaults: dict[str, Any] = cls([torch.nn.Parameter(torch.empty(1, 1))]).defaults if cls is not None else {}
    return {**_IMPLEMENTATION, **defaults}


def _settings(coded: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in from_json_values(dict(coded)).items()}
    return {**({"initial_lr": values["lr"]} if "lr" in values else {}), **values}
