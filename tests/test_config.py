"""Configuration: one default in one place, validated once, errors that name field, value and fix."""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np
import pytest

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.errors import ArgumentError, ConfigError


def test_defaults_are_valid_and_frozen():
    config = StrategyConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3
    with pytest.raises(TypeError):
        StrategyConfig(42)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("seed", "042", "an integer"),
        ("seed", "42.0", "an integer"),
        ("seed", True, "an integer"),
        ("seed", -1, "at least 0"),
        ("max_norm", -1.0, "at least 0"),
        ("max_norm", "1_0", "a finite number"),
        ("max_norm", "inf", "a finite number"),
        ("max_norm", "", "a finite number"),
        ("max_norm", float("nan"), "finite"),
        ("micro_train_batch_size", 0, "at least 1"),
        ("train_batch_size", 1.5, "an integer"),
        ("bf16", "y", "true or false"),
        ("bf16", 2, "true or false"),
        ("bf16", 1.0, "true or false"),
        ("bf16", None, "true or false"),
        ("grad_sync", "late", "defer_all_reduce, last, every"),
        ("keep_fp32", "norm", r"keep_fp32: \[norm\]"),
        ("block_class_names", [3], "list of names"),
        ("compile_blocks", 3, "backend"),
        ("prefetch_depth", 0, "at least 1"),
        ("ignored_modules", "vision", r"ignored_modules: \[vision\]"),
        ("sequence_parallel_size", 0, "at least 1"),
        ("sequence_parallel_size", "two", "at least 1"),
        ("shard_size", 0, "-1 or auto"),
        ("shard_size", "all", "-1 or auto"),
        ("shard_size", True, "-1 or auto"),
        ("reshard_after_forward", 0, "true, false or an integer"),
        ("reshard_after_forward", "maybe", "true, false or an integer"),
        ("activation_checkpointing", "Block", r"activation_checkpointing: \[Block\]"),
        ("keep_fp32", True, "list of names"),
        ("timeout_minutes", 0, "more than 0"),
    ],
)
def test_an_error_names_field_value_and_fix(field, value, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        StrategyConfig(**{field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_field_as_an_argument_of_the_strategy_is_an_error_that_says_where_it_belongs():
    with pytest.raises(ArgumentError, match=r"'timeout_minutes' .*Pass config=StrategyConfig\(timeout_minutes=…\)"):
        FSDPV2Strategy(seed=1, timeout_minutes=5)


def test_yaml_is_read_and_unknown_keys_are_refused(tmp_path):
    path = tmp_path / "strategy.yaml"
    path.write_text("max_norm: 1.0\nkeep_fp32: [norm, router]\ntrain_batch_size: 8\n")
    assert StrategyConfig.from_yaml(path) == StrategyConfig(
        max_norm=1.0, keep_fp32=("norm", "router"), train_batch_size=8
    )
    path.write_text("max_nrm: 1.0\n")
    with pytest.raises(ConfigError, match=r"'max_nrm' is not a field .* Did you mean 'max_norm'"):
        StrategyConfig.from_yaml(path)
    path.write_text("")
    assert StrategyConfig.from_yaml(path) == StrategyConfig()
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        StrategyConfig.from_yaml(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        StrategyConfig.from_yaml(path)
    with pytest.raises(ConfigError, match="No such file"):
        StrategyConfig.from_yaml(tmp_path / "missing.yaml")


def test_a_trainers_namespace_keeps_its_own_keys():
    args = argparse.Namespace(
        max_norm=0.5, fsdp_cpu_offload=True, actor_learning_rate=1e-6, prompt_max_len=512, seed=None
    )
    expected = StrategyConfig(max_norm=0.5, cpu_offload=True)
    assert StrategyConfig.from_args(args) == expected
    assert StrategyConfig.from_args(vars(args)) == expected
    assert StrategyConfig.from_args(expected) is expected
    args.max_norm = "high"
    with pytest.raises(ConfigError, match="max_norm is 'high'"):
        StrategyConfig.from_args(args)


SWITCHES = ("bf16", "fp16", "reduce_in_full_precision", "use_mp_opt", "adam_offload", "cpu_offload", "memory_snapshot")


def test_every_switch_is_known():
    switches = [f.name for f in dataclasses.fields(StrategyConfig) if isinstance(f.default, bool)]
    assert set(switches) == {*SWITCHES, "compile_blocks", "reshard_after_forward"}


@pytest.mark.parametrize("field", [*SWITCHES, "compile_blocks", "activation_checkpointing", "cast_inputs"])
def test_a_switch_from_a_shell_counts_as_what_it_says(field):
    for value in (1, "1", "true", "True", "yes", " on ", np.bool_(True), np.int64(1), True):
        assert getattr(StrategyConfig.from_args({field: value}), field) is True, value
    off = () if field in ("activation_checkpointing", "cast_inputs") else False
    for value in (0, "0", "false", "False", "no", "OFF", np.bool_(False), np.int64(0), False):
        assert getattr(StrategyConfig.from_args({field: value}), field) == off, value
    assert StrategyConfig(mixed_mm_data="true").mixed_mm_data == "root"
    assert StrategyConfig(mixed_mm_data="0").mixed_mm_data is None


def test_numbers_may_be_text(tmp_path):
    args = {"max_norm": "1e-3", "train_batch_size": "8", "seed": "7", "sp_size": "0", "tp_size": "2", "pp_size": "1"}
    expected = StrategyConfig(max_norm=0.001, train_batch_size=8, seed=7, tensor_parallel_size=2)
    assert StrategyConfig.from_args(args) == expected
    path = tmp_path / "strategy.yaml"
    path.write_text("max_norm: 1e-3\nseed: '7'\ntimeout_minutes: .5\n")
    assert StrategyConfig.from_yaml(path) == StrategyConfig(max_norm=0.001, seed=7, timeout_minutes=0.5)
    config = StrategyConfig(seed=np.int64(3), max_norm=np.float32(0.5), shard_size="2", reshard_after_forward="1")
    assert (config.seed, config.max_norm, config.shard_size) == (3, 0.5, 2)
    assert config.reshard_after_forward == 1 and config.reshard_after_forward is not True
    assert StrategyConfig(reshard_after_forward="true").reshard_after_forward is True
    assert StrategyConfig.from_args({"max_norm": "1.0", "max_grad_norm": 1.0}).max_norm == 1.0
    assert all(type(value) in (int, float) for value in (config.seed, config.max_norm, config.shard_size))


SEQUENCE_NAMES = ("sequence_parallel_size", "sp_size", "ulysses_sequence_parallel_size")


@pytest.mark.parametrize("name", SEQUENCE_NAMES)
def test_a_sequence_parallel_size_has_three_names_in_a_trainers_namespace(name):
    assert StrategyConfig.from_args({name: 2}).sequence_parallel_size == 2
    assert StrategyConfig.from_mapping({name: 2}).sequence_parallel_size == 2
    for value in (None, 0, 1):
        assert StrategyConfig.from_args({name: value}) == StrategyConfig()
    others = {other: value for other, value in zip(SEQUENCE_NAMES, (1, 0, None), strict=True) if other != name}
    assert StrategyConfig.from_args({**others, name: 4}).sequence_parallel_size == 4, "defaults of a parser give way"
    with pytest.raises(ConfigError, match=f"{name} is 'a', expected" if name == SEQUENCE_NAMES[0] else "is 'a'"):
        StrategyConfig.from_args({name: "a"})


def test_two_sequence_parallel_sizes_must_agree():
    assert StrategyConfig.from_args({"sequence_parallel_size": 2, "sp_size": 2}).sequence_parallel_size == 2
    with pytest.raises(ConfigError, match="sequence_parallel_size is 2 and sp_size is 4, expected one value"):
        StrategyConfig.from_args({"sequence_parallel_size": 2, "sp_size": 4})


@pytest.mark.parametrize("name", ["cp_size", "context_parallel_size", "ring_attn_size", "pp_size"])
def test_other_kinds_of_parallelism_are_refused(name):
    assert StrategyConfig.from_args({name: 1}) == StrategyConfig()
    with pytest.raises(ConfigError, match=f"{name} is 2, expected None or 0 or 1"):
        StrategyConfig.from_args({name: 2})


@pytest.mark.parametrize(("name", "alias"), [("tensor_parallel_size", "tp_size"), ("expert_parallel_size", "ep_size")])
def test_a_parallel_size_has_a_short_name(name, alias):
    for value in (None, 0, 1):
        assert StrategyConfig.from_args({alias: value}) == StrategyConfig()
    if name == "tensor_parallel_size":
        assert StrategyConfig.from_args({alias: 2}).tensor_parallel_size == 2
        assert StrategyConfig.from_mapping({alias: 2, name: 1}).tensor_parallel_size == 2
    with pytest.raises(ConfigError, match=f"{name} is 2 and {alias} is 4, expected one value"):
        StrategyConfig.from_args({name: 2, alias: 4})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"expert_parallel_size": 2, "sequence_parallel_size": 2},
            "expert_parallel_size is 2, expected 1 with sequence_parallel_size above 1",
        ),
        (
            {"expert_parallel_size": 2, "compile_blocks": True},
            "expert_parallel_size is 2, expected 1 with compile_blocks",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, expected an integer of at least 1"),
        (
            {"tensor_parallel_size": 2, "sequence_parallel_size": 2},
            "is 2, expected 1 with sequence_parallel_size above",
        ),
        ({"tensor_parallel_size": 2, "compile_blocks": True}, "is 2, expected 1 with compile_blocks"),
        ({"tensor_parallel_size": 2, "mixed_mm_data": "replicate"}, "is 2, expected 1 with mixed_mm_data='replicate'"),
        ({"tensor_parallel_plan": ["up"]}, "tensor_parallel_plan is .*, expected a mapping of names to styles"),
        ({"tensor_parallel_plan": {"up": 1}}, "tensor_parallel_plan is .*, expected a mapping of names to styles"),
    ],
    ids=str,
)
def test_what_does_not_combine_with_ranks_that_share_layers_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        StrategyConfig(**options)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(
        ConfigError, match=r"ignored_modules contains 'vision\(', expected valid regular expressions\..*missing \)"
    ):
        StrategyConfig(ignored_modules=["vision("])


def test_no_activation_checkpointing_has_one_form():
    assert StrategyConfig(activation_checkpointing=False) == StrategyConfig()
    assert StrategyConfig(activation_checkpointing=True).activation_checkpointing is True


def test_str_marks_what_differs_from_the_default():
    lines = str(StrategyConfig(max_norm=1.0)).splitlines()
    assert [line for line in lines if line.startswith("*")] == ["* max_norm                    = 1.0  (default 0.0)"]
    assert len(lines) == len(dataclasses.fields(StrategyConfig)) - 1, "all but those that are no fields of ours"


@pytest.mark.ranks(1)
def test_the_constructor_takes_the_trainers_call_and_configurations():
    strategy = FSDPV2Strategy(7, 1.0, 2, 8, False, argparse.Namespace(max_norm=3.0, grad_sync="last", other=object()))
    assert strategy.config == StrategyConfig(
        seed=7, max_norm=1.0, micro_train_batch_size=2, train_batch_size=8, bf16=False, grad_sync="last"
    )
    assert strategy.accumulated_gradient == 4
    config = StrategyConfig(max_norm=2.0)
    assert FSDPV2Strategy(args=config).config == config
    assert FSDPV2Strategy(config=config, seed=1).config == config.replace(seed=1)
    with pytest.raises(ConfigError, match="expected a StrategyConfig"):
        FSDPV2Strategy(config={"max_norm": 1.0})
    with pytest.raises(ConfigError, match="expected one"):
        FSDPV2Strategy(args=config, config=config)


@pytest.mark.ranks(2)
def test_batch_sizes_that_do_not_divide_are_refused_on_every_rank():
    assert FSDPV2Strategy(micro_train_batch_size=2, train_batch_size=12).accumulated_gradient == 3
    assert FSDPV2Strategy(micro_train_batch_size=2).accumulated_gradient == 1
    with pytest.raises(ConfigError, match=r"train_batch_size is 6, .* 2 x 2 = 4\. Use 4 or 8"):
        FSDPV2Strategy(micro_train_batch_size=2, train_batch_size=6)
    with pytest.raises(ValueError, match="train_batch_size is 1"):
        FSDPV2Strategy(train_batch_size=1)
    assert FSDPV2Strategy(args={"sp_size": 2}, train_batch_size=3).accumulated_gradient == 3
    with pytest.raises(ConfigError, match=r"expected 3, .* 1 samples on each of 1 groups of 2 ranks"):
        FSDPV2Strategy(args={"sp_size": 2}, train_batch_size=3, gradient_accumulation_steps=2)
