"""Load a checkpoint: find it, check its structure, compare it with the model, then read it.

Input: a directory, and optionally a tag. Output: the model, optimizer, schedule and random generators in their saved
state; or several models by name, see [Note: several models] in `several_models`. Each phase succeeds or raises on all
ranks; see [Note: agreed errors] in `agreement`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint import background_save
from fsdp2_strategy.checkpoint.components import match_model
from fsdp2_strategy.checkpoint.data_position import (
    DataPositionMode,
    Later,
    Loader,
    check_position,
    parse_rank_state,
    restore_position,
)
from fsdp2_strategy.checkpoint.different_steps import record_resume
from fsdp2_strategy.checkpoint.file_schemas import RANK_FILE_BYTES
from fsdp2_strategy.checkpoint.find import describe_fresh_start, find_checkpoint, log_choice, other_tags
from fsdp2_strategy.checkpoint.foreign.contents import read_contents
from fsdp2_strategy.checkpoint.foreign.load import load_foreign
from fsdp2_strategy.checkpoint.foreign.recognise import Foreign
from fsdp2_strategy.checkpoint.foreign.schedule import restore_foreign_schedule
from fsdp2_strategy.checkpoint.gc_pause import gc_paused
from fsdp2_strategy.checkpoint.listing import (
    models_in,
)
from fsdp2_strategy.checkpoint.load_options import NO_OPTIMIZER, NO_SCHEDULER
from fsdp2_strategy.checkpoint.paths import (
    DATA,
    EMA,
    OPTIMIZER,
    RNG,
    CheckpointPaths,
    as_path,
    identity_of,
)
from fsdp2_strategy.checkpoint.random_state import RNG_BYTES, check_rng, derive_seed, load_rng, seed_everything
from fsdp2_strategy.checkpoint.reader import Opened, check_structure, open_checkpoint
from fsdp2_strategy.checkpoint.several_models import ONLY, Models, arguments_by_model, check_saved_models
from fsdp2_strategy.checkpoint.signature import read_key
from fsdp2_strategy.checkpoint.storage import LoadTargets, read_all, stored_in, targets_by_name
from fsdp2_strategy.checkpoint.trainable_only import LeftOut
from fsdp2_strategy.checkpoint.training_state import (
    CONVERTED_FROM,
    POSITION,
    LoadedCheckpoint,
    allocate_optimizer_state,
    check_optimizer,
    check_restored,
    check_scheduler,
    has_position_only,
    require_saved,
    restore_optimizer,
    restore_scheduler,
    settings_by_group,
    unwrap_and_reshard,
    with_first_names,
)
from fsdp2_strategy.distributed.agreement import all_or_none, check_equal, from_rank_0
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import data_rank, data_size, is_rank_0, rank, sequence_size, world_size
from fsdp2_strategy.errors import ArgumentError, CheckpointError, DamageError
from fsdp2_strategy.hf.load_plan import LoadReport
from fsdp2_strategy.model.failed_loads import unusable_unless_done
from fsdp2_strategy.model.gradients import clear_gradients
from fsdp2_strategy.model.master_weights import refresh_masters_of
from fsdp2_strategy.model.ranks import on_model_ranks
from fsdp2_strategy.model.weight_versions import count_change
from fsdp2_strategy.optim.schedule import check_schedule_of
from fsdp2_strategy.storage.file_reads import read_repeats
from fsdp2_strategy.storage.json_values import from_json_values
from fsdp2_strategy.storage.regions import Region, sources_of
from fsdp2_strategy.storage.replicated_reads import divide_reads
from fsdp2_strategy.storage.safetensors_format import read_header
from fsdp2_strategy.storage.verified_read import log_repeated_reads, ranges_of


@collective
@on_model_ranks(takes_several=True)
@gc_paused()
def load_checkpoint(
    model: Models,
    load_dir: str | Path,
    *,
    tag: str | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer | None] | None = None,
    scheduler: LRScheduler | Mapping[str, LRScheduler | None] | None = None,
    ema: Mapping[str, Any] | None = None,
    dataloader: Loader | Later | None = None,
    load_data_position: DataPositionMode = True,
    load_model: bool = True,
    strict: bool = True,
    verify: bool = True,
    fallback: bool = False,
    trust: bool = False,
    must_restore: Collection[Literal["optimizer", "scheduler"]]
    | Mapping[str, Collection[Literal["optimizer", "scheduler"]]] = (),
    load_learning_rates: bool = True,
    key_file: str | Path | None = None,
) -> LoadedCheckpoint | None:
    """Load a checkpoint, saved on any number of ranks and at any shard size, into a sharded model; collective.

    A checkpoint of only the trainable weights (``only_trainable``) omits frozen weights. Those that differ between the
    model and the saved model are read from the folder that the saved model was loaded from.

    A checkpoint of several models is loaded into a mapping of models by the same names; ``optimizer``, ``scheduler``,
    ``ema`` and ``must_restore`` are then mappings by these names, too. All models come from one checkpoint. Without
    optimizers, some of the models may be loaded alone.

    Args:
        model: a sharded model, or its wrapper; or a mapping of these by name.
        load_dir: directory of a run's checkpoints, from which the newest or ``tag`` is loaded; or one checkpoint, or
            a link to one, such as ``last``. The layout is detected.
        tag: name of the checkpoint in ``load_dir``, or of a link to one.
        optimizer: restore its state and hyper-parameters, by parameter name. The random state is restored only if an
            optimizer is given, because then the run continues.
        scheduler: restore its state.
        ema: averages of parameters by name (``EMA.averages``); restore their values.
        dataloader: restore its position. The loader must not have started. A ResumableLoader can be restored on any
            number of ranks, another loader only on the number of ranks of the save. Pass LATER if a later load will
            restore the position.
        load_data_position: "samples": if the position of a ResumableLoader was saved with another global batch size,
            continue at the same sample; otherwise, this is an error. False: the loader is not restored.
        load_model: load parameters and buffers.
        strict: raise if tensor names in the checkpoint and in the model differ. If False, load the names that both have
            and report the others. Shapes must always match.
        verify: verify the checksums of the tensors; those of headers and small files are always verified.
        fallback: if the checkpoint is corrupted, log a warning, and load the newest intact checkpoint that is older.
            This needs a directory of checkpoints as ``load_dir``, or the link ``last``.
        trust: allow checkpoints of other systems whose pickles can run code; docs/checkpoints.md lists the kinds, and
            which parts of each are restored.
        must_restore: raise if the checkpoint has the state of these, and the object is None. By default, state without
            an object is ignored.
        load_learning_rates: restore the learning rates with the optimizer's other hyper-parameters; if False, keep
            those of ``optimizer``. A ``scheduler`` that is restored sets its own.
        key_file: load only a checkpoint that this key signed, and verify every byte of all its files with the digests
            that it signed. Only rank 0 reads the key; see `read_key` and [Note: signature] in `signature`.

    Returns:
        A report of the load; None if the directory is missing, or if ``tag`` is None and nothing in the directory is a
        checkpoint or looks like weights.

    Raises:
        CheckpointError: on every rank: the tag does not exist, names or shapes differ, the checkpoint has other models,
            or it has no state for an object to restore. These errors are raised before the model is modified.
        DamageError: on every rank: files are corrupted, or the folder of the frozen weights has changed. If this is
            found only during the read, model and optimizer raise when used, until a load succeeds. With ``key_file``,
            also: there is no signature, or another key signed.
        ArgumentError: several models have invalid names, an argument is no mapping by their names, or ``key_file`` is
            given with ``verify=False``.
    """
    background_save.wait()
    _check_options(load_data_position, key_file, verify=verify)
    load_dir = as_path(load_dir, "load")
    request = _LoadRequest(
        models=_requests_of_models(model, optimizer=optimizer, scheduler=scheduler, ema=ema, must_restore=must_restore),
        dataloader=dataloader if load_data_position else None,
        load_dir=load_dir,
        tag=tag,
        load_data_position=load_data_position,
        load_model=load_model,
        strict=strict,
        verify=verify,
        fallback=fallback,
        trust=trust,
        load_learning_rates=load_learning_rates,
        key_file=None if key_file is None else str(key_file),
    )
    for own in request.models.values():
        check_schedule_of(own.scheduler, own.optimizer, "load", CheckpointError)
    request.agree_between_ranks()
    repeats = read_repeats()
    find = functools.partial(find_checkpoint, load_dir, tag, fallback=fallback, trust=trust)
    nothing = "", logging.INFO
    with all_or_none(f"find a checkpoint in {load_dir}", CheckpointError):
        found = find() if is_rank_0() else ([], None)
        if is_rank_0() and found == ([], None):
            nothing = describe_fresh_start(load_dir, trust=trust)
    paths, foreign = from_rank_0(found)
    others = from_rank_0(other_tags(paths) if is_rank_0() else [])
    with all_or_none("read the key", CheckpointError):
        key = read_key(key_file) if key_file is not None and is_rank_0() else None
    if foreign is not None:
        if is_rank_0():
            log_choice(load_dir if tag is None else load_dir / tag, foreign)
        return _load_foreign(request, foreign)
    if not paths:
        log("%s: nothing is loaded", nothing[0], level=nothing[1])
        return None
    loaded = _load_first(replace(request, key=key), paths, others, lambda: find()[0])
    log_repeated_reads(repeats)
    return loaded


_LISTS = 3
"""How often the list of checkpoints is read if a run deletes those that are loaded."""


def _load_first(
    request: _LoadRequest, paths: Sequence[Path], others: Sequence[str], find_again: Callable[[], list[Path]]
) -> LoadedCheckpoint:
    """Load the first of several checkpoints that is intact; collective. An error names the tags of ``others``.

    If a run that saves meanwhile deletes or replaces a checkpoint, the list is read again, up to `_LISTS` times in all.
    """
    lists_left = _LISTS - 1
    remaining = list(paths)
    while True:
        path = remaining.pop(0)
        identity = identity_of(path) if is_rank_0() else None
        try:
            return _load(request, path)
        except CheckpointError as error:
            if not (error.is_agreed or isinstance(error, DamageError)):
                raise
            has_moved = from_rank_0(is_rank_0() and (identity is None or identity_of(path) != identity))
            if has_moved and lists_left:
                log("%s was deleted or replaced while it was loaded: reading the list of checkpoints again", path)
                with all_or_none(f"find {path} again", CheckpointError):
                    found = find_again() if is_rank_0() else []
                lists_left, remaining = lists_left - 1, from_rank_0(found)
                if remaining:
                    continue
            if has_moved:
                raise CheckpointError(
                    f"cannot load {path}: it was deleted or replaced while it was read, expected a checkpoint that no "
                    "other run deletes. Load another one, or save it with protect=True."
                ) from error
            if not isinstance(error, DamageError):
                raise
            if not remaining and others:
                advised = _with_advice(error, path.parent, others)
                raise advised.with_traceback(error.__traceback__) from None
            if not remaining:
                raise
            log("cannot load %s: loading %s instead. %s", path, remaining[0], error, level=logging.WARNING)


def _check_options(load_data_position: object, key_file: object, *, verify: bool) -> None:
    if load_data_position not in (True, False, "samples"):
        raise ArgumentError(
            f"cannot load: load_data_position is {load_data_position!r}, expected True, False or 'samples'."
        )
    if key_file is not None and not verify:
        raise ArgumentError(
            "cannot load: verify is False and there is a key file, expected verify=True, because a signature says "
            "nothing about bytes that are not verified. Omit one of them."
        )


def _load_foreign(request: _LoadRequest, foreign: Foreign) -> LoadedCheckpoint:
    """Load the checkpoint of another system, which is not signed, and has one model and no data position."""
    if request.key_file is not None:
        raise DamageError(
            f"cannot trust {foreign.path}: it has no signature, because another system wrote it, expected a checkpoint "
            "that this key signed. Load it without a key file, and save it with one."
        )
    if request.loader is not None:
        require_saved(None, "data position", "dataloader=None", request.load_dir)
    check_saved_models(foreign.path, (), request.models, may_be_fewer=False)
    own = request.models[ONLY]
    return load_foreign(
        own.model,
        foreign,
        own.optimizer,
        own.scheduler,
        load_model=request.load_model,
        strict=request.strict,
        must_restore=own.must_restore,
        load_learning_rates=request.load_learning_rates,
    )


@collective
def foreign_training_state(load_dir: str | Path, tag: str | None = None, *, trust: bool) -> list[str] | None:
    """Return which of "optimizer" and "scheduler" another system's checkpoint has; collective.

    None if a load with these arguments would find no checkpoint of another system; empty without ``trust``, because
    only pickles can tell.
    """
    load_dir = as_path(load_dir, "load")
    state: list[str] | None = None
    with all_or_none(f"find a checkpoint in {load_dir}", CheckpointError):
        if is_rank_0() and (foreign := find_checkpoint(load_dir, tag, fallback=False, trust=True)[1]):
            state = read_contents(foreign).training_state if trust else []
    shared: list[str] | None = from_rank_0(state)
    return shared


@dataclass(frozen=True, kw_only=True)
class _ModelRequest:
    """A model, and the objects to restore with it; `load_checkpoint` documents them."""

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    ema: Mapping[str, torch.Tensor] | None
    must_restore: Collection[str]


def _requests_of_models(models: Models, **given: Any) -> dict[str, _ModelRequest]:
    of_each = arguments_by_model("load", models, ("must_restore",), given)
    return {name: _ModelRequest(**own | {"must_restore": own["must_restore"] or ()}) for name, own in of_each.items()}


@dataclass(frozen=True, kw_only=True)
class _LoadRequest:
    """The arguments of a load; `load_checkpoint` documents them."""

    models: Mapping[str, _ModelRequest]
    """The objects to restore, by the name of their model."""
    dataloader: Loader | Later | None
    load_dir: Path
    tag: str | None
    load_data_position: DataPositionMode
    load_model: bool
    strict: bool
    verify: bool
    fallback: bool
    trust: bool
    load_learning_rates: bool
    key_file: str | None
    """Load only a checkpoint that this key signed."""
    key: bytes | None = field(default=None, repr=False)
    """The key, on rank 0."""

    def agree_between_ranks(self) -> None:
        """Raise if the ranks request different loads, or an object is None on some ranks only; collective."""
        objects = {name: (own.optimizer, own.scheduler, own.ema) for name, own in self.models.items()}
        arguments = (
            {name: value for name, value in vars(self).items() if name not in ("models", "dataloader")},
            [tuple(own.must_restore) for own in self.models.values()],
            [(name, [each is None for each in own]) for name, own in objects.items()],
            self.dataloader is None,
        )
        check_equal("load", arguments, CheckpointError, "the same directory, tag and objects to load on all ranks.")

    @property
    def loader(self) -> Loader | None:
        """The loader whose position this load restores."""
        return None if isinstance(self.dataloader, Later) else self.dataloader

    @property
    def any_batch_size(self) -> bool:
        """Whether the position may have been saved with another global batch size."""
        return self.load_data_position == "samples"

    @property
    def restores_optimizer(self) -> bool:
        """Whether an optimizer is restored, so that the run continues."""
        return any(own.optimizer is not None for own in self.models.values())


def _load(request: _LoadRequest, path: Path) -> LoadedCheckpoint:
    opened, of_run = _open(request, path)
    # Raised on every rank, because the manifest and the names are equal on all.
    continues = request.restores_optimizer or any(own.must_restore for own in request.models.values())
    check_saved_models(path, models_in(opened.manifest), request.models, may_be_fewer=not continues)
    with all_or_none(f"load {path}", DamageError):
        states = {name: of_run if name == ONLY else opened.state_of(name) for name in request.models}
        rng, rank_state = _files_of_rank(opened, of_run, request.loader)
    with all_or_none(f"load {path}", CheckpointError):
        models = request.models.items()
        plans = {name: _plan(own, request, opened.paths.of_model(name), states[name]) for name, own in models}
        if request.loader is not None:
            check_position(request.loader, of_run.get("data"), path, any_batch_size=request.any_batch_size)
    frozen = []
    for name, plan in plans.items():
        left_out = LeftOut.from_json(states[name].get("left_out") if request.load_model else None)
        frozen.append((plan.root, left_out, left_out.find_differing(plan.root, path, strict=request.strict)))
    with all_or_none(f"load {path}", DamageError):
        targets = [target for plan in plans.values() for target in plan.targets]
        requests, broadcasts = divide_reads(targets)
        if request.verify:
            for file, begin, end in ranges_of(requests):
                opened.checksums.covering(file, begin, end)  # reads the checksum manifests that are needed
        if request.key_file is not None:
            _check_other_files(opened, targets)
    changed: list[nn.Module | Optimizer] = [plan.root for plan in plans.values()] if request.load_model else []
    changed += [own.optimizer for own in request.models.values() if own.optimizer is not None]
    with unusable_unless_done(changed):
        with torch.no_grad():
            for plan in plans.values():
                clear_gradients(plan.root)
                count_change(plan.root)
            read_all(requests, opened.checksums if request.verify else None, f"loading {path.name}")
            for broadcast in broadcasts:
                broadcast.run()
            for root, left_out, differing in frozen:
                left_out.restore(root, differing, path)
        with all_or_none(f"load the run's state from {path}", CheckpointError):
            _restore_state(request, plans, states, of_run, rng=rng, rank_state=rank_state)
    _log_loaded(request, opened, plans, states, of_run)
    results = {name: _result(path, of_run, states[name], plan) for name, plan in plans.items()}
    if ONLY in results:
        return results[ONLY]
    return LoadedCheckpoint(path=path, step=of_run["step"], client_state=of_run["client_state"], models=results)


def _check_other_files(opened: Opened, targets: LoadTargets) -> None:
    """Verify this rank's share of the files of which the ranks together do not read all tensors."""
    read = {(entry.path, entry.offset) for _, region, _ in targets for entry in sources_of(region)}
    of_file = {path: read_header(path).values() for path, _ in read}
    full = (path for path, entries in of_file.items() if all((path, e.offset) in read for e in entries if e.nbytes))
    names = {opened.paths.name_of(path) for path in full}
    rest = [name for name in opened.manifest["files"] if name not in names]
    opened.check_files(rest, share=rank(), shares=world_size())


