"""Find the names of parameters that the file of an optimizer knows only by number.

Input: a `StoredOptimizer` with integer ids, and the parameters of the model in order. Output: the name of each id.

[Note: parameter ids] ``optimizer.state_dict()`` numbers the parameters group by group, in the order in which the
program listed them. ``load_state_dict`` relies on a program that lists them again in this order, and so do we: if the
optimizer to be loaded has as many groups with the same shapes in the same order, its parameters have the ids. If it has
these groups in another order, sizes, shapes and hyper-parameters tell them apart. If it has other groups, or there is
no program, each group is assumed to have its parameters in the order of the model. If the shapes allow only one such
way, it is taken. If they allow several for a pair of groups of which one has no weight decay, the rules by which
programs choose these parameters decide, if they agree. All else is an error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2_strategy.checkpoint.foreign.contents import Contents
from fsdp2_strategy.checkpoint.foreign.interleavings import Shape, Ways, ways_in_order
from fsdp2_strategy.checkpoint.foreign.stored_optimizer import StoredGroup, StoredOptimizer
from fsdp2_strategy.checkpoint.foreign.tensors import StoredTensor
from fsdp2_strategy.checkpoint.load_options import NO_OPTIMIZER
from fsdp2_strategy.errors import CheckpointError, counted

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
"""As ``Trainer.get_decay_parameter_names`` of transformers 5.24; earlier versions also name all modules LayerNorm."""
_BUFFERS = re.compile(
    r"running_(mean|var)|num_batches_tracked|inv_freq|position_ids|rotary_emb\.|attn\.(masked_)?bias$|_buffer$"
)
_ADVICE = (
    "Create the optimizer with the saved program's groups, in its order, and pass it (optimizer=, or param_groups= of "
    f"create_optimizer); or pass {NO_OPTIMIZER}."
)
_ADVICE_WITHOUT_PROGRAM = (
    "Load it with your program and its optimizer (load_ckpt with trust=True), and save it there with save_ckpt."
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, or of the weights in a checkpoint."""

    name: str
    shape: Shape
    requires_grad: bool = True


@dataclass(frozen=True)
class OwnGroup:
    """A group of the optimizer that is to be loaded."""

    names: tuple[str, ...]
    """In the order of the group."""
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class _Numbered:
    """A stored optimizer with integer ids."""

    groups: Sequence[StoredGroup]
    """Those with parameters; one with all ids if the optimizer has no groups."""
    shapes: Sequence[Sequence[Shape | None]]
    """The shape of each parameter of each group by its state; None if it has none."""

    @property
    def count(self) -> int:
        return sum(map(len, self.shapes))

    def fits(self, parts: Sequence[Sequence[Parameter]]) -> bool:
        """Return whether each group can have these parameters, in this order."""
        return len(parts) == len(self.shapes) and all(map(_fits, self.shapes, parts))

    def names(self, parts: Sequence[Sequence[Parameter]]) -> dict[int, str]:
        """Return the name of each id, where each group has these parameters."""
        ids = [int(index) for group in self.groups for index in group.params]
        return dict(zip(ids, (parameter.name for part in parts for parameter in part), strict=True))


