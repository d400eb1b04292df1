"""Export a checkpoint to a Hugging Face folder, the command ``export``.

Input: a checkpoint of this package or of another system. Output: a folder for ``from_pretrained``.
"""

from __future__ import annotations

import argparse
import logging

import torch

from fsdp2_strategy.checkpoint.foreign.export import export_foreign
from fsdp2_strategy.checkpoint.listing import checkpoints_with_manifest, is_checkpoint, models_in
from fsdp2_strategy.checkpoint.merged_export import export_merged
from fsdp2_strategy.checkpoint.paths import TRAINABLE, WRAPPER, CheckpointPaths
from fsdp2_strategy.checkpoint.reader import Opened, opened_with_headers
from fsdp2_strategy.checkpoint.storage import stored_in
from fsdp2_strategy.cli.foreign import newest_foreign
from fsdp2_strategy.cli.found import key_of, newest_at
from fsdp2_strategy.cli.output import Output
from fsdp2_strategy.distributed.log import log, show_log
from fsdp2_strategy.errors import CheckpointError, did_you_mean, dtype_text
from fsdp2_strategy.hf.copy_folder import copy_folder, sidecars_in
from fsdp2_strategy.hf.known_models import check_configuration
from fsdp2_strategy.hf.weights_folder import CONFIG

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""The values of ``--dtype``."""


def run(parsed: argparse.Namespace, output: Output) -> int:
    """Export a checkpoint of this package or of another system to a Hugging Face folder; return 0."""
    show_log("WARNING" if output.is_quiet else None)  # for the progress
    dtype = DTYPES[parsed.dtype] if parsed.dtype else None
    if is_checkpoint(parsed.path) or checkpoints_with_manifest(parsed.path):
        path = newest_at(parsed.path, parsed.tag)
        opened = opened_with_headers(path, key_of(parsed.key_file))
        paths = _paths_of_model(opened, parsed.model)
        _check_exportable(paths, merges=parsed.merge_adapters)
        if parsed.merge_adapters:
            export_merged(opened, paths, parsed.output, dtype, parsed.sidecars, progress=not output.is_quiet)
        else:
            if parsed.sidecars is not None:
                stored = stored_in(paths.model, opened.paths).items()
                described = {name: (entry.shape, entry.dtype) for name, entry in stored}
                check_configuration(parsed.sidecars, described, str(path))
            copy_folder(
                paths.model,
                parsed.output,
                dtype,
                opened.checksums,
                listed={opened.paths.root / name for name in opened.manifest["files"]},
                replacements=sidecars_in(parsed.sidecars) if parsed.sidecars is not None else (),
                progress=not output.is_quiet,
            )
    else:
        if parsed.key_file is not None:
            raise CheckpointError(
                f"cannot export {parsed.path}: it has no checkpoint of this package, expected one that the key of "
                "--key-file signed. Omit --key-file."
            )
        foreign = newest_foreign(parsed.path, parsed.tag, "export", trust=parsed.trust)
        path = foreign.path
        export_foreign(foreign, parsed.output, dtype, parsed.sidecars)
    if not (parsed.output / CONFIG).is_file():
        message = (
            "%s has no %s, without which from_pretrained fails. Pass --sidecars with the folder of the model's "
            "configuration and tokenizer."
        )
        log(message, parsed.output, CONFIG, level=logging.WARNING)
    output.values.append({"path": str(path), "output": str(parsed.output), "dtype": dtype and dtype_text(dtype)})
    output.line(f"exported {path} to {parsed.output}")
    return 0


def _paths_of_model(opened: Opened, name: str | None) -> CheckpointPaths:
    """Return the paths of the model to export: the only one, or that of the option ``--model``."""
    models = models_in(opened.manifest)
    if name is None and not models:
        return opened.paths
    if name in models and name is not None:
        return opened.paths.of_model(name)
    what = f"it has the models {', '.join(models)}" if models else "it has one model without a name"
    expected = f"one of {', '.join(models)}" if models else "no --model"
    hint = did_you_mean(name, models) if name is not None else " Pass --model with one of these names."
    raise CheckpointError(
        f"cannot export {opened.paths.root}: {what}, and --model is {name!r}, expected {expected}.{hint}"
    )


def _check_exportable(paths: CheckpointPaths, *, merges: bool) -> None:
    if (paths.state / TRAINABLE).is_dir():
        raise CheckpointError(
            f"cannot export {paths.root}: it contains only trainable weights, expected the full model. Load it into a "
            "model, and call save_model."
        )
    has_adapters = any(".lora_" in name or ".modules_to_save." in name for name in stored_in(paths.state / WRAPPER))
    if has_adapters and not merges:
        raise CheckpointError(
            f"cannot export {paths.root}: it contains adapters, expected none. Pass --merge-adapters to merge them "
            "into the weights; or load it into a model with adapters, and call save_model."
        )
    if merges and not has_adapters:
        raise CheckpointError(
            f"cannot merge the adapters of {paths.root}: it has none in {WRAPPER}/, expected LoRA adapters. Omit "
            "--merge-adapters."
        )
