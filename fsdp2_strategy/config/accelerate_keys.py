"""Define the meaning of every key of accelerate's configuration file.

Input: nothing. Output: one table, for `accelerate`; the documentation contains it.

[Note: keys] A key is of one of four kinds. It configures the strategy; or the launcher has already applied it; or it is
replaced by another setting or mechanism, which is logged; or it is refused, if its value needs an unsupported feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsdp2_strategy.errors import did_you_mean

Kind = Literal["configures", "launcher", "replaced", "refused"]

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP1's sharding strategies, in the order of their numbers from 1."""

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


class UnreadableError(Exception):
    """A key does not accept a value; the message describes the accepted values."""


def flag(value: object) -> bool:
    """Parse true or false, or another spelling of them."""
    word = str(value).lower()
    if word not in (*_TRUE, *_FALSE):
        raise UnreadableError("true or false")
    return word in _TRUE


def whole(value: object) -> int:
    """Parse an integer; YAML reads ``1e8`` as a string."""
    try:
        return int(str(value))
    except ValueError:
        pass
    try:
        number = float(str(value))
    except ValueError:
        raise UnreadableError("a whole number") from None
    if not number.is_integer():
        raise UnreadableError("a whole number")
    return int(number)


def choice(*choices: str, numbered: bool = False) -> Callable[[object], str]:
    """Return a parser for one of some words or, if ``numbered``, its number from 1; YAML reads ``NO`` as false."""

    def read(value: object) -> str:
        word = "NO" if value is False else str(value).upper()
        if numbered and word.isdecimal() and 1 <= int(word) <= len(choices):
            return choices[int(word) - 1]
        if word not in choices:
            raise UnreadableError("one of " + ", ".join(choices))
        return word

    return read


def resharding(value: object) -> bool | str:
    """Parse FSDP2's true or false, or the name or number of an FSDP1 strategy."""
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
    raise UnreadableError("a text or a list of texts")


def anything(value: object) -> object:
    """Return a value unchanged; None if it is empty or false."""
    return value or None


@dataclass(frozen=True, kw_only=True)
class Key:
    """The meaning of a key; see [Note: keys]."""

    kind: Kind
    says: str = ""
    """What the key configures, what replaces it, or what to do if it is refused."""
    read: Callable[[object], Any] = anything
    """Parses the value in the file; raises `UnreadableError`."""
    sets: str | None = None
    """The field of StrategyConfig that is set to the parsed value."""
    noted: tuple[object, ...] = ()
    """Values that are logged as information: the result is the requested one."""
    warned: tuple[object, ...] = ()
    """Values that are logged as a warning: the result is not the requested one."""
    only: tuple[object, ...] | None = None
    """The accepted values; None for all. Other values are refused."""
    way_out: str = ""
    """What to do about a refused value; by default ``says``."""


def _refused(says: str, only: object = None, read: Callable[[object], Any] = anything) -> Key:
    return Key(kind="refused", says=says, read=read, only=(only,))


_TPU = "Only CPUs and CUDA devices are known here: leave it out."
_SAGEMAKER = "Only LOCAL_MACHINE is known here: leave it out, and start with torchrun."
_ONE = "Nothing but the data is parallel here: set it to 1."

_BACKEND = Key(
    kind="configures",
    says="`compile_blocks`: NO is false, INDUCTOR is true, others go by their names",
    read=choice(
        *("NO", "INDUCTOR", "EAGER", "AOT_EAGER", "CUDAGRAPHS", "TENSORRT", "ONNXRT", "TVM", "AOT_TS_NVFUSER"),
        *("NVPRIMS_NVFUSER", "OFI", "FX2TRT", "TORCHXLA_TRACE_ONCE", "AOT_TORCHXLA_TRACE_ONCE", "HPU_BACKEND"),
        "NEURON",
    ),
)

