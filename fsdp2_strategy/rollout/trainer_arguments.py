"""What the engines of vLLM and SGLang have in common: their package, and options from a trainer's arguments.

Input: a namespace or mapping. Output: values of options, under the names of LightRFT's parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.process_group import group_in_use, local_world_size, ranks_of
from fsdp2_strategy.errors import RolloutError, dtype_text
from fsdp2_strategy.extras import install_command

_REQUIRED = object()


def option(args: Any, name: str, default: Any = _REQUIRED) -> Any:
    """Return an option, or the default if it is absent or None; without a default, raise."""
    value = args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise RolloutError(f"cannot build an engine: args has no {name}, expected a value. Set args.{name}.")
    return default


def dtype_name(args: Any, dtype: torch.dtype | None) -> str:
    """Return the dtype of the weights that will be sent; without one, that of ``args.bf16``."""
    if dtype is None:
        dtype = torch.bfloat16 if option(args, "bf16", True) else torch.float16
    return dtype_text(dtype)


def position_in_engine(size: int) -> tuple[int, int]:
    """Return the number of this rank's engine, and its position among the ``size`` successive ranks that share it."""
    ranks = ranks_of(group_in_use()) if dist.is_initialized() else [0]
    if len(ranks) % size:
        raise RolloutError(
            f"cannot build an engine: engine_tp_size is {size}, expected a divisor of the number of ranks "
            f"{len(ranks)}. Pass another engine_tp_size."
        )
    on_host = local_world_size(len(ranks))
    if on_host % size:
        raise RolloutError(
            f"cannot build an engine: engine_tp_size is {size}, and there are {on_host} ranks on a host, expected "
            "engines that lie within one host. Pass an engine_tp_size that divides the number of ranks on a host."
        )
    return divmod(ranks.index(dist.get_rank()) if dist.is_initialized() else 0, size)


def import_package(name: str) -> Any:
    """Import the package of an engine that has the same name."""
    try:
        return import_module(name)
    except ImportError as error:
        raise RolloutError(
            f"cannot build an engine: the package {name} is not installed, expected it for the engine {name!r}. "
            f"{install_command(name)}, or use the engine 'transformers'."
        ) from error


def check_allows_sleep(allows_sleep: bool) -> None:
    """Raise if an engine was not built to be put to sleep."""
    if not allows_sleep:
        raise RolloutError(
            "cannot put the engine to sleep: it was built without allows_sleep, expected it. Pass "
            "--enable_engine_sleep, or build it with allows_sleep=True."
        )
