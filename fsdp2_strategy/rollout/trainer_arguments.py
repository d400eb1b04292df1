"""Read the options of an engine from a trainer's arguments.

Input: a namespace or mapping. Output: values of options, under the names of LightRFT's parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fsdp2_strategy.distributed.process_group import group_in_use, local_world_size, ranks_of
from fsdp2_strategy.errors import RolloutError

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
    """Return the name of the dtype in which an engine computes: that of the weights that will be sent.

    Without one (the dtypes of the shards are sent), ``args.bf16`` decides between bfloat16 and float16.
    """
    if dtype is None:
        dtype = torch.bfloat16 if option(args, "bf16", True) else torch.float16
    return str(dtype).removeprefix("torch.")


def position_in_engine(size: int) -> tuple[int, int]:
    """Return the number of this rank's engine, and the rank's position among the ``size`` ranks that share it.

    Successive ranks share an engine. Without a process group, there is one rank.

    Raises:
        RolloutError: ``size`` does not divide the number of ranks, or an engine would have ranks of two hosts.
    """
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
