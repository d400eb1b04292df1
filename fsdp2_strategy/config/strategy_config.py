"""Define `StrategyConfig`, the settings of a strategy.

Input: YAML, a mapping, a trainer's namespace or accelerate's file. Output: a validated, frozen dataclass.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from fsdp2_strategy.config.aliases import read_mapping, resolve_aliases, split_arguments
from fsdp2_strategy.config.text_values import integer_of, number_of, switch_of, word_of
from fsdp2_strategy.errors import ConfigError, did_you_mean

GradSync = Literal["defer_all_reduce", "last", "every"]
"""How micro-batches communicate gradients: the field ``grad_sync`` of `StrategyConfig`."""
SyncBuffers = Literal["broadcast", "mean", "off"]
AccumulationRule = Literal["auto", "optimizer_step", "backward", "caller"]
LossReduction = Literal["mean", "sum"]
_CHOICES: dict[str, Any] = {
    "accumulation": AccumulationRule,
    "grad_sync": GradSync,
    "loss_reduction": LossReduction,
    "sync_buffers": SyncBuffers,
}
_SWITCHES = (
    "bf16",
    "fp16",
    "reduce_in_full_precision",
    "use_mp_opt",
    "adam_offload",
    "cpu_offload",
    "memory_snapshot",
)
_SWITCHES_OR_NAMES = ("activation_checkpointing", "cast_inputs", "compile_blocks", "mixed_mm_data")
_REALS = ("max_norm", "timeout_minutes", "wait_warning_seconds", "log_every_seconds", "peak_flops")
_WORDS = ("reshard_after_forward",)
_INTEGERS = (
    "seed",
    "micro_train_batch_size",
    "train_batch_size",
    "gradient_accumulation_steps",
    "shard_size",
    "sequence_parallel_size",
    "tensor_parallel_size",
    "expert_parallel_size",
    "reshard_after_forward",
    "min_unit_params",
    "prefetch_depth",
    "log_every_steps",
)
_LARGE = 1e6
"""Numbers from here on are printed with an exponent."""
MixedData = Literal["root", "dummy", "replicate"]
"""How to train if only some ranks have images in a batch: the field ``mixed_mm_data`` of `StrategyConfig`."""
ShardSize = int | Literal["auto"]
"""Number of ranks that a parameter is split over: the field ``shard_size`` of `StrategyConfig`."""


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """All settings of a strategy; immutable, and validated by the constructor.

    docs/quickstart.md has a table of all fields with their defaults.

    Switches and numbers may be text, as a shell and YAML pass them: "1", "true", "no", "4", "1e-3".

    Raises:
        ConfigError: a value has the wrong type or is out of range; the message names the field, the value and the fix.
    """

    seed: int = 42
    """Seed of torch's, Python's and NumPy's generators, the same on every rank."""

    max_norm: float = 0.0
    """Maximum global gradient norm; gradients with a larger norm are scaled down to it; 0 disables clipping."""

    micro_train_batch_size: int = 1
    """Samples of one forward and backward pass of one rank, or of the ranks that share sequences or layers."""

    train_batch_size: int | None = None
    """Samples of one optimizer step over all ranks; None: one micro-batch per rank, no accumulation."""

    gradient_accumulation_steps: int | None = None
    """Micro-batches of one optimizer step; an alternative to ``train_batch_size``."""

    accumulation: AccumulationRule = "auto"
    """Where a micro-batch ends: at each call of ``optimizer_step`` ("optimizer_step"), or of ``backward`` ("backward").
    "auto": at ``optimizer_step``, but an error if ``backward`` was called for each micro-batch of the step before it.
    "caller": each call of ``optimizer_step`` is a step."""

    loss_reduction: LossReduction = "mean"
    """Combine the losses of a step's micro-batches by their mean or their sum. Over ranks, it is always the mean."""

    bf16: bool = True
    """Compute in bfloat16. Training keeps fp32 master weights; inference keeps only bf16 weights."""

    fp16: bool = False
    """Compute in float16 instead, with a dynamic loss scale; ``bf16`` is ignored then."""

    reduce_in_full_precision: bool = True
    """Reduce gradients in fp32; if false, in the compute dtype, which halves the traffic but rounds the gradients."""

    use_mp_opt: bool = False
    """Keep the fp32 master weights in the optimizer; the model has half-precision weights only."""

    adam_offload: bool = True
    """Whether ``maybe_offload_optimizer`` offloads; if false, the optimizer stays on the device."""

    keep_fp32: tuple[str, ...] = ()
    """Parts of names, or globs, of the parameters that are stored, gathered and used in fp32."""

    grad_sync: GradSync = "defer_all_reduce"
    """Gradient communication in each micro-batch of a step but the last: the reduce-scatter only ("defer_all_reduce"),
    none ("last"), or the whole reduction ("every")."""

    sync_buffers: SyncBuffers = "broadcast"
    """How persistent buffers that change in training (batch norm) are made equal on all ranks at each step: rank 0's
    values ("broadcast"), averages ("mean"), or not at all ("off")."""

    ignored_modules: tuple[str, ...] = ()
    """Regular expressions for full dotted names of modules that are not sharded; each rank keeps full parameters."""

    shard_size: ShardSize = -1
    """Number of ranks that a parameter is split over; -1: all ranks; "auto": all ranks for training, and for inference
    the fewest that a model of this size needs (`auto_shard_size`)."""

    sequence_parallel_size: int = 1
    """Number of successive ranks that share sequences: each computes a part of their tokens. They must be given equal
    batches, which `FSDPV2Strategy.shard_sequence` splits. Also called ``sp_size``."""

    tensor_parallel_size: int = 1
    """Number of successive ranks that share each layer, by the model's own plan; see docs/tensor_parallel.md. They must
    be given equal batches. Also called ``tp_size``."""

    tensor_parallel_plan: Mapping[str, str] | None = None
    """How the layers of a model without a plan are split: styles of transformers by names of modules and parameters,
    with ``*`` for numbers. None: the plan of the model."""

    expert_parallel_size: int = 1
    """Number of successive ranks among which the experts of a mixture-of-experts model are divided, by the model's own
    plan; see docs/tensor_parallel.md. Ranks may have different batches. Also called ``ep_size``."""

    reshard_after_forward: bool | int = True
    """Free a block's gathered parameters after its forward; an int reshards them over that many ranks instead."""

    block_class_names: tuple[str, ...] = ()
    """Class names of the modules that become units; empty: blocks are detected by `find_blocks`."""

    min_unit_params: int | None = None
    """Choose units by size: modules of at least this many parameters. None: only if no blocks are found; the minimum is
    then an eighth of the model's parameters, but not more than 50 million."""

    activation_checkpointing: tuple[str, ...] | bool = ()
    """Class names of the modules whose activations are recomputed in backward; True: each block."""

    cast_inputs: tuple[str, ...] | bool = ()
    """Names of floating inputs of the model's forward that are cast to the half-precision compute dtype when the model
    is called; True: all of them. Others are cast where they meet a weight; see docs/numerics.md."""

    compile_blocks: bool | str = False
    """Compile the forward of each block: True (inductor), or the name of a torch.compile backend."""

    cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory."""

    prefetch_depth: int | None = None
    """How many units to all-gather ahead of the running one; None: FSDP2's default prefetching."""

    forward_methods: tuple[str, ...] = ("generate",)
    """Methods of the model other than forward that need gathered parameters; those of robot policies are added."""

    mixed_mm_data: MixedData | None = None
    """How to train if only some ranks have images in a batch: "root", "dummy" or "replicate"; see docs/rlhf.md."""

    conditional_modules: tuple[str, ...] = ()
    """Regular expressions for full dotted names of modules that only some ranks run, and that an error names: they and
    the modules within them are no units of their own, but belong to the unit around them, which every rank runs."""

    timeout_minutes: float = 30.0
    """Time-out of collectives, if the strategy starts the process group."""

    wait_warning_seconds: float | None = 60.0
    """After how many seconds of waiting for other ranks a rank logs in which call it waits, and what the others last
    reported; None: never."""

    profile: str | tuple[int, int] | None = None
    """First and last optimizer step of which torch's profiler writes a trace, one file per rank: "10-13"; see
    docs/metrics.md."""

    memory_snapshot: bool = False
    """Record the allocations of the accelerator, and write a snapshot of them when its memory is full."""

    profile_dir: str | Path = "profile"
    """Directory of traces and memory snapshots, which every rank can write into."""

    log_every_seconds: float = 30.0
    """Rank 0 logs the numbers of the training (docs/metrics.md) about this often, and at the first step; 0: never. On a
    terminal, a bar shows them."""

    log_every_steps: int | None = None
    """Log the numbers in every so many optimizer steps instead."""

    peak_flops: float | None = None
    """Peak of one device in FLOP/s for the dtype of computation, by which the MFU is computed; None: that of the data
    sheet, if the device is known."""

    checkpoint_key_file: str | Path | None = None
    """Sign checkpoints with the key in this file, and load only checkpoints that it signed; see docs/checkpoints.md."""

    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """Values of a trainer's arguments that are not fields. They are also attributes: ``config.kl_estimator``."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a value of the trainer's arguments that is not a field."""
            extra = self.__dict__.get("extra", {})
            if name in extra:
                return extra[name]
            raise AttributeError(
                f"StrategyConfig has no field {name!r}, and the trainer's arguments did not contain it."
                f"{did_you_mean(name, [*_fields(), *extra])}"
            )

    def __post_init__(self) -> None:
        self._read_text()
        for name in ("activation_checkpointing", "cast_inputs"):
            selected = getattr(self, name)
            if selected is not True:
                object.__setattr__(self, name, () if selected is False else _names(name, selected))
        for name in ("keep_fp32", "ignored_modules", "conditional_modules", "block_class_names", "forward_methods"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if isinstance(self.mixed_mm_data, bool):  # trainers pass a bool
            object.__setattr__(self, "mixed_mm_data", "root" if self.mixed_mm_data else None)
        for name in _REALS:
            allows_none = name in ("wait_warning_seconds", "peak_flops")
            object.__setattr__(self, name, _real(name, getattr(self, name), allows_none=allows_none))
        for name in _SWITCHES:
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        if not isinstance(self.compile_blocks, str):
            expected = "true, false or the name of a torch.compile backend"
            _check("compile_blocks", self.compile_blocks, isinstance(self.compile_blocks, bool), expected)
        _check("seed", self.seed, _is_int(self.seed, 0), "an integer of at least 0")
        micro, size, reshard = self.micro_train_batch_size, self.shard_size, self.reshard_after_forward
        _check("micro_train_batch_size", micro, _is_int(micro, 1), "an integer of at least 1")
        self._check_parallel_sizes()
        optional = ("train_batch_size", "gradient_accumulation_steps", "min_unit_params", "prefetch_depth")
        for name in (*optional, "log_every_steps"):
            value = getattr(self, name)
            _check(name, value, value is None or _is_int(value, 1), "an integer of at least 1, or None")
        _check_expressions("ignored_modules", self.ignored_modules)
        _check_expressions("conditional_modules", self.conditional_modules)
        is_valid = size == "auto" or (_is_int(size, -1) and size != 0)
        _check("shard_size", size, is_valid, "an integer of at least 1, -1 or auto")
        is_valid = isinstance(reshard, bool) or _is_int(reshard, 1)
        _check("reshard_after_forward", reshard, is_valid, "true, false or an integer of at least 1")
        for name, kind in _CHOICES.items():
            value, choices = getattr(self, name), get_args(kind)
            fix = did_you_mean(str(value), choices).strip()
            _check(name, value, value in choices, "one of " + ", ".join(choices), fix)
        policies = (None, *get_args(MixedData))
        expected = "one of root, dummy, replicate, or None"
        _check("mixed_mm_data", self.mixed_mm_data, self.mixed_mm_data in policies, expected)
        _check("max_norm", self.max_norm, self.max_norm >= 0, "at least 0", "0 disables clipping.")
        _check("timeout_minutes", self.timeout_minutes, self.timeout_minutes > 0, "more than 0")
        self._check_files()
        limit = self.wait_warning_seconds
        _check("wait_warning_seconds", limit, limit is None or limit > 0, "more than 0, or None")
        every, peak = self.log_every_seconds, self.peak_flops
        _check("log_every_seconds", every, every >= 0, "at least 0", "0 logs no steps.")
        _check("peak_flops", peak, peak is None or peak > 0, "more than 0, or None")

    def _read_text(self) -> None:
        """Set switches and numbers that are given as text to the values that they mean; see `text_values`."""
        switches = _SWITCHES + _SWITCHES_OR_NAMES
        for names, read in ((switches, switch_of), (_INTEGERS, integer_of), (_REALS, number_of), (_WORDS, word_of)):
            for name in names:
                object.__setattr__(self, name, read(getattr(self, name)))

    def _check_files(self) -> None:
        """Check the files that are read and written, and the steps of a profile."""
        if word_of(self.profile) is False:  # trainers have a flag --profile
            object.__setattr__(self, "profile", None)
        if self.profile is not None:
            object.__setattr__(self, "profile", profiled_steps(self.profile))
        folder, key_file = self.profile_dir, self.checkpoint_key_file
        _check("profile_dir", folder, isinstance(folder, str | Path) and str(folder) != "", "a path")
        is_valid = key_file is None or (isinstance(key_file, str | Path) and str(key_file) != "")
        _check("checkpoint_key_file", key_file, is_valid, "a path, or None")

    def _check_parallel_sizes(self) -> None:
        """Check the numbers of ranks that share sequences, layers or experts, and what does not combine with them."""
        for name in ("sequence_parallel_size", "tensor_parallel_size", "expert_parallel_size"):
            _check(name, getattr(self, name), _is_int(getattr(self, name), 1), "an integer of at least 1")
        sequence, tensor, experts = self.sequence_parallel_size, self.tensor_parallel_size, self.expert_parallel_size
        is_valid = sequence == 1 or not (self.compile_blocks and self.activation_checkpointing)
        expected = "1 with compile_blocks and activation_checkpointing, because compiled code recomputes full sequences"
        _check("sequence_parallel_size", sequence, is_valid, expected, "Leave one of the three out.")
        for name, is_set in (("sequence_parallel_size above 1", sequence > 1), ("compile_blocks", self.compile_blocks)):
            is_valid = experts == 1 or not is_set
            _check("expert_parallel_size", experts, is_valid, f"1 with {name}", "Leave one of them out.")
        for name, is_set in (
            ("sequence_parallel_size above 1", sequence > 1),
            ("compile_blocks", bool(self.compile_blocks)),
            ("mixed_mm_data='replicate'", self.mixed_mm_data == "replicate"),
        ):
            _check(
                "tensor_parallel_size", tensor, tensor == 1 or not is_set, f"1 with {name}", "Leave one of them out."
            )
        plan = self.tensor_parallel_plan
        if plan is not None:
            is_valid = isinstance(plan, Mapping) and all(
                isinstance(each, str) for pair in plan.items() for each in pair
            )
            _check("tensor_parallel_plan", plan, is_valid, "a mapping of names to styles, or None")
            object.__setattr__(self, "tensor_parallel_plan", dict(plan))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> StrategyConfig:
        """Build a configuration from a mapping of fields; any other key but ``max_grad_norm`` raises an error.

        Raises:
            ConfigError: a key is not a field, or a value is not valid.
        """
        fields = _fields()
        mapping = resolve_aliases(mapping)
        for key in mapping:
            if key not in fields:
                raise ConfigError(
                    f"cannot configure: {key!r} is not a field of StrategyConfig, expected one of "
                    f"{', '.join(fields)}.{did_you_mean(str(key), fields)}"
                )
        return cls(**mapping)

    @classmethod
    def from_yaml(cls, path: str | Path) -> StrategyConfig:
        """Read a configuration from a YAML file that is a mapping of fields; any other key raises an error.

        Raises:
            ConfigError: the file is missing or not a YAML mapping, a key is not a field, or a value is not valid.
        """
        return cls.from_mapping(read_mapping(path))

    @classmethod
    def from_accelerate(cls, path: str | Path) -> StrategyConfig:
        """Build a configuration from the file that ``accelerate config`` writes, YAML or JSON.

        Rank 0 logs which settings have another name here or are not needed, and warns of those that work differently.
        docs/coming_from_accelerate.md lists all keys.

        Raises:
            ConfigError: the file is missing or malformed, or a key or value is invalid or not supported.

        Example:
            >>> config = StrategyConfig.from_accelerate("docs/examples/fsdp.yaml")  # doctest: +SKIP
            >>> config = config.replace(max_norm=1.0, train_batch_size=64)  # doctest: +SKIP
        """
        # The core knows no integration: this one is imported when it is asked for.
        return cls(**import_module("fsdp2_strategy.integrations.accelerate.translate").fields_of(path))

    @classmethod
    def from_args(cls, args: object) -> StrategyConfig:
        """Build a configuration from a trainer's namespace or mapping; store names that are not fields in ``extra``.

        A value of None means the default. ``fsdp_cpu_offload`` is read as ``cpu_offload``, ``max_grad_norm`` as
        ``max_norm``, ``sp_size`` and ``ulysses_sequence_parallel_size`` as ``sequence_parallel_size``, ``tp_size`` as
        ``tensor_parallel_size`` and ``ep_size`` as ``expert_parallel_size``. For these sizes, 0 also means the default.

        Raises:
            ConfigError: ``args`` is neither a namespace nor a mapping; the value of a field is not valid; or a name
                requests a capability that this package lacks, such as ``pp_size=2``.
        """
        if isinstance(args, cls):
            return args
        known, extra = split_arguments(args, _fields())
        return cls(**known, extra=extra)

    @classmethod
    def resolve(cls, args: object, config: StrategyConfig | None) -> StrategyConfig:
        """Return ``config`` if it is given, else a configuration made from ``args``, else the defaults.

        Raises:
            ConfigError: ``config`` is not a StrategyConfig, or both arguments are one, or `from_args` raises.
        """
        if config is not None and not isinstance(config, StrategyConfig):
            raise ConfigError(
                f"cannot configure: config is a {type(config).__name__}, expected a StrategyConfig. Use "
                "StrategyConfig.from_mapping, from_yaml or from_args."
            )
        if config is not None and isinstance(args, StrategyConfig):
            raise ConfigError(
                "cannot configure: args and config are both a StrategyConfig, expected one. Remove one of them."
            )
        if config is not None:
            return config
        return cls() if args is None else cls.from_args(args)

    def accumulation_steps(self, dp_size: int) -> int:
        """Return the number of micro-batches of one optimizer step.

        Args:
            dp_size: number of ranks, or of groups of ranks that share sequences or layers.

        Raises:
            ConfigError: ``train_batch_size`` is not a multiple of micro batch size x ``dp_size``, or contradicts
                ``gradient_accumulation_steps``.
        """
        micro, total, steps = self.micro_train_batch_size, self.train_batch_size, self.gradient_accumulation_steps
        if total is None:
            return steps or 1
        step = micro * dp_size
        of_ranks = self._name_of_ranks()
        if total % step:
            lower = max(total // step, 1) * step
            raise ConfigError(
                f"cannot accumulate: train_batch_size is {total}, expected a multiple of micro_train_batch_size x "
                f"{of_ranks} = {micro} x {dp_size} = {step}. Use {lower} or {lower + step}; a run "
                "that is resumed with another train_batch_size needs load_data_position='samples', to continue at the "
                f"same sample. To keep train_batch_size, {self._ways_to_keep(total, dp_size)}."
            )
        if steps is not None and steps != total // step:
            raise ConfigError(
                f"cannot accumulate: gradient_accumulation_steps is {steps}, expected {total // step}, because "
                f"train_batch_size is {total}, and a micro-batch has {micro} samples on each of {dp_size} {of_ranks}. "
                "Set only one of the two."
            )
        return total // step

    def _ways_to_keep(self, total: int, dp_size: int) -> str:
        """Return which micro-batch or number of ranks divides a global batch of ``total`` samples."""
        micro = self.micro_train_batch_size
        if total % dp_size == 0:
            return f"use micro_train_batch_size {max(m for m in range(1, micro + 1) if total // dp_size % m == 0)}"
        micro = micro if total % micro == 0 else 1
        numbers = [count for count in range(1, total // micro + 1) if total % (micro * count) == 0]
        nearest = [max(n for n in numbers if n < dp_size), *[n for n in numbers if n > dp_size][:1]]
        ranks = f"{' or '.join(map(str, nearest))} {self._name_of_ranks(is_one=nearest == [1])}"
        return f"use {ranks} with micro_train_batch_size {micro}"

    def _name_of_ranks(self, *, is_one: bool = False) -> str:
        """Return the name of what computes one micro-batch: ranks, or groups of ranks that share a batch."""
        plural = "" if is_one else "s"
        size = self.ranks_per_batch
        return f"rank{plural}" if size == 1 else f"group{plural} of {size} ranks"

    @property
    def ranks_per_batch(self) -> int:
        """Return how many successive ranks get the same batch, because they share sequences or layers."""
        return self.sequence_parallel_size * self.tensor_parallel_size

    @property
    def logs_steps(self) -> bool:
        """Return whether the numbers of steps are logged."""
        return bool(self.log_every_seconds or self.log_every_steps)

    @property
    def effective_grad_sync(self) -> GradSync:
        """Return ``grad_sync``, or "every" if "defer_all_reduce" would accumulate gradients in half precision."""
        half = (self.bf16 or self.fp16) and not self.reduce_in_full_precision
        return "every" if half and self.grad_sync == "defer_all_reduce" else self.grad_sync

    def replace(self, **changes: Any) -> StrategyConfig:
        """Return a validated copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def changes(self) -> str:
        """Return the fields that differ from their defaults, on one line; "" if there are none."""
        values = {name: getattr(self, name) for name in _fields()}
        changed = [f"{name} = {_shown(values[name])}" for name, default in _fields().items() if values[name] != default]
        return ", ".join(changed)

    def __str__(self) -> str:
        """Return one line per field; a star marks values that differ from the default."""
        width = max(map(len, _fields()))
        lines = []
        for name, default in _fields().items():
            value = getattr(self, name)
            mark, note = (" ", "") if value == default else ("*", f"  (default {_shown(default)})")
            lines.append(f"{mark} {name:<{width}} = {_shown(value)}{note}")
        return "\n".join(lines)


def _fields() -> dict[str, Any]:
    """Return the default of each field, in the order of definition."""
    return {field.name: field.default for field in dataclasses.fields(StrategyConfig) if field.name != "extra"}


def _shown(value: object) -> str:
    """Return the ``repr`` of a value; of a path, that of its text; of a large number, with an exponent."""
    if isinstance(value, float) and abs(value) >= _LARGE:
        return f"{value:g}"
    return repr(str(value) if isinstance(value, Path) else value)


def _check(field: str, value: object, is_valid: bool, expected: str, fix: str = "") -> None:
    if not is_valid:
        fix = fix or f"Set {field} to {expected}, or leave it out for its default {_fields()[field]!r}."
        raise ConfigError(f"cannot configure: {field} is {value!r}, expected {expected}. {fix}")


def _is_int(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _real(field: str, value: object, *, allows_none: bool = False) -> float | None:
    if value is None and allows_none:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    _check(field, value, math.isfinite(number), "a finite number")
    return float(number)


def profiled_steps(value: object) -> tuple[int, int]:
    """Return the first and last step of ``"10-13"`` or a pair of integers.

    A single number is refused, because YAML reads ``10:13`` as the number 613.

    Raises:
        ConfigError: the value is another one, or the first step is below 1 or above the last.
    """
    pair = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", value) if isinstance(value, str) else None
    steps: Any = [int(number) for number in pair.groups()] if pair else value
    is_pair = isinstance(steps, list | tuple) and len(steps) == 2 and all(_is_int(step, 1) for step in steps)
    expected = "the first and the last optimizer step, such as '10-13'"
    fix = "For one step, write it twice: '10-10'." if isinstance(value, int | str) else ""
    _check("profile", value, is_pair and steps[0] <= steps[1], expected, fix)
    return steps[0], steps[1]


def _check_expressions(field: str, expressions: tuple[str, ...]) -> None:
    for expression in expressions:
        try:
            re.compile(expression)
        except re.error as error:
            raise ConfigError(
                f"cannot configure: {field} contains {expression!r}, expected valid regular expressions. Python "
                f"reports '{error}'. Escape characters that are meant literally with a backslash."
            ) from None


def _names(field: str, value: object) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)
    fix = f"Write {field}: [{value}]." if isinstance(value, str) else ""
    _check(field, value, is_list, "a list of names", fix)
    return tuple(value)  # type: ignore[arg-type]