def _result(path: Path, of_run: Mapping[str, Any], state: Mapping[str, Any], plan: _LoadPlan) -> LoadedCheckpoint:
    return LoadedCheckpoint(
        path=path,
        step=state["step"],
        client_state=of_run["client_state"],
        missing=tuple(plan.report.missing),
        unexpected=tuple(plan.report.unexpected),
        cast=tuple(plan.report.cast),
        loss_scale=state.get("loss_scale"),
    )


def _log_loaded(
    request: _LoadRequest,
    opened: Opened,
    plans: Mapping[str, _LoadPlan],
    states: Mapping[str, Mapping[str, Any]],
    of_run: Mapping[str, Any],
) -> None:
    """Log what was loaded, what the checkpoint has in addition, and if the models are from different steps."""
    path = opened.paths.root
    log("loaded %s (step %d)", path.absolute(), of_run["step"])
    for name, own in request.models.items():
        of_model = opened.paths.of_model(name).state
        if own.ema is None and request.load_model and (of_model / EMA).is_dir():
            log("%s has averages, which are not loaded: pass ema= to load them", of_model, level=logging.WARNING)
        if own.optimizer is not None:
            record_resume(plans[name].root, name, path, states[name]["step"])
    is_position_ignored = request.dataloader is None and request.load_data_position
    if is_position_ignored and request.restores_optimizer and of_run.get("data"):
        log("%s has a data position, which is not loaded: pass dataloader= to load it", path, level=logging.WARNING)


