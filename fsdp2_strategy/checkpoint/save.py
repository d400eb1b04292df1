"""Save a checkpoint: write, commit, then rotate.

Input: a sharded model with optimizer and schedule, or several by name. Output: a committed checkpoint; see
[Note: commit] in `directory`, and [Note: several models] in `several_models`.
Each phase succeeds or raises on all ranks; see [Note: agreed errors] in `agreement`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp2_strategy.checkpoint import background_save, directory
from fsdp2_strategy.checkpoint.components import ModelComponents, SidecarFiles
from fsdp2_strategy.checkpoint.data_position import DataPosition, Loader
from fsdp2_strategy.checkpoint.deletion import delete_partial
from fsdp2_strategy.checkpoint.gc_pause import gc_paused
from fsdp2_strategy.checkpoint.layout import Layout
from fsdp2_strategy.checkpoint.listing import latest_tag, list_checkpoints
from fsdp2_strategy.checkpoint.lock import acquire, release_all
from fsdp2_strategy.checkpoint.paths import (
    CHECKSUMS,
    DATA,
    EMA,
    OPTIMIZER,
    RNG,
    TRAINER_STATE,
    CheckpointPaths,
    as_path,
)
from fsdp2_strategy.checkpoint.random_state import rng_content
from fsdp2_strategy.checkpoint.rotation import check_space, checkpoints_to_delete
from fsdp2_strategy.checkpoint.save_request import ModelObjects, SaveRequest, objects_of_models
from fsdp2_strategy.checkpoint.several_models import ONLY, Models
from fsdp2_strategy.checkpoint.signature import read_key
from fsdp2_strategy.checkpoint.storage import SAME_TENSORS, stage_gathered, stage_local, write_components
from fsdp2_strategy.checkpoint.trainable_only import LeftOut
from fsdp2_strategy.checkpoint.training_state import (
    names_by_identity,
    optimizer_hyper,
    optimizer_tensors,
    schedule_state,
    unwrap_and_reshard,
)
from fsdp2_strategy.distributed.agreement import all_or_none, results_on_rank_0
from fsdp2_strategy.distributed.log import log
from fsdp2_strategy.distributed.lost_ranks import collective
from fsdp2_strategy.distributed.process_group import is_rank_0, rank, world_size
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf.peft.merge import is_peft_model
from fsdp2_strategy.hf.tokenizers import check_tokenizer
from fsdp2_strategy.model.failed_loads import check_usable
from fsdp2_strategy.model.names import modules_unchanged
from fsdp2_strategy.model.ranks import on_model_ranks
from fsdp2_strategy.model.shards import shard_size_of_model
from fsdp2_strategy.optim.schedule import check_schedule_of
from fsdp2_strategy.storage.checksums import blocks_of, blocks_of_file
from fsdp2_strategy.storage.component import Component
from fsdp2_strategy.storage.json_files import as_json, check_json, write_bytes, write_text
from fsdp2_strategy.storage.output_files import check_shared_folder


@collective
@on_model_ranks(takes_several=True)
@gc_paused()
@modules_unchanged()
def save_checkpoint(
    model: Models,
    save_dir: str | Path,
    tag: str | None = None,
    *,
    step: int | Mapping[str, int] = 0,
    optimizer: Optimizer | Mapping[str, Optimizer | None] | None = None,
    scheduler: LRScheduler | Mapping[str, LRScheduler | None] | None = None,
    client_state: dict[str, Any] | None = None,
    tokenizer: Any = None,
    ema: Mapping[str, Any] | None = None,
    loss_scale: dict[str, Any] | None = None,
    dataloader: Loader | None = None,
    seed: int = 42,
    max_num: int | None = 3,
    max_mem: float | None = 1000,
    save_latest: bool = True,
    protect: bool = False,
    metric: float | None = None,
    higher_is_better: bool = True,
    async_save: bool = False,
    only_trainable: bool = False,
    meta: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    key_file: str | Path | None = None,
) -> Path:
    """Save a sharded model and its training state as one committed checkpoint; collective.

    The ranks write their shards into a hidden directory, in parallel. Rank 0 then writes the manifest and renames the
    directory to ``tag``, which commits the checkpoint. So a crash leaves a complete checkpoint or none.

    After the commit, rank 0 deletes old checkpoints of ``save_dir``, oldest first: all but the newest ``max_num``, and
    further ones while all checkpoints together are larger than ``max_mem``. The new checkpoint, protected checkpoints
    and the checkpoint with the best ``metric`` are never deleted. Protected checkpoints count towards ``max_mem`` only.
    Old checkpoints are renamed at once, and a background thread deletes their files.

    With ``async_save``, the call returns once this rank's values are copied to host memory. A background thread then
    writes the copies, commits and rotates. So later changes by the trainer are not saved. Only one save is in flight.
    The next save, a load, `wait_for_checkpoint` and ``close`` first wait for it, and raise its error if it failed.

    A mapping of models by name is saved as one checkpoint, with one commit: a load gets all models of the same moment.
    ``step``, ``optimizer``, ``scheduler``, ``tokenizer``, ``ema`` and ``loss_scale`` are then mappings by the same
    names; one ``step`` or ``tokenizer`` may be given for all. See [Note: several models] in `several_models`.

    Args:
        model: a sharded model, or its wrapper; or a mapping of these by name.
        save_dir: directory of all checkpoints of the run, on a file system that all ranks share.
        tag: name of the checkpoint; by default ``global_step<step>``, or the layout's name for the step. An existing
            checkpoint of this name is deleted only after the new one is committed.
        step: optimizer steps taken; of several models, the largest number is that of the checkpoint.
        optimizer: saved by parameter name.
        scheduler: its state is saved as JSON.
        client_state: any JSON content; rank 0's is saved.
        tokenizer: tokenizer or processor to save in the model's folder; by default the tokenizer files are copied from
            the folder that the model was loaded from, if it is known.
        ema: averages of parameters by name (``EMA.averages``).
        loss_scale: state of a loss scale, as JSON.
        dataloader: a ResumableLoader, whose position is the same on all ranks; or another loader with ``state_dict``
            and ``load_state_dict``. The state of another loader is saved per rank, and loads only on the same number of
            ranks.
        seed: a load on another number of ranks derives the random state from it.
        max_num: maximum number of unprotected checkpoints in ``save_dir``, not counting an older one with the best
            ``metric``; None for no limit.
        max_mem: maximum total size of all checkpoints in ``save_dir``, in GB (10^9 bytes); None for no limit.
        save_latest: point the file ``latest``, or LeRobot's link ``last``, to this checkpoint.
        protect: exclude this checkpoint from rotation.
        metric: quality of the checkpoint, for example a validation accuracy.
        higher_is_better: whether a higher ``metric`` is better.
        async_save: write, commit and rotate in a background thread.
        only_trainable: omit frozen weights that a load can restore from elsewhere. All other weights are written to
            ``trainable/``, and there is no folder for ``from_pretrained``. A load compares the model's frozen weights
            with fingerprints of the omitted ones. See [Note: reloadable weights] in `trainable_only`.
        meta: JSON content of ``meta.json``, for other programs.
        layout: LeRobot's layout, or that of transformers' ``Trainer``, with the further files to save; by default our
            own layout. In both, a peft model is saved as with ``only_trainable``, and its adapters also in peft's
            format. A policy that contains a peft model is saved with all its weights.
        key_file: sign the checkpoint with this key, which only rank 0 reads; see `read_key` and [Note: signature] in
            `signature`.

    Returns:
        The checkpoint's directory; an asynchronous save creates it when it commits.

    Raises:
        CheckpointError: on every rank, for example if another run saves into the same directory. If the new checkpoint
            is not committed, those that were committed before are kept.
        ArgumentError: several models have invalid names, or an argument is no mapping by their names.
    """
    background_save.wait()
    layout = Layout() if layout is None else layout
    if not isinstance(layout, Layout):
        raise CheckpointError(
            f"cannot save: layout is {layout!r}, expected a LeRobotLayout, a TrainerLayout or None. Construct one."
        )
    models = objects_of_models(
        model, step=step, optimizer=optimizer, scheduler=scheduler, tokenizer=tokenizer, ema=ema, loss_scale=loss_scale
    )
    steps = {name: own.step for name, own in models.items()}
    request = SaveRequest(
        models=models,
        steps=steps,
        dataloader=dataloader,
        client_state=client_state or {},
        seed=seed,
        save_dir=as_path(save_dir, "save"),
        tag=layout.tag(max(steps.values())) if tag is None else tag,
        max_num=max_num,
        max_mem=max_mem,
        save_latest=save_latest,
        protect=protect,
        metric=metric,
        higher_is_better=higher_is_better,
        async_save=async_save,
        only_trainable=only_trainable,
        meta=meta,
        layout=layout,
        key_file=key_file,
    )
    for own in models.values():
        check_schedule_of(own.scheduler, own.optimizer, "save", CheckpointError)
    given_dir, staging = request.save_dir, background_save.staging()
    with all_or_none("save", CheckpointError, has_terms=True) as terms:
        request.agree_between_ranks(terms)
        request.check()
        request = _with_sharded_modules(request)
        if async_save:
            request = request.snapshot()
        request = request.resolved()
        if is_rank_0():
            terms.number = request.free_number()
    request = request.with_partial(terms.number)
    left_out = {name: _left_out(request, name) for name in models}
    laid_out = {name: _lay_out(request, name, left_out[name]) for name in models} if layout.is_collective else {}
    with all_or_none("save", CheckpointError, has_terms=True) as terms:
        laid_out = laid_out or {name: _lay_out(request, name, left_out[name]) for name in models}
        plan = _plan(request, laid_out)
        terms.require_equal([each.digest for each in plan.components], SAME_TENSORS)
        terms.require_equal(plan.data, "loaders at the same position. Save after the same batch.")
        if async_save:
            staging.begin()
            plan = replace(plan, components=stage_local(plan.components, staging.copy_to_host))
    if async_save:
        plan = replace(plan, components=stage_gathered(plan.components, staging.copy_to_host))
        background_save.save_in_background(str(request.path), functools.partial(_execute, plan))
    else:
        _execute(plan)
    return given_dir / request.tag


def _with_sharded_modules(request: SaveRequest) -> SaveRequest:
    """Unwrap the models, and check that they and their tokenizers can be saved."""
    models = {}
    for name, own in request.models.items():
        root = unwrap_and_reshard(own.model)
        check_tokenizer(root, own.tokenizer)
        check_usable(root)
        models[name] = replace(own, model=root)
    return replace(request, models=models)


_LaidOut = tuple[CheckpointPaths, ModelComponents, LeftOut | None]
"""The paths of a model, its components, and what is left out."""


def _left_out(request: SaveRequest, name: str) -> LeftOut | None:
    """Choose the weights of a model to leave out, if the request is for the trainable ones; collective in this case."""
    model = request.models[name].model
    only_trainable = request.only_trainable or (request.layout.needs_adapters_only and is_peft_model(model))
    return LeftOut.of(model) if only_trainable else None


def _lay_out(request: SaveRequest, name: str, left_out: LeftOut | None) -> _LaidOut:
    """Lay out one of the models; collective if `Layout.is_collective`."""
    own, paths = request.models[name], request.partial_paths.of_model(name)
    weights = left_out.weights if left_out else None
    return paths, request.layout.components(own.model, paths, weights, own.ema), left_out


@dataclass(frozen=True, kw_only=True)
class _SavePlan:
    """The content of a checkpoint, checked and ready to be written."""

    request: SaveRequest
    components: list[Component]
    sidecars: list[tuple[SidecarFiles, Any]]
    """The sidecar files of each model, with its tokenizer."""
    json_files: dict[Path, str]
    """Content by path; on rank 0 also that of each ``trainer_state.json``."""
    rank_files: dict[Path, bytes]
    """Content of this rank's files by path: the random state first, then the loader's state if each rank has one."""
    data: dict[str, Any] | None
    """The position of the loader, as far as it is the same on every rank."""
    key: bytes | None = field(repr=False)
    """The key to sign with, on rank 0."""
    shard_sizes: dict[str, int]
    """By the name of the model."""


def _plan(request: SaveRequest, laid_out: Mapping[str, _LaidOut]) -> _SavePlan:
    """Collect the content of the checkpoint, and check that it can be saved."""
    check_json(request.client_state, "client_state")
    key = read_key(request.key_file) if request.key_file is not None and is_rank_0() else None
    components: list[Component] = []
    sidecars: list[tuple[SidecarFiles, Any]] = []
    states: dict[str, dict[str, Any]] = {}
    for name, own in request.models.items():
        paths, on_disk, left_out = laid_out[name]
        of_training, states[name] = _training_state(own, paths, left_out)
        components += [*on_disk.components, *of_training]
        sidecars.append((on_disk.sidecars, own.tokenizer))
    data = DataPosition.of(request.dataloader) if request.dataloader is not None else None
    of_run = {
        "step": request.step,
        "seed": request.seed,
        "world_size": world_size(),
        "client_state": request.client_state,
        **states.get(ONLY, {}),
        "data": data.entry if data else None,
        "versions": _versions(),
    }
    partial = request.partial_paths
    rank_files = {partial.rank_file(RNG, rank()): rng_content()}
    if data is not None and data.rank_file is not None:
        rank_files[partial.rank_file(DATA, rank())] = data.rank_file
    shard_sizes = {name: shard_size_of_model(own.model) for name, own in request.models.items()}
    json_files = {partial.state / name: text for name, text in request.json_files(max(shard_sizes.values())).items()}
    if is_rank_0():  # which writes them
        json_files[partial.state / TRAINER_STATE] = as_json(of_run)
        for name, state in states.items():
            if name != ONLY:
                json_files[laid_out[name][0].state / TRAINER_STATE] = as_json(state)
    return _SavePlan(
        request=request.without_objects(),
        components=[replace(each, is_signed=request.is_signed) for each in components],
        sidecars=sidecars,
        json_files=json_files,
        rank_files=rank_files,
        data=data.entry if data else None,
        key=key,
        shard_sizes=shard_sizes,
    )


@functools.cache
def _versions() -> dict[str, str]:
    """Return the versions of the packages that write a checkpoint; reading one parses the metadata of its package."""
    return {"torch": torch.__version__} | {name: version(name) for name in ("transformers", "fsdp2_strategy")}


def _training_state(
    own: ModelObjects, paths: CheckpointPaths, left_out: LeftOut | None
) -> tuple[list[Component], dict[str, Any]]:
    """Return the components of a model's optimizer and averages, and its entries of ``trainer_state.json``."""
    components: list[Component] = []
    hyper = None
    if own.optimizer is not None:
        check_usable(own.optimizer)
        names = names_by_identity(own.model)
        tensors = optimizer_tensors(own.model, own.optimizer, names)
        components.append(Component.of(paths.state / OPTIMIZER, tensors, stem=OPTIMIZER))
        hyper = optimizer_hyper(own.optimizer, names)
        check_json(hyper, "optimizer")
    if own.ema is not None:
        components.append(Component.of(paths.state / EMA, own.ema, stem=EMA))
    schedule = schedule_state(own.scheduler) if own.scheduler is not None else None
    state = {
        "step": own.step,
        "loss_scale": own.loss_scale,
        "left_out": asdict(left_out) if left_out else None,
        "scheduler": schedule,
        "optimizer": hyper,
    }
    return components, state


