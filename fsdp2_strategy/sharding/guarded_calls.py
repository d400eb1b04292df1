"""Make calls of transformers, peft and torch on a sharded model work, or raise an error that says what to call instead.

Input: a model that was sharded, and its units. Output: the same model, whose instances shadow methods of their classes.

[Note: guarded calls] These calls were written for full tensors. On shards, some end in an error within torch, others
change the model in silence: ``half`` rounds the master weights, a module that is added is trained on each rank for
itself. So the instances of a sharded model shadow the methods: no class is changed, and no other model. Calls that
change nothing, such as ``to`` with the device and dtype that the model has, still succeed, because trainers make them.
The modules of the tree refuse to get further modules with parameters of their own.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.distributed.torch_internals import APPLY, dtensor_like, local_of, parameters_of, shard_of
from fsdp2_strategy.errors import CheckpointError, ShardError
from fsdp2_strategy.model.fsdp_state import class_name, parameter_groups
from fsdp2_strategy.model.offloading import is_offloaded
from fsdp2_strategy.model.shards import local_shard

_BEFORE = "Call it before prepare_model."
_SAVE = "Call strategy.save_model(model, tokenizer, output_dir) on every rank"
_MERGE = "To save merged weights, call strategy.save_model(model, output_dir=...) on every rank, which merges adapters."

_REFUSED: dict[str, tuple[type[Exception], str]] = {
    "save_pretrained": (CheckpointError, f"{_SAVE}."),
    "push_to_hub": (CheckpointError, f"{_SAVE}, and upload the folder with huggingface_hub.upload_folder on one."),
    "set_input_embeddings": (ShardError, _BEFORE),
    "set_output_embeddings": (ShardError, _BEFORE),
    "add_adapter": (ShardError, _BEFORE),
    "load_adapter": (ShardError, _BEFORE),
    "delete_adapter": (ShardError, _BEFORE),
    "merge_adapter": (ShardError, _MERGE),
    "merge_and_unload": (ShardError, _MERGE),
    "unload": (ShardError, f"{_BEFORE} {_MERGE}"),
    "prune_heads": (ShardError, _BEFORE),
    "dequantize": (ShardError, _BEFORE),
}
"""Methods of torch, transformers and peft that cannot work on shards: the error, and what to do instead."""

_LIBRARIES = ("torch", "transformers", "peft", "huggingface_hub", "lerobot")


def guard_calls(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Shadow the methods of a sharded model, and of the models within it; not collective. See [Note: guarded calls]."""
    for module in list(model.modules()):
        for name, (error, fix) in _REFUSED.items():
            if defines(module, name):
                vars(module)[name] = functools.partial(_refuse, name, class_name(module), error, fix)
        if defines(module, "resize_token_embeddings"):
            resize = module.resize_token_embeddings
            vars(module)["resize_token_embeddings"] = functools.partial(_resize, module, resize)
        module._modules = _Children(module._modules, class_name(model))
    for unit in dict.fromkeys((model, *units)):
        vars(unit)["__deepcopy__"] = functools.partial(_refuse_copy, class_name(unit))
        vars(unit)["__reduce_ex__"] = functools.partial(_refuse_pickle, class_name(unit))
        vars(unit)[APPLY] = functools.partial(_apply, unit, getattr(unit, APPLY))
        vars(unit)["share_memory"] = functools.partial(_refuse, "share_memory", class_name(unit), ShardError, _BEFORE)
        vars(unit)["to_empty"] = functools.partial(_to_empty, unit, unit.to_empty)
    guard_state_dict(model)


def guard_state_dict(model: nn.Module) -> None:
    """Shadow the methods of a sharded model, or of its wrapper, that read and load state dicts; not collective."""
    if not isinstance(vars(model).get("state_dict"), functools.partial):
        vars(model)["state_dict"] = functools.partial(_state_dict, model, model.state_dict)
        vars(model)["load_state_dict"] = functools.partial(_load_state_dict, model, model.load_state_dict)


def defines(module: nn.Module, name: str) -> bool:
    """Return whether a library that works on full tensors defines a method of a module's class."""
    return any(name in vars(cls) and cls.__module__.partition(".")[0] in _LIBRARIES for cls in type(module).__mro__)


def _refuse(name: str, model: str, error: type[Exception], fix: str, *_: object, **__: object) -> NoReturn:
    raise error(
        f"cannot call {name}: {model} is sharded, expected a model that is not, because the call needs full tensors, "
        f"or changes them. {fix}"
    )


def _refuse_copy(model: str, _memo: object) -> NoReturn:
    raise ShardError(
        f"cannot copy {model}: it is sharded, expected a model that is not. Copy it before prepare_model, and pass the "
        "copy to prepare_model, too. For averages of its weights, call strategy.moving_average."
    )


def _refuse_pickle(model: str, _protocol: object) -> NoReturn:
    raise CheckpointError(
        f"cannot pickle {model}: it is sharded, expected a model that is not, because each rank holds a part. Call "
        "strategy.save_ckpt(model, save_dir) or strategy.save_model(model, output_dir=...) on every rank."
    )