TOP: Mapping[str, Key] = {
    "compute_environment": _refused(_SAGEMAKER, "LOCAL_MACHINE", choice("LOCAL_MACHINE", "AMAZON_SAGEMAKER")),
    "distributed_type": Key(
        kind="configures",
        says="FSDP shards as `fsdp_config` says; MULTI_GPU, MULTI_CPU and NO are `shard_size=1`; others are refused",
        read=choice(
            *("FSDP", "MULTI_GPU", "MULTI_CPU", "NO", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU", "MULTI_NPU"),
            *("MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON"),
            *("DATA_PARALLEL", "MODEL_PARALLEL"),
        ),
        only=("FSDP", "MULTI_GPU", "MULTI_CPU", "NO"),
        way_out="Use FSDP, which splits weights, gradients and optimizer state over CPUs or CUDA devices.",
    ),
    "mixed_precision": Key(
        kind="configures",
        says="`bf16` or `fp16`; with no, or without the key, neither; fp8 is refused",
        read=choice("NO", "BF16", "FP16", "FP8"),
        only=("NO", "BF16", "FP16"),
        way_out="Use bf16.",
    ),
    "fp16": Key(kind="configures", says="`fp16`, where there is no `mixed_precision`", read=flag),
    "dynamo_backend": _BACKEND,
    "num_processes": Key(kind="launcher", says="with HYBRID_SHARD on several machines also `shard_size`", read=whole),
    "num_machines": Key(kind="launcher", says="with HYBRID_SHARD also `shard_size`", read=whole),
    "machine_rank": Key(kind="launcher"),
    "gpu_ids": Key(kind="launcher"),
    "main_process_ip": Key(kind="launcher"),
    "main_process_port": Key(kind="launcher"),
    "rdzv_backend": Key(kind="launcher"),
    "same_network": Key(kind="launcher"),
    "main_training_function": Key(kind="launcher"),
    "use_cpu": Key(
        kind="launcher",
        says="true is refused where there is a CUDA device, which would be used all the same",
        read=flag,
        way_out="Start with CUDA_VISIBLE_DEVICES= to hide it, or set it to false.",
    ),
    "debug": Key(
        kind="replaced",
        says="`debug_divergence_seconds=60` names the rank that runs another unit than the others, or stays away",
        read=flag,
        warned=(True,),
    ),
    "enable_cpu_affinity": Key(
        kind="replaced",
        says="`torchrun --numa-binding node` binds each process to the cores beside its device",
        read=flag,
        warned=(True,),
    ),
    "fp8_config": _refused("Nothing is computed in 8 bits here: leave it out, and use mixed_precision: bf16."),
    "deepspeed_config": _refused("Leave it out: distributed_type: FSDP with fsdp_config does what ZeRO does."),
    "megatron_lm_config": _refused("Nothing but the data is parallel here: leave it out."),
    "mpirun_config": _refused("Ranks come from torchrun's variables, not from mpirun's: leave it out."),
    "downcast_bf16": _refused(_TPU, only=False, read=flag),
    "tpu_use_cluster": _refused(_TPU, only=False, read=flag),
    "tpu_use_sudo": _refused(_TPU, only=False, read=flag),
    **{name: _refused(_TPU) for name in ("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "command_file", "commands")},
    **{
        name: _refused(_SAGEMAKER)
        for name in (
            *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name"),
            *("pytorch_version", "transformers_version", "py_version"),
            *("sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
        )
    },
}

FSDP: Mapping[str, Key] = {
    "fsdp_version": Key(
        kind="replaced", says="what shards is FSDP2, whichever it says", read=whole, noted=(1,), only=(1, 2)
    ),
    "fsdp_reshard_after_forward": Key(
        kind="configures",
        says="`reshard_after_forward`; the name of a strategy like `fsdp_sharding_strategy`",
        read=resharding,
    ),
    "fsdp_sharding_strategy": Key(
        kind="replaced",
        says="`reshard_after_forward` (true for FULL_SHARD and HYBRID_SHARD) and `shard_size` (the ranks of a machine "
        "for HYBRID, 1 for NO_SHARD), which are set from it",
        read=choice(*STRATEGIES, numbered=True),
        noted=STRATEGIES,
    ),
    "fsdp_offload_params": Key(kind="configures", says="`cpu_offload`", read=flag, sets="cpu_offload"),
    "fsdp_auto_wrap_policy": Key(
        kind="configures",
        says="which of the next two counts; with NO_WRAP blocks are found and sharded all the same, for without any "
        "the whole model would be gathered at once",
        read=choice("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        warned=("NO_WRAP",),
    ),
    "fsdp_transformer_layer_cls_to_wrap": Key(
        kind="configures", says="`block_class_names`, with TRANSFORMER_BASED_WRAP", read=names
    ),
    "fsdp_min_num_params": Key(
        kind="configures",
        says="`min_unit_params`, with SIZE_BASED_WRAP: 100,000,000 without the key; with 0 blocks are found",
        read=whole,
    ),
    "fsdp_activation_checkpointing": Key(
        kind="configures", says="`activation_checkpointing`", read=flag, sets="activation_checkpointing"
    ),
    "fsdp_activation_checkpointing_offload": _refused(
        "Activations stay on the device: set it to false. `cpu_offload` makes room.", only=False, read=flag
    ),
    "fsdp_ignored_modules": Key(kind="configures", says="`ignored_modules`", read=expressions, sets="ignored_modules"),
    "fsdp_use_orig_params": Key(
        kind="replaced",
        says="nothing; parameters are never flattened, and keep their names, groups and what is frozen of them",
        read=flag,
        noted=(True,),
        warned=(False,),
    ),
    "fsdp_sync_module_states": Key(
        kind="replaced",
        says="nothing; all ranks build the model under one seed or from the same files, which `prepare_model` checks",
        read=flag,
        noted=(False,),
        warned=(True,),
    ),
    "fsdp_cpu_ram_efficient_loading": Key(
        kind="replaced",
        says="`init_model_context(meta_init=True)` around `from_pretrained`: each rank reads its own part alone",
        read=flag,
        noted=(False,),
        warned=(True,),
    ),
    **{
        name: Key(
            kind="replaced",
            says="nothing; FSDP2 gathers one unit ahead in backward, as BACKWARD_PRE does (`prefetch_depth`: more)",
            read=choice("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", numbered=True),
            noted=("BACKWARD_PRE",),
            warned=("BACKWARD_POST", "NO_PREFETCH"),
        )
        for name in ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy")
    },
    "fsdp_forward_prefetch": Key(
        kind="replaced",
        says="`prefetch_depth=1` fixes which unit is gathered ahead, in forward, too",
        read=flag,
        noted=(False,),
        warned=(True,),
    ),
    "fsdp_state_dict_type": Key(
        kind="replaced",
        says="nothing; a checkpoint is written by all ranks, each its own part, and opens as a whole",
        read=choice("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", numbered=True),
        noted=("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        warned=("LOCAL_STATE_DICT",),
    ),
}

DYNAMO: Mapping[str, Key] = {
    "dynamo_backend": _BACKEND,
    "dynamo_use_regional_compilation": Key(
        kind="replaced", says="nothing; each block is compiled by itself", read=flag, noted=(False,)
    ),
    "dynamo_mode": Key(
        kind="replaced",
        says="nothing; blocks are compiled in the default mode",
        read=choice("DEFAULT", "REDUCE-OVERHEAD", "MAX-AUTOTUNE"),
        warned=("REDUCE-OVERHEAD", "MAX-AUTOTUNE"),
    ),
    "dynamo_use_fullgraph": Key(
        kind="replaced", says="nothing; a block may become several graphs", read=flag, warned=(True,)
    ),
    "dynamo_use_dynamic": Key(
        kind="replaced", says="nothing; torch.compile finds out which shapes change", read=flag, warned=(True,)
    ),
}

PARALLELISM: Mapping[str, Key] = {
    "parallelism_config_dp_shard_size": Key(kind="configures", says="`shard_size`, if it is more than 1", read=whole),
    "parallelism_config_dp_replicate_size": Key(
        kind="configures", says="nothing; there are as many replicas as ranks / `shard_size`", read=whole
    ),
    **{f"parallelism_config_{name}_size": _refused(_ONE, only=1, read=whole) for name in ("tp", "cp", "sp")},
    **{
        f"parallelism_config_{name}": Key(kind="launcher", says="nothing, where the sizes are 1")
        for name in (
            *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable"),
            "sp_attn_implementation",
        )
    },
}

SECTIONS: Mapping[str, tuple[str, Mapping[str, Key]]] = {
    "fsdp_config": ("fsdp_", FSDP),
    "dynamo_config": ("dynamo_", DYNAMO),
    "parallelism_config": ("parallelism_config_", PARALLELISM),
}
"""The nested mappings of the file: for each the prefix of its keys, which files may omit, and its keys."""

KEYS: Mapping[str, Key] = {**TOP, **FSDP, **DYNAMO, **PARALLELISM}


def where(name: str) -> str:
    """Return a hint for an unknown key: the section that it belongs in, or a similar name."""
    for section, (_, keys) in SECTIONS.items():
        if name in keys:
            return f" It belongs in {section}."
    return did_you_mean(name, [*KEYS, *SECTIONS])