def _execute(plan: _SavePlan) -> None:
    """Write, commit and rotate; collective. An asynchronous save runs it in the background."""
    request, save_dir = plan.request, plan.request.save_dir
    partial = request.partial_paths
    final = CheckpointPaths.of(request.path, partial.kind)
    _create_folders(plan)  # outside the try block: if it raises, another run may own the ``.partial`` directory
    try:
        with all_or_none(f"save {request.tag}", CheckpointError):
            digests = results_on_rank_0(lambda: _write(plan))
            if digests:
                check_shared_folder(file for component in plan.components for file in component.files)
                directory.warn_of_other_weights(partial, request.path, request.step)
                directory.commit(partial, request.tag, request.manifest_entries(plan.shard_sizes), digests, plan.key)
    except CheckpointError:
        if is_rank_0():
            delete_partial(partial.root)  # if that fails, the next save deletes what is left
        raise
    with all_or_none(f"rotate the checkpoints in {save_dir}", CheckpointError):
        if is_rank_0():
            if request.save_latest:
                directory.update_latest(final)
            directory.delete_replaced(save_dir, request.tag)
            log("saved %s%s", final.root, _deleted_text(request, _rotate(request, final)))


def _deleted_text(request: SaveRequest, deleted: Sequence[Path]) -> str:
    """Return the end of the log line of a save: what rotation deletes, and why."""
    if not deleted:
        return ""
    limits = f"max_num {request.max_num}" + (f", max_mem {request.max_mem:g} GB" if request.max_mem else "")
    return f"; deleting {', '.join(path.name for path in deleted)} ({limits})"


