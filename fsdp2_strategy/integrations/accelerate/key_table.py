"""Define the supported keys of accelerate's configuration file.

Input: nothing. Output: one table of keys, for `translate`; docs/coming_from_accelerate.md prints the table.

[Note: keys] The table has four kinds of keys:

- "configures": the key sets fields of StrategyConfig.
- "launcher": the launcher has already applied the key.
- "replaced": another setting or mechanism replaces the key; ``info_values`` and ``warning_values`` are logged.
- "refused": a value that needs an unsupported feature raises an error.

Top-level keys that are not in the table, such as those of DeepSpeed, Megatron, fp8, MPI, TPUs and SageMaker, are
ignored if their value is empty or off, and raise otherwise. A key in the wrong nested mapping, or an unknown key in a
nested mapping, raises unless its value is null.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["configures", "launcher", "replaced", "refused"]

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's sharding strategies; accelerate numbers them from 1 in this order."""

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


class UnreadableError(Exception):
    """Raised if a key does not accept a value; the message describes the accepted values."""


def flag(value: object) -> bool:
    """Parse a bool; accept accelerate's spellings, such as ``yes``, ``on`` and ``1``."""
    word = str(value).lower()
    if word not in (*_TRUE, *_FALSE):
        raise UnreadableError("true or false")
    return word in _TRUE


def only_false(value: object) -> bool:
    """Parse false; raise if the value is true."""
    if flag(value):
        raise UnreadableError("false")
    return False


def is_off(value: object) -> bool:
    """Return whether a value is empty or false."""
    return not value or str(value).lower() in _FALSE


def integer(value: object) -> int:
    """Parse an integer; accept strings, because YAML reads ``1e8`` as a string."""
    try:
        number = float(str(value))
    except ValueError:
        raise UnreadableError("an integer") from None
    if not number.is_integer():
        raise UnreadableError("an integer")
    return int(number)


def choice(*choices: str, numbered: bool = False) -> Callable[[object], str]:
    """Return a parser that accepts one of ``choices``; if ``numbered``, also its number, counted from 1.

    False is parsed as ``NO``, because YAML reads ``NO`` as false.
    """

    def read(value: object) -> str:
        word = "NO" if value is False else str(value).upper()
        if numbered and word.isdecimal() and 1 <= int(word) <= len(choices):
            return choices[int(word) - 1]
        if word not in choices:
            raise UnreadableError(f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)}")
        return word

    return read


def resharding(value: object) -> bool | str:
    """Parse a bool, as for FSDP2, or the name or number of an FSDP1 strategy."""
    if str(value).lower() in (*_TRUE, *_FALSE):
        return flag(value)
    try:
        return choice(*STRATEGIES, numbered=True)(value)
    except UnreadableError as error:
        raise UnreadableError(f"true, false or {error}") from None


def names(value: object) -> tuple[str, ...]:
    """Parse a list of names, or one string with commas between them."""
    parts = value.split(",") if isinstance(value, str) else _texts(value)
    return tuple(part.strip() for part in parts if part.strip())


def expressions(value: object) -> tuple[str, ...]:
    """Parse one regular expression, or a list of them."""
    return tuple(filter(None, [value] if isinstance(value, str) else _texts(value)))


def _texts(value: object) -> Sequence[str]:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return value
    raise UnreadableError("a string or a list of strings")


@dataclass(frozen=True)
class Key:
    """The meaning of a key; see [Note: keys]."""

    kind: Kind
    text: str = ""
    """What the key configures, what replaces it, or what to do if it is refused."""
    read: Callable[[object], Any] = lambda value: value
    """Function that parses the value in the file, or raises `UnreadableError` if it does not accept the value."""
    sets: str | None = None
    """The field of StrategyConfig that is set to the parsed value."""
    info_values: tuple[object, ...] = ()
    """Values that are logged although they have the requested effect."""
    warning_values: tuple[object, ...] = ()
    """Values that are logged as a warning, because they do not have the requested effect."""
    fix: str = ""
    """What to do if ``read`` does not accept the value; refused keys use ``text`` instead."""