def _restore_state(
    request: _LoadRequest,
    plans: Mapping[str, _LoadPlan],
    states: Mapping[str, Mapping[str, Any]],
    of_run: Mapping[str, Any],
    *,
    rng: bytes | None,
    rank_state: Any,
) -> None:
    """Restore optimizers, schedules, random state and data position, once the tensors are read."""
    for name, own in request.models.items():
        plan, state = plans[name], states[name]
        if own.optimizer is not None:
            restore_optimizer(
                plan.root,
                own.optimizer,
                plan.optimizer_state,
                plan.optimizer_settings,
                plan.optimizer_values,
                load_learning_rates=request.load_learning_rates,
            )
        elif request.load_model:
            refresh_masters_of(plan.root)
        if own.scheduler is not None and of_run.get(CONVERTED_FROM):
            saved, has_new_rates = from_json_values(state["scheduler"]), own.optimizer is not None
            has_new_rates &= request.load_learning_rates and any("lr" in each for each in plan.optimizer_settings)
            restore_foreign_schedule(own.scheduler, saved, saved[POSITION], has_new_rates=has_new_rates)
        elif own.scheduler is not None:
            restore_scheduler(own.scheduler, state["scheduler"])
    if request.restores_optimizer and rng is not None:
        load_rng(rng)
    elif request.restores_optimizer:
        seed_everything(derive_seed(of_run["seed"], of_run["step"], data_rank(), data_size()))
    if request.loader is not None:
        restore_position(request.loader, of_run["data"], rank_state, any_batch_size=request.any_batch_size)