def _rotate(request: SaveRequest, final: CheckpointPaths) -> list[Path]:
    """Delete old checkpoints, as the limits say, and return them; rank 0 calls it.

    Failures are only logged.
    """
    save_dir, max_num, max_mem = request.save_dir, request.max_num, request.max_mem
    leftover_bytes = directory.leftover_bytes(save_dir)
    committed = list_checkpoints(save_dir)
    old = checkpoints_to_delete(committed, max_num=max_num, max_mem=max_mem, leftover_bytes=leftover_bytes)
    # Possible with save_latest=False, or if the disk was full.
    if latest_tag(save_dir) in {each.tag for each in old} and not directory.update_latest(final):
        old = [each for each in old if each.tag != latest_tag(save_dir)]
    return directory.remove([checkpoint.path for checkpoint in old])


def _create_folders(plan: _SavePlan) -> None:
    """Lock ``save_dir``, delete leftovers of crashed runs, and create folders for files of no component; collective."""
    request, paths = plan.request, plan.request.partial_paths
    with all_or_none(f"save into {request.save_dir}", CheckpointError):
        if is_rank_0():
            directory.make_directory(request.save_dir)
            acquire(request.save_dir)
            directory.finish_removals()  # first, because it may give back files of others to the name of this tag
            directory.check_replaceable(request.save_dir, request.tag, paths)
            directory.delete_leftovers(request.save_dir)
            needed_bytes = sum(component.total_bytes for component in plan.components)
            needed_bytes += sum(sidecars.total_bytes for sidecars, _ in plan.sidecars)
            check_space(request.save_dir, needed_bytes, request.max_mem)
            for folder in [*(path.parent for path in plan.rank_files), paths.state / CHECKSUMS]:
                folder.mkdir(parents=True)
            for folder in [component.folder for component in plan.components]:
                folder.mkdir(parents=True, exist_ok=True)
            if paths.is_lerobot:
                paths.model.mkdir(exist_ok=True)


