"""Find out whether a model's weights have changed while a stream is being read.

Input: a model. Output: whether a tensor of it has changed since the watch began.

[Note: weight versions] PyTorch counts the changes in place of a tensor (``_version``): an operation on a DTensor counts
for the DTensor, an operation on its shard for the shard. It does not count bytes that are read from a file, and
offloading replaces a shard by another tensor with the same values. So the package also counts its own changes of a
model's weights: optimizer steps, loads and swapped averages. A change through ``.data`` is not counted by either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import ref

import torch
from torch import nn

from fsdp2_strategy.distributed.torch_internals import changes_of, local_of, storage_address
from fsdp2_strategy.model.placeholders import source_of
from fsdp2_strategy.model.state import Slot, model_state
from fsdp2_strategy.model.wrappers import unwrap_model

_CHANGES = Slot[int]("changes of the weights by this package")


def count_change(model: nn.Module) -> None:
    """Count a change of a model's weights that PyTorch may not count; not collective."""
    state = model_state(unwrap_model(model))
    state.set(_CHANGES, (state.get(_CHANGES) or 0) + 1)


@dataclass(frozen=True)
class _Version:
    """A tensor as it was. Only weak references: the memory of an offloaded tensor must be freed."""

    local: ref[torch.Tensor]
    storage: int
    changes: tuple[int, int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Version:
        local = local_of(tensor)
        return cls(ref(local), storage_address(local), (changes_of(tensor), changes_of(local)))


class WeightWatch:
    """Watch the parameters and buffers of a model that was resharded, from the construction of the watch on."""

    def __init__(self, root: nn.Module) -> None:
        self._root, self._changes = ref(root), model_state(root).get(_CHANGES)
        self._siblings: dict[int, list[torch.Tensor]] = {}
        """The buffers of the module of each buffer: ``F.batch_norm`` changes statistics without counting it."""
        self._versions: dict[int, _Version] = {id(parameter): _Version.of(parameter) for parameter in root.parameters()}
        for module in root.modules():
            buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
            self._siblings |= {id(buffer): buffers for buffer in buffers}
            self._versions |= {id(buffer): _Version.of(buffer) for buffer in buffers}
        self._tensors: list[torch.Tensor] = [*root.parameters(), *root.buffers()]  # their ids must not be reused

    def any_changed(self, tensors: Iterable[torch.Tensor] | None = None) -> bool:
        """Return whether any of the tensors, by default any tensor of the model, has changed since the watch began."""
        root = self._root()
        if root is not None and model_state(root).get(_CHANGES) != self._changes:
            return True
        return any(map(self._has_changed, self._tensors if tensors is None else map(source_of, tensors)))

    def _has_changed(self, tensor: torch.Tensor) -> bool:
        return any(self._differs(each) for each in self._siblings.get(id(tensor), [tensor]))

    def _differs(self, tensor: torch.Tensor) -> bool:
        before, now = self._versions.get(id(tensor)), _Version.of(tensor)
        if before is None:
            return False
        if before.local() is not now.local():  # offloaded or reloaded, with the same values
            self._versions[id(tensor)] = now
            return False
        return (before.storage, before.changes) != (now.storage, now.changes)