def name_parameters(
    optimizer: StoredOptimizer,
    parameters: Sequence[Parameter],
    path: Path,
    own_groups: Sequence[OwnGroup] | None = None,
) -> StoredOptimizer:
    """Return the optimizer with names in place of integer ids; see [Note: parameter ids].

    Args:
        optimizer: the stored optimizer; returned as it is if it has names.
        parameters: all parameters of the model, in its order.
        path: the checkpoint, for messages.
        own_groups: the groups of the optimizer that is to be loaded; None if there is no program. Then, some of
            ``parameters`` may be others than the optimizer's, such as buffers.

    Raises:
        CheckpointError: the numbers of parameters or the shapes differ, or the names are ambiguous.
    """
    if optimizer.has_names:
        return optimizer
    numbered = _numbered(optimizer)
    if own_groups and (parts := _as_own(numbered, parameters, own_groups, path)) is not None:
        return optimizer.renamed(numbered.names(parts))
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    candidates = next((each for each in (trainable, list(parameters)) if len(each) == numbered.count), None)
    if candidates is None and own_groups is None and numbered.count < len(parameters):
        candidates = list(parameters)
    counts = f"it numbers {counted(numbered.count, 'parameter')} without names"
    if candidates is None:
        every = f"the model's {len(trainable)} that are trained, or all {len(parameters)}"
        expected = f"at most the {len(parameters)} weights" if own_groups is None else every
        raise _error(path, f"{counts}, expected {expected}.", own_groups)
    ways = ways_in_order(numbered.shapes, [parameter.shape for parameter in candidates])
    if ways.is_one:
        return optimizer.renamed(numbered.names(_parts(ways.found[0], candidates, numbered)))
    if ways.is_complete:
        sizes = ", ".join(str(len(group.params)) for group in numbered.groups)
        problem = f"{counts}, in groups of {sizes}, and their shapes are not those of the model in its order, expected "
        raise _error(path, f"{problem}{shapes_text(candidates)}.", own_groups)
    by_decay: list[dict[int, str]] = []
    for parts in _by_decay(numbered, candidates):
        if numbered.fits(parts) and (names := numbered.names(parts)) not in by_decay:
            by_decay.append(names)
    if len(by_decay) == 1:
        return optimizer.renamed(by_decay[0])
    problem = f"{counts}, in {counted(len(numbered.groups), 'group')}, and {_unclear(ways, candidates)}"
    raise _error(path, f"{problem}, expected one way to match shapes in the order of the model.", own_groups)


def named_optimizer(contents: Contents) -> StoredOptimizer | None:
    """Return the optimizer of a checkpoint with parameter names, without a model; None if it has none.

    Integer ids follow the order of the weights in the checkpoint, without buffers.

    Raises:
        CheckpointError: the numbers of weights or the shapes differ, or the names are ambiguous.
    """
    optimizer = contents.optimizer
    if optimizer is None or optimizer.has_names:
        return optimizer
    parameters = parameters_of_weights(contents.weights, _numbered(optimizer).count)
    return name_parameters(optimizer, parameters, contents.foreign.path)


def parameters_of_weights(weights: Mapping[str, StoredTensor], count: int) -> list[Parameter]:
    """Return the weights of a checkpoint that can be the ``count`` parameters of its optimizer, without a model."""
    every = [Parameter(name, tensor.shape) for name, tensor in weights.items()]
    if len(every) == count:
        return every
    floating = [p for p in every if weights[p.name].dtype.is_floating_point]
    without_buffers = [p for p in floating if not _BUFFERS.search(p.name)]
    return next((found for found in (without_buffers, floating) if len(found) >= count), every)


def shapes_text(parameters: Sequence[Parameter]) -> str:
    """Return the first shapes of parameters with their names, for a message."""
    listed = ", ".join(f"{p.name} {list(p.shape)}" for p in parameters[:3])
    return f"{listed}{', ...' if len(parameters) > 3 else ''}"


def _error(path: Path, problem: str, own_groups: Sequence[OwnGroup] | None) -> CheckpointError:
    if own_groups is None:
        return CheckpointError(f"cannot convert the optimizer of {path}: {problem} {_ADVICE_WITHOUT_PROGRAM}")
    return CheckpointError(f"cannot load the optimizer from {path}: {problem} {_ADVICE}")


def _numbered(optimizer: StoredOptimizer) -> _Numbered:
    groups = [group for group in optimizer.groups if group.params]
    groups = groups or [StoredGroup(tuple(sorted(optimizer.state, key=int)), {})]
    shapes = {int(key): _shape_of(state) for key, state in optimizer.state.items()}
    return _Numbered(groups, [[shapes.get(int(index)) for index in group.params] for group in groups])