def _open(request: _LoadRequest, path: Path) -> tuple[Opened, dict[str, Any]]:
    """Open a checkpoint, and read its ``trainer_state.json``; collective."""
    with all_or_none(f"load {path}", DamageError):
        manifest = check_structure(path, request.key) if is_rank_0() else {}
    manifest = from_rank_0(manifest)
    with all_or_none(f"load {path}", DamageError):
        same_ranks = len(manifest["checksums"]) == world_size()
        opened = open_checkpoint(
            path, manifest, rank=rank() if same_ranks else None, is_signed=request.key_file is not None
        )
        opened.check_headers()
        return opened, opened.state_of()


def _files_of_rank(opened: Opened, state: Mapping[str, Any], loader: Loader | None) -> tuple[bytes | None, Any]:
    """Return the content of this rank's random state, and its loader's state; None if the number of ranks has changed.

    Ranks that share sequences get the same random state, whether or not they did so in the saved run.
    """
    saved_ranks, rng, data = state["world_size"], None, None
    if saved_ranks == world_size():
        path = opened.paths.rank_file(RNG, data_rank() * sequence_size())
        rng = opened.read(path, RNG_BYTES)
        check_rng(rng, path)
    data_ranks = (state.get("data") or {}).get("ranks")
    if loader is not None and data_ranks == data_size():
        path = opened.paths.rank_file(DATA, data_rank() * (saved_ranks // data_ranks))
        data = parse_rank_state(opened.read(path, RANK_FILE_BYTES), path)
    return rng, data


@dataclass(frozen=True)
class _LoadPlan:
    """The tensors to read into a model, and the optimizer's state to restore."""

    root: nn.Module
    """The sharded module."""
    report: LoadReport
    targets: LoadTargets
    optimizer_state: dict[str, dict[str, torch.Tensor]]
    """The optimizer's tensors among the targets, by parameter name and key."""
    optimizer_settings: list[dict[str, Any]]
    """Hyper-parameters of each group."""
    optimizer_values: Mapping[str, Any]
    """State that is not a tensor, as JSON values, by parameter name."""


def _plan(own: _ModelRequest, request: _LoadRequest, paths: CheckpointPaths, state: Mapping[str, Any]) -> _LoadPlan:
    """Compare a checkpoint with the objects to restore, and allocate optimizer state; reads only headers."""
    root = unwrap_and_reshard(own.model)
    given = {"optimizer": own.optimizer, "scheduler": own.scheduler}
    saved = [name for name in given if state[name] is not None and not has_position_only(state[name])]
    check_restored(own.must_restore, given, saved, paths.root)
    targets: list[tuple[str, Region, torch.Tensor]] = []
    report = LoadReport()
    optimizer_state: dict[str, dict[str, torch.Tensor]] = {}
    settings: list[dict[str, Any]] = []
    values: Mapping[str, Any] = {}
    if request.load_model:
        left_out = (state.get("left_out") or {}).get("weights", ())
        of_model, report = match_model(root, paths, left_out, strict=request.strict)
        targets += of_model
    if (optimizer := own.optimizer) is not None:
        require_saved(state["optimizer"], "optimizer", NO_OPTIMIZER, paths.root)
        hyper, stored = state["optimizer"], stored_in(paths.state / OPTIMIZER, paths)
        if state.get(CONVERTED_FROM):
            hyper, stored = with_first_names(root, hyper, stored)
        check_optimizer(root, optimizer, hyper, strict=request.strict)
        settings, values = settings_by_group(root, optimizer, hyper), hyper["values"]
        layout = {name: (entry.shape, entry.dtype) for name, entry in stored.items()}
        optimizer_state, tensors = allocate_optimizer_state(root, optimizer, layout, strict=request.strict)
        targets += targets_by_name("optimizer", tensors, stored)
    if own.ema is not None:
        require_saved((paths.state / EMA).is_dir() or None, "averages (ema)", "ema=None", paths.root)
        targets += targets_by_name("averages (ema)", own.ema, stored_in(paths.state / EMA, paths))
    if own.scheduler is not None:
        require_saved(state["scheduler"], "scheduler", NO_SCHEDULER, paths.root)
        if not state.get(CONVERTED_FROM):
            check_scheduler(own.scheduler, state["scheduler"])
    return _LoadPlan(root, report, targets, optimizer_state, settings, values)


def _with_advice(error: DamageError, directory: Path, others: Sequence[str]) -> DamageError:
    """Return an error whose message also names the other checkpoints of the directory."""
    advised = DamageError(
        f"{error} Load {directory} with fallback=True, for an older checkpoint, or with tag= for one of {list(others)}."
    )
    advised.is_agreed = error.is_agreed
    return advised