def _write(plan: _SavePlan) -> tuple[str, str]:
    """Write all files except the manifest; return the digests of the checksum manifest of this rank.

    Collective if regions are gathered.
    """
    paths, is_signed = plan.request.partial_paths, plan.request.is_signed
    blocks = write_components(plan.components)
    for path, content in plan.rank_files.items():
        write_bytes(path, content)
        blocks[path] = blocks_of(content, is_signed=is_signed)
    if is_rank_0():
        for sidecars, tokenizer in plan.sidecars:
            sidecars.write(tokenizer)
        for path, text in plan.json_files.items():
            write_text(path, text)
        for component in plan.components:
            component.write_index()
        tensor_files = {file.path for component in plan.components for file in component.files}
        others = set(directory.shared_files(paths)) - tensor_files
        blocks |= {path: blocks_of_file(path, is_signed=is_signed) for path in others}
    return directory.write_checksums(paths, rank(), blocks)


def wait_for_checkpoint() -> None:
    """Wait until no save is in flight; not collective, but if every rank calls it, a failed save raises on all of them.

    Raises:
        CheckpointError: the save that was in flight failed. Each rank raises a failure once.
    """
    background_save.wait()


def end_saving() -> None:
    """Wait for saves and deletions, and release this process's locks; not collective, but call it on every rank."""
    try:
        background_save.finish()
    finally:
        directory.finish_removals()
        release_all()
