"""Find meta tensors that modules hold outside of their parameters and buffers, and replace them by tensors with values.

Input: modules that were built on the meta device. Output: their other tensors, wherever a module refers to them: in
attributes, lists, dicts, tuples, sets, objects, functions and modules that are not registered.

[Note: plain tensors] ``self.positions = torch.arange(6)`` is neither a parameter nor a buffer: no loop over a model's
tensors finds it. Without values, it would be read as uninitialised memory. At the end of a block, each such tensor gets
a reference to its recorded operations. It is a Python attribute of the tensor, so copies of the tensor have it, too.
When the model is loaded, the tensor is exchanged in place, so that all references to it see the values.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import DEVICE_MODULES, STATE_OF_FSDP
from fsdp2_strategy.model.placeholders import is_computed, is_offloaded_tensor
from fsdp2_strategy.model.state import ATTACHED

_REGISTERED = ("_parameters", "_buffers", "_modules")
_LIBRARIES = ("fsdp2_strategy", "torch.distributed", "torch.fx", "torch.autograd", "torch.utils", *DEVICE_MODULES)
"""Packages whose objects hold no tensors of a constructor, but may refer to many others."""
_SCALARS = (str, bytes, bytearray, int, float, complex, bool, types.NoneType)
_WITHOUT_TENSORS = (*_SCALARS, type, types.ModuleType, types.CodeType)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_CONTAINERS = {dict, OrderedDict, *_SEQUENCES}
_CACHES = (torch.Tensor, list, dict, tuple)
_WITHOUT_ATTRIBUTES = {dict, *_SEQUENCES, types.FunctionType, types.MethodType}
"""Types whose own instances, unlike those of their subclasses, have no attributes, or none that a model uses."""

_Step = tuple[Any, str, Any, Any, nn.Module | None]
"""A value; its path from the module; where it can be replaced, a list or dict and its key (None: nowhere); and the
module that is not registered itself, and has it as a parameter or buffer."""


@dataclass(frozen=True, eq=False)
class PlainTensor:
    """A meta tensor that a module refers to, and that is none of its parameters and buffers."""

    name: str
    """The module's name, and the path to the tensor."""
    tensor: torch.Tensor
    holder: list[Any] | dict[Any, Any] | None
    """The list or dict that contains it; None if it is contained in something that cannot be changed."""
    key: Any
    owner: nn.Module | None
    """The module that is not registered in the model, and has it as a parameter or buffer of the name ``key``."""
    module: nn.Module
    """The registered module that refers to it."""

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor in its place."""
        assert self.holder is not None
        self.holder[self.key] = tensor


def plain_tensors(modules: Mapping[nn.Module, str], registered: Set[int]) -> Iterator[PlainTensor]:
    """Yield the plain meta tensors of modules, once per reference; do not enter other modules that are registered."""
    without_tensors: dict[int, Any] = {}
    of_classes: dict[type[nn.Module], list[_Step]] = {}
    for module, name in modules.items():
        cls = type(module)
        if cls not in of_classes:
            of_classes[cls] = [*_of_classes(cls)]
        steps = [*_attributes(module, is_registered=True), *of_classes[cls]]
        for value, path, holder, key, owner in _tensors_in(steps, registered, without_tensors):
            is_on_meta = isinstance(value, torch.Tensor) and value.is_meta
            if is_on_meta and not (is_offloaded_tensor(value) or is_computed(value)):
                full = f"{name}{path}" if name else path.removeprefix(".")
                yield PlainTensor(full, value, holder, key, owner, module)


def _tensors_in(values: Iterable[_Step], registered: Set[int], without_tensors: dict[int, Any]) -> Iterator[_Step]:
    """Yield all tensors that the values of a module refer to, except through registered modules.

    Values from which no tensor can be reached, such as a configuration that all modules share, are added to
    ``without_tensors`` by their ids, and not entered again.
    """
    seen: dict[int, Any] = {}
    for first in values:
        steps, entered, has_tensors = [first], dict[int, Any](), False
        while steps:
            step = steps.pop()
            value = step[0]
            if isinstance(value, torch.Tensor):
                has_tensors = True
                yield step  # each reference, because each may have to be replaced
            elif not isinstance(value, _WITHOUT_TENSORS) and (number := id(value)) not in registered:
                if number in seen:
                    has_tensors = True
                elif number not in entered and number not in without_tensors:
                    entered[number] = value
                    steps += reversed([*_contents(value, step[1])])
        (seen if has_tensors else without_tensors).update(entered)


def _attributes(module: nn.Module, path: str = "", *, is_registered: bool) -> Iterator[_Step]:
    attributes = vars(module)
    for name, value in list(attributes.items()):
        if name in _REGISTERED:
            if not is_registered:
                yield from ((each, f"{path}.{own}", value, own, module) for own, each in value.items())
        elif type(value) in _CONTAINERS and not value:
            continue  # most attributes of a module are empty dicts of hooks
        elif name != ATTACHED and not name.startswith(STATE_OF_FSDP):
            yield value, f"{path}.{name}", attributes, name, None


def _of_classes(cls: type) -> Iterator[_Step]:
    """Yield the values of class attributes, which a constructor may use as a cache."""
    for each in cls.__mro__:
        if not str(each.__module__).startswith(("torch.", "builtins")):
            for name, value in vars(each).items():
                if isinstance(value, _CACHES) and not name.startswith("__"):
                    yield value, f".{name}", None, None, None


def _contents(value: Any, path: str) -> Iterator[_Step]:
    """Yield what a value contains."""
    if isinstance(value, nn.Module):
        yield from _attributes(value, path, is_registered=False)
    elif isinstance(value, dict):
        yield from ((each, f"{path}[{key!r}]", value, key, None) for key, each in value.items())
    elif isinstance(value, _SEQUENCES):
        holder = value if isinstance(value, list) else None
        yield from ((each, f"{path}[{i}]", holder, i, None) for i, each in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((each, path, None, None, None) for each in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((each, path, None, None, None) for each in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType) and not str(value.__module__).startswith(_LIBRARIES):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield _content_of(cell), f"{path}.{name}", None, None, None
        yield from ((each, path, None, None, None) for each in (value.__defaults__, value.__kwdefaults__))
    if not (type(value) in _WITHOUT_ATTRIBUTES or isinstance(value, nn.Module)):
        yield from _of_object(value, path)


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value
        return None


def _of_object(value: Any, path: str) -> Iterator[_Step]:
    """Yield the attributes of an object, without running its code."""
    cls = type(value)
    if str(cls.__module__).startswith(_LIBRARIES):
        return
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = None
    if isinstance(attributes, dict):
        yield from ((each, f"{path}.{name}", attributes, name, None) for name, each in list(attributes.items()))
    for each in cls.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(each).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield member.__get__(value, cls), f"{path}.{name}", None, None, None
                except AttributeError:
                    continue  # the slot is empty


def references_by_tensor(root: nn.Module) -> list[list[PlainTensor]]:
    """Return the plain meta tensors of a model: for each, all references to it; not collective."""
    modules = {module: name for name, module in root.named_modules()}
    groups: dict[int, list[PlainTensor]] = {}
    for each in plain_tensors(modules, {id(module) for module in modules}):
        groups.setdefault(id(each.tensor), []).append(each)
    return list(groups.values())


def exchange(plain: Sequence[tuple[list[PlainTensor], torch.Tensor]]) -> list[str]:
    """Replace each plain tensor by one with the given values; return the names of those that cannot be replaced."""
    waiting = [(references, _like(references[0].tensor, values)) for references, values in plain]
    while waiting:
        # A view refers to the tensor that it was made from, so that one can be exchanged after its views.
        remaining = [(references, new) for references, new in waiting if not _swap(references[0].tensor, new)]
        if len(remaining) == len(waiting):
            break
        waiting = remaining
    lost = []
    for references, new in waiting:
        if any(each.holder is None for each in references):
            lost.append(references[0].name)
            continue
        for each in references:
            each.put(new)
    return lost


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def _swap(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Exchange two tensors in place; return False if something else refers to the memory of one of them."""
    try:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True
