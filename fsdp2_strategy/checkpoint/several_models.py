"""Take one model, or several models by name, and pair each with its optimizer, schedule and other arguments.

Input: the arguments of a save or a load. Output: the arguments of each model.

[Note: several models] A save or a load of a mapping treats its models as one unit: one tag, one manifest, one commit.
Each model has the folders of a checkpoint of one model, under its name. Data position, client state and random state
belong to the run, and are stored once. Arguments that belong to a model (optimizer, schedule, averages, steps) are then
mappings by the same names, or one value for all models where that has a meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fsdp2_strategy.checkpoint.paths import is_model_name
from fsdp2_strategy.errors import ArgumentError, CheckpointError, did_you_mean
from fsdp2_strategy.model.wrappers import unwrap_model

Models = nn.Module | Mapping[str, nn.Module]
"""One model, or several by name."""

ONLY = ""
"""The name of a model that is saved or loaded alone."""


def models_by_name(action: str, models: Models) -> dict[str, nn.Module]:
    """Return the models by name, in the same order on all ranks; the name of a single model is `ONLY`."""
    if not isinstance(models, Mapping):
        return {ONLY: models}  # the callers check its type
    if not models:
        raise ArgumentError(f"cannot {action}: the models are an empty mapping, expected at least one. Pass a model.")
    names: dict[int, str] = {}
    for name, model in models.items():
        if not is_model_name(name):
            raise ArgumentError(
                f"cannot {action}: the name of a model is {name!r}, expected a plain directory name that does not "
                "begin with a dot, and is no name of a checkpoint's own folders and files. Use a name such as 'actor'."
            )
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"cannot {action}: the model {name!r} is a {type(model).__name__}, expected an nn.Module. Pass models "
                "by name."
            )
        root = unwrap_model(model)
        if id(root) in names:
            raise ArgumentError(
                f"cannot {action}: {names[id(root)]!r} and {name!r} are the same model, expected each model once. "
                "Remove one of the names."
            )
        names[id(root)] = name
    return dict(sorted(models.items()))


def for_each(action: str, what: str, names: Collection[str], given: Any, *, is_shared: bool = False) -> dict[str, Any]:
    """Return the argument ``what`` of each model, by name; None for the models that a mapping does not name.

    A value that is not a mapping is that of a single model, or with ``is_shared`` that of each model.
    """
    if ONLY in names:
        return {ONLY: given}
    if given is None or (is_shared and not isinstance(given, Mapping)):
        return dict.fromkeys(names, given)
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"cannot {action}: {what} is a {type(given).__name__}, expected a mapping by the names of the models "
            f"({', '.join(names)}), because several models were passed. Pass {what}={{{next(iter(names))!r}: ...}}."
        )
    if unknown := [name for name in given if name not in names]:
        raise ArgumentError(
            f"cannot {action}: {what} has the name {unknown[0]!r}, expected names of the models ({', '.join(names)})."
            f"{did_you_mean(str(unknown[0]), names)}"
        )
    return {name: given.get(name) for name in names}


def arguments_by_model(
    action: str, models: Models, shared: Collection[str], given: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the arguments of each model by its name, with the ``model`` itself; ``shared`` ones as in `for_each`."""
    by_name = models_by_name(action, models)
    of_each = {what: for_each(action, what, by_name, value, is_shared=what in shared) for what, value in given.items()}
    return {
        name: {"model": model, **{what: values[name] for what, values in of_each.items()}}
        for name, model in by_name.items()
    }


def joined(by_name: Mapping[str, Any]) -> Any:
    """Return the argument of `for_each` that its result came from: the value of a single model, or the mapping."""
    return by_name[ONLY] if ONLY in by_name else dict(by_name)


def check_saved_models(path: Path, saved: Collection[str], names: Collection[str], *, may_be_fewer: bool) -> None:
    """Raise if the checkpoint does not have the models of a load; with ``may_be_fewer``, it may have further ones."""
    if ONLY in names:
        if saved:
            one = next(iter(saved))
            raise CheckpointError(
                f"cannot load {path}: it has the models {', '.join(saved)}, expected a checkpoint of one model. Pass a "
                f"mapping of models by name: load_ckpt({{{one!r}: model, ...}}, ...)."
            )
        return
    if not saved:
        raise CheckpointError(
            f"cannot load {path}: it has one model without a name, expected the models {', '.join(names)}. Pass the "
            "model itself instead of a mapping."
        )
    if missing := [name for name in names if name not in saved]:
        raise CheckpointError(
            f"cannot load {path}: it has the models {', '.join(saved)}, expected also {', '.join(missing)}."
            f"{did_you_mean(missing[0], saved)}"
        )
    if not may_be_fewer and (others := [name for name in saved if name not in names]):
        raise CheckpointError(
            f"cannot load {path}: it has the models {', '.join(saved)}, expected only {', '.join(names)}, because a "
            f"run that continues needs all of them. Pass {', '.join(others)}, too; or load only models, without "
            "optimizers: load_module_only=True (load_checkpoint: optimizer=None)."
        )