def _shape_of(state: Mapping[str, object]) -> Shape | None:
    """Return the shape of a parameter by its state; None if all of it is smaller."""
    shapes = [value.shape for key, value in state.items() if isinstance(value, StoredTensor) and key != "step"]
    return max(shapes, key=len, default=None)


def _fits(shapes: Sequence[Shape | None], part: Sequence[Parameter]) -> bool:
    return len(shapes) == len(part) and all(s in (None, p.shape) for s, p in zip(shapes, part, strict=True))


def _as_own(
    numbered: _Numbered, parameters: Sequence[Parameter], own_groups: Sequence[OwnGroup], path: Path
) -> list[list[Parameter]] | None:
    """Return the parameters of each stored group if the optimizer to be loaded has the same groups, else None."""
    by_name = {parameter.name: parameter for parameter in parameters}
    own = [group for group in own_groups if group.names]
    if any(name not in by_name for group in own for name in group.names) or len(own) != len(numbered.groups):
        return None
    parts = [[by_name[name] for name in group.names] for group in own]
    of_stored, of_own = ([_key(group.settings) for group in groups] for groups in (numbered.groups, own))
    if numbered.fits(parts):
        if of_stored != of_own and sorted(map(str, of_stored)) == sorted(map(str, of_own)):
            problem = (
                f"its {len(own)} groups have the shapes of this optimizer's groups, but the learning rates and weight "
                "decays in another order, expected the groups in the same order."
            )
            raise _error(path, problem, own_groups)
        return parts
    return _reordered(numbered, parts, of_stored, of_own)


def _reordered(
    numbered: _Numbered, parts: Sequence[list[Parameter]], of_stored: Sequence[object], of_own: Sequence[object]
) -> list[list[Parameter]] | None:
    """Return own groups in the order of the stored ones, if sizes, shapes and hyper-parameters allow only one."""
    fitting = [[i for i, part in enumerate(parts) if _fits(shapes, part)] for shapes in numbered.shapes]
    same = [
        [i for i in found if len(found) == 1 or of_own[i] == key] for found, key in zip(fitting, of_stored, strict=True)
    ]
    if any(len(found) != 1 for found in same) or len(set(itertools.chain(*same))) < len(parts):
        return None
    return [parts[found[0]] for found in same]


def _key(settings: Mapping[str, Any]) -> tuple[object, object]:
    """Return the hyper-parameters that tell groups apart and that no schedule changes."""
    rate = settings.get("initial_lr", settings.get("lr"))
    return (None if rate is None else float(rate)), settings.get("weight_decay")


def _parts(way: Sequence[int | None], parameters: Sequence[Parameter], numbered: _Numbered) -> list[list[Parameter]]:
    parts: list[list[Parameter]] = [[] for _ in numbered.groups]
    for number, parameter in zip(way, parameters, strict=True):
        if number is not None:
            parts[number].append(parameter)
    return parts


def _unclear(ways: Ways, parameters: Sequence[Parameter]) -> str:
    """Return which parameters are not the same in the two ways that were found, for a message."""
    if len(ways.found) < 2:
        return "there are too many ways to match their shapes"
    first, second = ways.found
    differing = [p.name for p, one, other in zip(parameters, first, second, strict=True) if one != other]
    return f"some, such as {', '.join(differing[:2])}, can be in more than one of them"


def _by_decay(numbered: _Numbered, parameters: Sequence[Parameter]) -> Iterator[list[list[Parameter]]]:
    """Yield the parameters with and without weight decay by the rules that programs use, for a pair of such groups."""
    decays = [group.settings.get("weight_decay") for group in numbered.groups]
    if len(decays) != 2 or None in decays or bool(decays[0]) == bool(decays[1]):
        return
    rules: list[Callable[[Parameter], bool]] = [
        lambda p: len(p.shape) > 1,
        lambda p: not _NO_DECAY.search(p.name),
        lambda p: not p.name.endswith("bias"),
    ]
    for rule in rules:
        parts = [p for p in parameters if rule(p)], [p for p in parameters if not rule(p)]
        yield [*parts] if decays[0] else [*reversed(parts)]