def _resize(
    module: Any, _resize: object, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **_: object
) -> Any:
    """Return the embeddings if they have the size already; they cannot change it."""
    embeddings = module.get_input_embeddings()
    size = embeddings.num_embeddings if new_num_tokens is None else new_num_tokens
    size += -size % (pad_to_multiple_of or 1)
    if size == embeddings.num_embeddings:
        return embeddings
    raise ShardError(
        f"cannot resize the embeddings of {class_name(module)} from {embeddings.num_embeddings} to {size} tokens: the "
        f"model is sharded, expected a model that is not. {_BEFORE}"
    )


class _Children(dict[str, Any]):
    """The modules within a module of a sharded model, which get no further parameters."""

    def __init__(self, modules: Mapping[str, Any], model: str) -> None:
        super().__init__(modules)
        self._model = model

    def __setitem__(self, name: str, module: Any) -> None:
        if isinstance(module, nn.Module) and module is not self.get(name):
            new = next((n for n, p in module.named_parameters() if not isinstance(p, DTensor)), None)
            if new is not None:
                raise ShardError(
                    f"cannot add the module {name} ({class_name(module)}) to {self._model}: the model is sharded, and "
                    f"{new} of the module is not, so each rank would train it for itself, expected a module without "
                    "parameters. Change the model before prepare_model: call get_peft_model or add_adapter, "
                    "resize_token_embeddings, and replace heads on the model that is not sharded yet."
                )
        super().__setitem__(name, module)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _apply(unit: nn.Module, apply: Callable[..., Any], change: Callable[..., Any], recurse: bool = True) -> nn.Module:
    """Apply a change to buffers, if it leaves parameters as they are: this is what ``to``, ``half``, ``cuda`` do."""
    shards = list(_shards(unit))
    if any(shard.is_meta for shard in shards):
        if is_offloaded(unit):
            raise ShardError(
                f"cannot cast or move {class_name(unit)}: it is offloaded to host memory, expected it to be on the "
                "device. Call strategy.reload_model first."
            )
        return apply(change, recurse)  # type: ignore[no-any-return]  # it gets its first storage
    for dtype, device in dict.fromkeys((shard.dtype, shard.device) for shard in shards):
        new = change(torch.empty(0, dtype=dtype, device=device))
        if new.dtype != dtype:
            return apply(change, recurse)  # type: ignore[no-any-return]  # `check_dtypes` refuses to train the model
        if new.device != device and new.device.type != current_device().type:
            raise ShardError(
                f"cannot move {class_name(unit)} from {device} to {new.device}: it is sharded, and its ranks exchange "
                f"parameters on {current_device()}, expected this device. To free its memory, call "
                "strategy.offload_model(model), and strategy.reload_model(model) before it runs."
            )
    for module in unit.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
    return unit


def _shards(unit: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the local tensors of the shards of a unit and of the units within it, gathered or not."""
    for group in parameter_groups(unit):
        for parameter in parameters_of(group):
            yield local_of(shard_of(parameter))


def _to_empty(unit: nn.Module, to_empty: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(shard.is_meta for shard in _shards(unit)) and not is_offloaded(unit):
        return to_empty(*args, **kwargs)
    raise ShardError(
        f"cannot call to_empty: {class_name(unit)} has values, which the call would discard, expected a model on the "
        "meta device. Leave it out: prepare_model loads or initialises models that were built on the meta device."
    )


# --- state dicts ------------------------------------------------------------------------------------------------------


class _ShardedStateDict(OrderedDict[str, Any]):
    """A state dict with the shards of one rank, which is not pickled; deep copies are plain dicts."""

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise CheckpointError(
            f"cannot pickle the state dict of {vars(self)['of_model']}: its tensors are this rank's shards, expected "
            "full tensors. Call strategy.save_ckpt(model, save_dir) or strategy.save_model(model, output_dir=...) on "
            "every rank; stream_weights(model) yields full tensors."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[str, Any]:
        return OrderedDict((name, copy.deepcopy(value, memo)) for name, value in self.items())

    def __copy__(self) -> OrderedDict[str, Any]:
        return OrderedDict(self)


def _state_dict(model: nn.Module, state_dict: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = state_dict(*args, **kwargs)
    if args or kwargs.get("destination") is not None or not any(isinstance(v, DTensor) for v in found.values()):
        return found  # a part of the state dict of a module around the model
    sharded = _ShardedStateDict(found)
    vars(sharded).update(vars(found), of_model=class_name(model))
    return sharded


def _load_state_dict(
    model: nn.Module, load: Callable[..., Any], state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Load a state dict, whose tensors may be full: each rank takes its elements of them."""
    own = model.state_dict(keep_vars=True)  # FSDP2 reshards for it
    taken = {
        name: dtensor_like(own[name], local_shard(own[name]).of(value.to(own[name].device)))
        for name, value in state_dict.items()
        if isinstance(own.get(name), DTensor)
        and isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and value.shape == own[name].shape
        and not own[name].is_meta
    }
    if not taken:
        return load(state_dict, *args, **kwargs)
    if args[1:] or kwargs.get("assign"):
        raise ShardError(
            f"cannot load a state dict into {class_name(model)}: assign is set, and the model is sharded, expected "
            "full tensors to be copied. Leave assign out."
        )
    loaded = OrderedDict(state_dict) | taken
    vars(loaded).update(vars(state_dict) if isinstance(state_dict, OrderedDict) else {})
    return load(loaded, *args, **kwargs)