_BACKEND = Key(
    "configures",
    "`compile_blocks`: NO is false, INDUCTOR is true, other backends are passed by name",
    choice(
        *("NO", "INDUCTOR", "EAGER", "AOT_EAGER", "CUDAGRAPHS", "TENSORRT", "ONNXRT", "TVM", "AOT_TS_NVFUSER"),
        *("NVPRIMS_NVFUSER", "OFI", "FX2TRT", "TORCHXLA_TRACE_ONCE", "AOT_TORCHXLA_TRACE_ONCE", "HPU_BACKEND"),
        "NEURON",
    ),
)
_PREFETCH = Key(
    "replaced",
    "nothing; FSDP2 gathers one unit ahead in backward, like BACKWARD_PRE (`prefetch_depth` for more)",
    choice("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", numbered=True),
    info_values=("BACKWARD_PRE",),
    warning_values=("BACKWARD_POST", "NO_PREFETCH"),
)
_OPTION_OF_SEQUENCES = Key("replaced", "nothing; `shard_sequence` takes sequences of any length, for any attention")

TOP: Mapping[str, Key] = {
    "compute_environment": Key(
        "refused", "Only LOCAL_MACHINE is supported: leave it out, and start with torchrun.", choice("LOCAL_MACHINE")
    ),
    "distributed_type": Key(
        "configures",
        "FSDP shards as `fsdp_config` describes; MULTI_GPU, MULTI_CPU and NO set `shard_size=1`; others are refused",
        choice("FSDP", "MULTI_GPU", "MULTI_CPU", "NO"),
        fix="Use FSDP, which shards weights, gradients and optimizer state over CPUs or CUDA devices.",
    ),
    "mixed_precision": Key(
        "configures",
        "sets `bf16` or `fp16`; with `no` or without the key, neither; fp8 is refused",
        choice("NO", "BF16", "FP16"),
        fix="Use bf16.",
    ),
    "fp16": Key("configures", "`fp16`, if `mixed_precision` is left out", flag),
    "dynamo_backend": _BACKEND,
    "num_processes": Key("launcher", "with HYBRID_SHARD on several machines, also determines `shard_size`", integer),
    "num_machines": Key("launcher", "with HYBRID_SHARD, also determines `shard_size`", integer),
    **dict.fromkeys(
        (
            *("machine_rank", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
            "main_training_function",
        ),
        Key("launcher"),
    ),
    "use_cpu": Key(
        "launcher",
        "true is refused if there is a CUDA device, because the device would be used anyway",
        flag,
        fix="Set CUDA_VISIBLE_DEVICES= to hide the device, or set use_cpu to false.",
    ),
    "debug": Key(
        "replaced",
        "ranks that run different units always cause an error that names the units",
        flag,
        warning_values=(True,),
    ),
    "enable_cpu_affinity": Key(
        "replaced",
        "`torchrun --numa-binding node` binds each process to the cores next to its device",
        flag,
        warning_values=(True,),
    ),
}

FSDP: Mapping[str, Key] = {
    "fsdp_version": Key("replaced", "nothing; both versions use FSDP2", choice("1", "2"), info_values=("1",)),
    "fsdp_reshard_after_forward": Key(
        "configures",
        "`reshard_after_forward`; the name of a strategy has the same meaning as in `fsdp_sharding_strategy`",
        resharding,
    ),
    "fsdp_sharding_strategy": Key(
        "replaced",
        "`reshard_after_forward` (true for FULL_SHARD and HYBRID_SHARD) and `shard_size` (the ranks of a machine for "
        "HYBRID_SHARD and HYBRID_SHARD_ZERO2, 1 for NO_SHARD), which are set from it; ignored with `fsdp_version: 2`, "
        "as by accelerate",
        choice(*STRATEGIES, numbered=True),
        info_values=STRATEGIES,
    ),
    "fsdp_offload_params": Key("configures", "`cpu_offload`", flag, "cpu_offload"),
    "fsdp_auto_wrap_policy": Key(
        "configures",
        "selects one of the next two keys; with NO_WRAP, blocks are still detected and sharded, because otherwise the "
        "whole model would be gathered at once",
        choice("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        warning_values=("NO_WRAP",),
    ),
    "fsdp_transformer_layer_cls_to_wrap": Key("configures", "`block_class_names`, with TRANSFORMER_BASED_WRAP", names),
    "fsdp_min_num_params": Key(
        "configures",
        "`min_unit_params`, with SIZE_BASED_WRAP: 100,000,000 if it is left out; with 0, blocks are detected",
        integer,
    ),
    "fsdp_activation_checkpointing": Key("configures", "`activation_checkpointing`", flag, "activation_checkpointing"),
    "fsdp_activation_checkpointing_offload": Key(
        "refused", "Activations stay on the device: set it to false. `cpu_offload` saves device memory.", only_false
    ),
    "fsdp_ignored_modules": Key("configures", "`ignored_modules`", expressions, "ignored_modules"),
    "fsdp_use_orig_params": Key(
        "replaced",
        "nothing; parameters are never flattened, so they keep their names, groups and `requires_grad`",
        flag,
        info_values=(True,),
        warning_values=(False,),
    ),
    "fsdp_sync_module_states": Key(
        "replaced",
        "nothing; all ranks build the model under one seed or from the same files, and `prepare_model` checks this",
        flag,
        info_values=(False,),
        warning_values=(True,),
    ),
    "fsdp_cpu_ram_efficient_loading": Key(
        "replaced",
        "`init_model_context(meta_init=True)` around `from_pretrained`: each rank reads only its own shards",
        flag,
        info_values=(False,),
        warning_values=(True,),
    ),
    "fsdp_backward_prefetch": _PREFETCH,
    "fsdp_backward_prefetch_policy": _PREFETCH,
    "fsdp_forward_prefetch": Key(
        "replaced",
        "`prefetch_depth=1` gathers one unit ahead, in forward and in backward",
        flag,
        info_values=(False,),
        warning_values=(True,),
    ),
    "fsdp_limit_all_gathers": Key(
        "replaced", "nothing; FSDP2 reuses the memory of gathers without blocking the CPU", flag, info_values=(False,)
    ),
    "fsdp_state_dict_type": Key(
        "replaced",
        "nothing; each rank writes its own shards to a checkpoint, which can be read as full tensors",
        choice("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", numbered=True),
        info_values=("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        warning_values=("LOCAL_STATE_DICT",),
    ),
}

DYNAMO: Mapping[str, Key] = {
    "dynamo_backend": _BACKEND,
    "dynamo_use_regional_compilation": Key(
        "replaced", "nothing; each block is compiled separately", flag, info_values=(False,)
    ),
    "dynamo_mode": Key(
        "replaced",
        "nothing; blocks are compiled in the default mode",
        choice("DEFAULT", "REDUCE-OVERHEAD", "MAX-AUTOTUNE"),
        warning_values=("REDUCE-OVERHEAD", "MAX-AUTOTUNE"),
    ),
    "dynamo_use_fullgraph": Key("replaced", "nothing; a block may become several graphs", flag, warning_values=(True,)),
    "dynamo_use_dynamic": Key(
        "replaced", "nothing; torch.compile detects which shapes change", flag, warning_values=(True,)
    ),
}

PARALLELISM: Mapping[str, Key] = {
    "parallelism_config_dp_shard_size": Key(
        "configures", "`shard_size`, multiplied by the sequence-parallel size, if the product is more than 1", integer
    ),
    "parallelism_config_dp_replicate_size": Key(
        "configures",
        "nothing; the number of replicas is the number of ranks / (`shard_size` x `tensor_parallel_size`)",
        integer,
    ),
    "parallelism_config_tp_size": Key("configures", "`tensor_parallel_size`", integer, sets="tensor_parallel_size"),
    "parallelism_config_cp_size": Key(
        "configures",
        "`sequence_parallel_size`; attention exchanges heads between the ranks, not keys in a ring",
        integer,
    ),
    "parallelism_config_sp_size": Key("configures", "`sequence_parallel_size`", integer),
    "parallelism_config_cp_backend": _OPTION_OF_SEQUENCES,
    "parallelism_config_cp_comm_strategy": _OPTION_OF_SEQUENCES,
    "parallelism_config_sp_backend": _OPTION_OF_SEQUENCES,
    "parallelism_config_sp_seq_length": _OPTION_OF_SEQUENCES,
    "parallelism_config_sp_seq_length_is_variable": _OPTION_OF_SEQUENCES,
    "parallelism_config_sp_attn_implementation": _OPTION_OF_SEQUENCES,
}

SECTIONS: Mapping[str, tuple[str, Mapping[str, Key]]] = {
    "fsdp_config": ("fsdp_", FSDP),
    "dynamo_config": ("dynamo_", DYNAMO),
    "parallelism_config": ("parallelism_config_", PARALLELISM),
}
"""For each nested mapping of the file: the prefix of its keys, which the file may omit, and its keys."""

KEYS: Mapping[str, Key] = {**TOP, **FSDP, **DYNAMO, **PARALLELISM}


def hint_for(name: str) -> str:
    """Return a hint for an unsupported key: the nested mapping that it belongs in, or a similar name."""
    for section, (_, keys) in SECTIONS.items():
        if name in keys:
            return f" It belongs in {section}."
    # With the default cutoff of 0.6, fsdp_config would be suggested for fp8_config.
    similar = difflib.get_close_matches(name, [*KEYS, *SECTIONS], n=1, cutoff=0.9)
    return f" Did you mean {similar[0]!r}?" if similar else ""
