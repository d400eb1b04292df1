"""Load safetensors files into a model: each rank reads only the byte ranges that its shards need.

Input: a model on meta or with memory, sharded or not, and the path of its weights. Output: the same model with values,
and a report.

Headers and tied weights are checked, and the plan is compared across ranks, before the model changes. Then it gets
memory, ranks read in parallel and broadcast to replicas, and tensors that no file contains are initialised.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from torch import nn

from fsdp2_strategy.distributed.agreement import all_or_none, check_equal
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import current_device
from fsdp2_strategy.distributed.torch_internals import non_persistent_buffers, storage_address
from fsdp2_strategy.errors import CheckpointError, counted, some
from fsdp2_strategy.hf.load_plan import LoadReport, Target, check_ties, match_tensors, tensor_at
from fsdp2_strategy.hf.meta.initialize import PlainWithoutValues, TensorWithoutValues, initialize, recording_digests
from fsdp2_strategy.hf.meta.plain_tensors import PlainTensor, references_by_tensor
from fsdp2_strategy.hf.meta.recorded_init import (
    forget,
    is_recording,
    recorded_plain_tensor,
    recorded_tensor,
    was_recorded,
)
from fsdp2_strategy.hf.mismatches import LOAD_WEIGHTS, PREPARE_MODEL, Advice
from fsdp2_strategy.hf.missing_tensors import AllowedMissing, check_missing
from fsdp2_strategy.hf.peft.merge import names_without_adapters
from fsdp2_strategy.hf.transformers_models import inner_model, is_transformers_model
from fsdp2_strategy.hf.weights_folder import CONFIG, WeightsSource, open_folder, origin_of
from fsdp2_strategy.model.failed_loads import mark_usable
from fsdp2_strategy.model.fingerprint import store_initial_sums
from fsdp2_strategy.model.fsdp_state import class_name, reshard
from fsdp2_strategy.model.master_weights import refresh_masters_of
from fsdp2_strategy.model.materialize import has_uninitialised_tensors, is_uninitialised, mark_initialised, materialize
from fsdp2_strategy.model.ranks import on_model_ranks
from fsdp2_strategy.model.swapped_weights import check_own_weights
from fsdp2_strategy.model.weight_versions import count_change
from fsdp2_strategy.model.wrappers import unwrap_model
from fsdp2_strategy.storage.file_reads import read_repeats
from fsdp2_strategy.storage.regions import sources_of
from fsdp2_strategy.storage.replicated_reads import divide_reads
from fsdp2_strategy.storage.verified_read import Reader, log_repeated_reads


@collective
def load_weights(model: nn.Module, path: str | Path | None = None, *, strict: bool = True) -> LoadReport:
    """Fill a model from safetensors files; each rank reads only slices for its own shards; collective.

    Tensors on the meta device are allocated first. If the files lack a tensor that has no values, for example in a new
    value head, it gets the values that its constructor and init functions would give. These values do not depend on the
    world size.

    Args:
        model: a model, sharded or not, or its wrapper; tensors that are not sharded are read in full.
        path: a folder, a safetensors file or an index; None for the folders that ``from_pretrained`` was called with
            under `init_on_meta`.
        strict: raise if the files lack a tensor of the model that they belong to, or have one that is not in it.
            Tensors outside of that model, such as a value head, may be missing.

    Returns:
        The names of the tensors that were loaded, missing, unexpected and cast.

    Raises:
        CheckpointError: on every rank. Before the model changes: a truncated or missing file, a wrong shape, an unknown
            dtype, a wrong index, tied names with different values, (strict) names that do not match, or no path. After
            the model has changed: a read fails, or a tensor that the files lack cannot be initialised.
    """
    return _load(model, path, allowed="nothing" if strict else "anything", advice=LOAD_WEIGHTS)


def load_pretrained(model: nn.Module) -> LoadReport:
    """Load the weights of a model that was built under `init_on_meta`, as ``from_pretrained`` would; collective.

    Tensors of a head, a pooler or another module outside of the layers may be missing: they are initialised and logged.
    """
    return _load(model, None, allowed="heads", advice=PREPARE_MODEL)


@on_model_ranks
def _load(model: nn.Module, path: str | Path | None, *, allowed: AllowedMissing, advice: Advice) -> LoadReport:
    root = unwrap_model(model)
    name = class_name(root)
    repeats = read_repeats()
    with all_or_none(f"load {name}", CheckpointError):
        if is_recording():
            raise CheckpointError(
                f"cannot load {name}: the load is inside of an init_on_meta block, where tensors have no memory, "
                "expected after the block. Load when the block has ended."
            )
        check_own_weights(root, f"load {name}", CheckpointError)
        reshard(root)
        known = _origins(root, path)
        references = _references_without_values(root)
        if path is None and not known and not references and not has_uninitialised_tensors(root):
            raise CheckpointError(
                f"cannot load {name}: no path was given, all its tensors have values, and no module was built "
                "by from_pretrained under init_on_meta, expected a path. Pass the path of the weights."
            )
        targets, report = match_tensors(root, known, advice, is_folder_given=path is not None)
        check_missing(root, targets, report, allowed, advice)
        to_initialise = [_empty(t) for t in targets if not t.regions and is_uninitialised(t.tensor)]
        aliases, plain = _plain_tensors(name, references, targets)
        if path is None:
            _check_unchanged(targets)
            _check_replaced(root, targets, known)
        with Reader("comparing tied weights") as reader:
            check_ties(targets, reader)
    entries = [[(s.name, s.offset, s.dtype, s.shape) for r in t.regions for s in sources_of(r)] for t in targets]
    facts = [(t.name, is_uninitialised(t.tensor), own) for t, own in zip(targets, entries, strict=True)]
    check_equal(f"load {name}", facts, CheckpointError, "the same files on all ranks. Give every rank the same folder.")
    fix = "constructors that do the same on every rank. Give torch, NumPy and Python the same seed on all ranks."
    check_equal(f"load {name}", recording_digests(to_initialise, plain), CheckpointError, fix)
    with all_or_none(f"load {name}", CheckpointError):
        count_change(root)
        is_new = has_uninitialised_tensors(root)
        materialize(root, current_device())
        for alias, target in aliases:
            alias.put(target.tensor)
        requests, broadcasts = divide_reads((t.name, t.regions[0], t.tensor) for t in targets if t.regions)
        with Reader(f"loading {name}", fills_new_memory=is_new) as reader:
            reader.read(requests)
    for shared in broadcasts:
        shared.run()
    log_repeated_reads(repeats)
    if to_initialise or plain:
        with all_or_none(f"load {name}", CheckpointError):
            empty = [replace(e, tensor=tensor_at(e.registrations)) for e in to_initialise]
            unknown = initialize(root, empty, current_device(), plain)
            if unknown:
                raise CheckpointError(
                    f"cannot initialise {name}: the files lack {some(unknown, 'tensor')}, and neither an init function "
                    "nor a constructor gives them values, expected one of these. A constructor cannot be repeated if "
                    "it reads values from files, or draws from its own torch.Generator. Give the tensors values in a "
                    "reset_parameters method that the constructor calls, or build the module outside of init_on_meta."
                )
    forget(root)
    mark_initialised(root)
    if path is None:
        store_initial_sums(root)
    refresh_masters_of(root)
    mark_usable(root)
    where = list(dict.fromkeys(origin.where for origin, _ in known.values()))
    log("%s: %s", name, _summary(len(report.loaded), where, to_initialise))
    return report


def _summary(loaded: int, where: Sequence[str], initialised: Sequence[TensorWithoutValues]) -> str:
    """Return what a load has done, for the log.

    Args:
        loaded: number of tensors that were read.
        where: the folders or files that were read; empty for a model that was not built by ``from_pretrained``.
        initialised: tensors whose values were not in the files; those that no checkpoint has were computed.
    """
    drawn = [t.name for t in initialised if any(k not in non_persistent_buffers(own) for own, k in t.registrations)]
    computed = len(initialised) - len(drawn)
    if where:
        text = f"loaded {counted(loaded, 'tensor') if loaded else 'no tensor'} from {', '.join(where)}"
        text += f"; initialised {some(drawn, 'tensor')}, which it lacks" if drawn else ""
    else:
        text = f"initialised {counted(len(drawn), 'tensor')} as its constructors do; no pretrained weights were loaded"
    return f"{text}; computed {counted(computed, 'buffer')}" if computed else text


def needs_values(model: nn.Module) -> bool:
    """Return whether a model has tensors without values, registered or not; not collective."""
    root = unwrap_model(model)
    return has_uninitialised_tensors(root) or bool(_references_without_values(root))


def _references_without_values(root: nn.Module) -> list[list[PlainTensor]]:
    """Return the references to each plain meta tensor of a model; warn of those that the unsharded model has, too.

    ``from_pretrained`` of transformers builds each model on the meta device, and leaves plain tensors there. Remote
    code often has such a reference to a buffer, and does not use it.
    """
    found: list[list[PlainTensor]] = []
    left: list[str] = []
    for references in references_by_tensor(root):
        is_recorded = was_recorded(references[0].tensor)
        if not is_recorded and not any(_is_in_module_without_values(each, root) for each in references):
            left.append(references[0].name)
        else:
            found.append(references)
    if left:
        log(
            "%s: warning: %s on the meta device, though built outside of init_on_meta, so without values: as in the "
            "unsharded model, using them raises an error or reads uninitialised memory",
            class_name(root),
            some(left, "tensor"),
            level=logging.WARNING,
        )
    return found


def _is_in_module_without_values(reference: PlainTensor, root: nn.Module) -> bool:
    """Return whether the module that refers to a plain tensor, or else the model, was built without values."""
    module = reference.module
    has_tensors = any(True for _ in chain(module.parameters(), module.buffers()))
    return reference.owner is not None or has_uninitialised_tensors(module if has_tensors else root)


def _plain_tensors(
    name: str, references: Sequence[list[PlainTensor]], targets: Sequence[Target]
) -> tuple[list[tuple[PlainTensor, Target]], list[PlainWithoutValues]]:
    """Return plain meta tensors that are registered tensors, and those to compute; see [Note: plain tensors]."""
    registered = {id(target.tensor): target for target in targets}
    # Sharding replaced the parameters, but not other references to the earlier tensors.
    before = {
        storage_address(recorded.meta)
        for target in targets
        if isinstance(target.tensor, nn.Parameter)
        for module, key in target.registrations
        if (recorded := recorded_tensor(module, key))
    }
    aliases, plain = [], []
    for group in references:
        first = group[0]
        recorded = next((recorded_tensor(each.owner, each.key) for each in group if each.owner is not None), None)
        recorded = recorded or recorded_plain_tensor(first.tensor)
        if (target := registered.get(id(first.tensor))) is not None:
            reason = "is a parameter or buffer of the model, too" if any(each.holder is None for each in group) else ""
            aliases += [(each, target) for each in group]
        elif recorded is None:
            reason = "was not made in an init_on_meta block, or was changed after it"
        elif storage_address(recorded.meta) in before:
            reason = "is a parameter of the model, or a view of one, which is sharded under its own name only"
        elif first.tensor.grad_fn is not None:
            reason = "has an autograd graph"
        else:
            reason = recorded.recording.unknown(storage_address(recorded.meta))
            reason = f"has values that {reason}" if reason else ""
            plain.append(PlainWithoutValues(recorded, group))
        if reason:
            raise CheckpointError(
                f"cannot load {name}: {first.name}, a tensor on meta that is not registered, {reason}, expected one "
                "that its constructor computes under init_on_meta. Register it as a buffer or parameter and use it by "
                "that name, compute it in forward, or build the model outside of init_on_meta."
            )
    return aliases, plain


def _empty(target: Target) -> TensorWithoutValues:
    """Describe a tensor without values, with the dtype in which ``from_pretrained`` would draw them (None: its own)."""
    dtype = None
    if target.origin is not None:
        path, _, key = target.name_in_origin.rpartition(".")
        module = target.origin.model.get_submodule(path)
        requested = {**module._parameters, **module._buffers}.get(key)
        dtype = None if requested is None else requested.dtype
    return TensorWithoutValues(target.name, target.tensor, target.registrations, dtype)


def _check_unchanged(targets: Sequence[Target]) -> None:
    """Raise if a tensor whose values are in files was changed on meta: the load would silently undo the change."""
    for target in targets:
        recorded = [recorded_tensor(module, key) for module, key in target.registrations]
        if target.regions and any(r is not None and r.changed_since_init and not r.copied_from for r in recorded):
            raise CheckpointError(
                f"cannot load {target.name}: it was changed after from_pretrained, inside of init_on_meta, where it "
                "has no values yet. Change it after prepare_model, or build the model outside of init_on_meta."
            )


def _check_replaced(
    root: nn.Module, targets: Sequence[Target], known: Mapping[nn.Module, tuple[WeightsSource, str]]
) -> None:
    """Raise if a tensor in the place of a pretrained one was made on meta after the block: it may be a lost copy."""
    paths = {module: path for path, module in root.named_modules()}
    parameters_of = functools.cache(lambda origin: dict(origin.named_parameters(remove_duplicate=False)))
    for target in targets:
        if target.origin is not None or target.regions or not is_uninitialised(target.tensor):
            continue
        for module, key in target.registrations:
            parent, _, child = paths[module].rpartition(".")
            origin, place = known.get(root.get_submodule(parent), (None, ""))
            if origin is None or recorded_tensor(module, key) is not None:
                continue
            replaced = parameters_of(origin.model).get(".".join(filter(None, (place, child, key))))
            if replaced is not None and replaced.shape == target.tensor.shape:
                raise CheckpointError(
                    f"cannot load {target.name}: it was made on meta after the init_on_meta block, and has taken the "
                    "place of a pretrained tensor, expected it to be made in the block. If it is a copy, copy after "
                    "prepare_model or in the block; if it is new, build its module in the block."
                )


def _origins(root: nn.Module, path: str | Path | None) -> dict[nn.Module, tuple[WeightsSource, str]]:
    """Map each module whose values are in files to the origin of the values and its name in the origin's model."""
    known = {module: origin for module in root.modules() if (origin := origin_of(module))}
    if path is None:
        return known
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    is_plain = not is_transformers_model(root) and not (folder / CONFIG).is_file()
    outermost = [module for module, (_, name) in known.items() if not name]
    if not is_plain and len(outermost) == 1 and is_transformers_model(outermost[0]):
        # The model was built from another folder: its modules have the same names in the model of the new folder.
        old = known[outermost[0]][0]
        new = open_folder(old.model, path)
        return {module: (new, name) for module, (own, name) in known.items() if own is old}
    within = root if is_plain else inner_model(root)
    given = open_folder(within, path)
    return {module: (given, name) for module, name in names_without_adapters(within).items()}
