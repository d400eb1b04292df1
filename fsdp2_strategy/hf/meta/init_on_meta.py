"""Build models on the meta device: constructors and ``from_pretrained`` run without creating or reading values.

Input: calls of ``from_pretrained`` and constructors inside `init_on_meta`. Output: models on meta. Each module of a
pretrained model stores which files contain its values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import without_modes
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.library_internals import LAST_STEP, LOADING_STEP
from fsdp2_strategy.hf.meta.recorded_init import Recording, is_recording, record
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.weights_folder import WeightsSource, origin_of, remember_origin


@contextmanager
def init_on_meta() -> Iterator[None]:
    """Build models inside this context on the meta device, without allocating memory; not collective.

    Constructors and ``from_config`` build on meta. ``from_pretrained`` reads no weights; each module stores in which
    files its weights are. device_map is ignored; dtype, attn_implementation and the other arguments keep their meaning.
    ``prepare_model`` or `load_weights` loads the values later; each rank reads the values of its shards.

    Raises:
        CheckpointError: another thread is in such a context; a tensor from an earlier context is changed; or
            ``from_pretrained`` gets a ``state_dict``, an adapter, quantised weights, or a folder without safetensors
            files.
    """
    if is_recording():
        yield  # nested: the outer context is active
        return
    with ExitStack() as stack:
        recording = stack.enter_context(record())
        for target, name, value in _patches(recording):
            stack.enter_context(patch.object(target, name, value))
        from transformers import initialization  # noqa: PLC0415  importing this file must not import transformers

        stack.enter_context(initialization.meta_device_safe_creation_ops())
        yield


def _patches(recording: Recording) -> list[tuple[Any, str, Any]]:
    """Return patches for init_weights, and for the steps of from_pretrained that place, read or initialise tensors."""
    from transformers import modeling_utils  # noqa: PLC0415
    from transformers.utils.loading_report import LoadStateDictInfo  # noqa: PLC0415

    def no_device_map(device_map: Any) -> None:
        """Ignore the device map: the mesh decides where parameters are."""

    def store_files(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> tuple[Any, None]:
        if expected_keys is not None or state_dict is not None:
            given = "a state_dict, expected a folder or hub id"
            if expected_keys is not None:
                given = "an adapter, expected a model's own weights"
            raise CheckpointError(
                f"cannot build {type(model).__name__} on meta: from_pretrained was given {given}. Build it outside of "
                "init_on_meta."
            )
        keep_dtypes(model, load_config.dtype_plan)
        with without_modes():
            _store_files(model, checkpoint_files, load_config)
        empty: dict[str, Any] = {"conversion_errors": {}, "error_msgs": []}
        return LoadStateDictInfo(**{f.name: empty.get(f.name, set()) for f in fields(LoadStateDictInfo)}), None

    def tie(model: Any, _load_config: Any, loading_info: Any) -> Any:
        model.tie_weights(recompute_mapping=False)
        found = origin_of(model)
        if found is not None:
            _tie_like(model, found[0].model)
        recording.mark_initialized(model, None if found is None else found[0])
        return loading_info

    def initialize(model: Any) -> None:
        init_weights(model)  # type: ignore[no-untyped-call]
        recording.mark_initialized(model)

    pretrained = modeling_utils.PreTrainedModel
    init_weights = pretrained.init_weights
    return [
        (modeling_utils, "check_and_set_device_map", no_device_map),
        (pretrained, LOADING_STEP, staticmethod(store_files)),
        (pretrained, LAST_STEP, staticmethod(tie)),
        (pretrained, "init_weights", initialize),
    ]


def _tie_like(model: nn.Module, skeleton: nn.Module) -> None:
    """Tie the parameters of the skeleton that are tied in the model; transformers ties them after its loading step."""
    first: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, key = name.rpartition(".")
        parameters = skeleton.get_submodule(path)._parameters
        own = parameters[key]
        if own is not None:
            parameters[key] = first.setdefault(id(parameter), own)


def keep_dtypes(model: nn.Module, plan: Mapping[str, torch.dtype] | None) -> None:
    """Cast tensors to the dtypes that ``plan`` sets for their name patterns, as loading would."""
    state = model.state_dict(keep_vars=True)
    for name, dtype in planned_dtypes(state, plan).items():
        state[name].data = state[name].data.to(dtype)


def planned_dtypes(names: Iterable[str], plan: Mapping[str, torch.dtype] | None) -> dict[str, torch.dtype]:
    """Return the dtypes that ``plan`` sets by name pattern, for those of ``names`` that match a pattern."""
    from transformers.core_model_loading import build_glob_alternation  # noqa: PLC0415

    if not plan:
        return {}
    pattern, groups, _ = build_glob_alternation(list(plan))
    matches = {name: match for name in names if (match := pattern.search(name))}
    return {name: plan[groups[match.lastgroup or ""]] for name, match in matches.items()}


def _store_files(model: Any, checkpoint_files: Any, load_config: Any) -> None:
    """Attach to each module of a model the location of its values, after a check of the files' format."""
    where = str(load_config.pretrained_model_name_or_path)
    if load_config.hf_quantizer is not None:
        raise CheckpointError(
            f"cannot build {type(model).__name__} on meta: {where} is quantised, expected unquantised weights. "
            "Build it outside of init_on_meta, or name a folder that is not quantised."
        )
    files = tuple(map(Path, checkpoint_files or ()))
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise CheckpointError(
            f"cannot build {type(model).__name__} on meta: the weight files of {where} are {[f.name for f in files]}, "
            "expected safetensors files. Convert them: call from_pretrained outside of init_on_meta, then "
            "save_pretrained."
        )
    _move_parameters_to_meta(model)
    origin = WeightsSource(
        model=meta_skeleton(model),
        files=files,
        index=_index_of(files[0]),
        conversions=load_config.weight_mapping,
        ignore_mismatched_sizes=load_config.ignore_mismatched_sizes,
        where=where,
    )
    remember_origin(model, origin)


def _move_parameters_to_meta(model: nn.Module) -> None:
    """Move all parameters to meta; some are on the CPU, because ``torch.FloatTensor`` ignores the default device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


def _index_of(file: Path) -> Path | None:
    """Return the index for a file named model[.variant]-00001-of-00002.safetensors; None if there is no index."""
    match = re.fullmatch(r"model(\..+)?-\d+-of-\d+\.safetensors", file.name)
    index = file.with_name(f"model.safetensors.index{match[1] or ''}.json") if match else None
    return index if index is not None and index.is_file() else None
