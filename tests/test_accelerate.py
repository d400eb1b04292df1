"""accelerate's configuration file: each key has its place, and a script that accelerate starts trains as ever."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from fsdp2_strategy import StrategyConfig
from fsdp2_strategy.errors import ConfigError
from fsdp2_strategy.integrations.accelerate.key_table import KEYS, SECTIONS, TOP

FSDP = {"distributed_type": "FSDP"}
SHARDED = {"bf16": False}
WHOLE = {"bf16": False, "shard_size": 1, "reshard_after_forward": False}


def fsdp(**keys):
    return {**FSDP, "fsdp_config": keys}


def size_based(**keys):
    return fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", **keys)


def parallel(**keys):
    return {**FSDP, "parallelism_config": {f"parallelism_config_{name}": value for name, value in keys.items()}}


def dynamo(backend="INDUCTOR", **keys):
    return {**FSDP, "dynamo_config": {"dynamo_backend": backend, **keys}}


def written(folder, content, name="fsdp.yaml"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# What the file has -> what differs from the defaults, beside bf16, which accelerate leaves out.
CONFIGURES = [
    (FSDP, {}),
    ({"distributed_type": "MULTI_GPU"}, WHOLE),
    ({"distributed_type": "MULTI_CPU"}, WHOLE),
    ({"distributed_type": "NO"}, WHOLE),
    ({"distributed_type": False}, WHOLE),  # NO without quotes
    ({**FSDP, "compute_environment": "LOCAL_MACHINE"}, {}),
    (fsdp(fsdp_version=2, fsdp_sharding_strategy="NO_SHARD"), {}),
    (fsdp(fsdp_version="2", fsdp_sharding_strategy=3), {}),
    (fsdp(fsdp_version=2, fsdp_sharding_strategy="HYBRID_SHARD"), {}),
    (
        fsdp(fsdp_version=2, fsdp_sharding_strategy="NO_SHARD", fsdp_reshard_after_forward=False),
        {"reshard_after_forward": False},
    ),
    (fsdp(fsdp_version=1, fsdp_sharding_strategy="NO_SHARD"), {"shard_size": 1, "reshard_after_forward": False}),
    (fsdp(fsdp_limit_all_gathers=True), {}),
    (fsdp(fsdp_limit_all_gathers=False), {}),
    ({**fsdp(fsdp_new_option=None, debug=None), "dynamo_config": {"x": None}, "parallelism_config": {"y": None}}, {}),
    ({**FSDP, "mixed_precision": "no"}, {}),
    ({**FSDP, "mixed_precision": False}, {}),
    ({**FSDP, "mixed_precision": "bf16"}, {"bf16": True}),
    ({**FSDP, "mixed_precision": "fp16"}, {"fp16": True}),
    ({**FSDP, "fp16": True}, {"fp16": True}),
    ({**FSDP, "fp16": "yes", "mixed_precision": "no"}, {}),
    ({**FSDP, "dynamo_backend": "NO"}, {}),
    ({**FSDP, "dynamo_backend": "EAGER"}, {"compile_blocks": "eager"}),
    (fsdp(), {}),
    (fsdp(fsdp_version=2), {}),
    (fsdp(version=2, offload_params=True), {"cpu_offload": True}),  # as accelerate, which adds what is left out
    (fsdp(fsdp_offload_params=True), {"cpu_offload": True}),
    (fsdp(fsdp_offload_params="True"), {"cpu_offload": True}),
    (fsdp(fsdp_offload_params="false"), {}),
    (fsdp(fsdp_offload_params=0), {}),
    (fsdp(fsdp_reshard_after_forward=True), {}),
    (fsdp(fsdp_reshard_after_forward="false"), {"reshard_after_forward": False}),
    (fsdp(fsdp_reshard_after_forward=1), {}),
    (fsdp(fsdp_reshard_after_forward="FULL_SHARD"), {}),
    (fsdp(fsdp_reshard_after_forward="SHARD_GRAD_OP"), {"reshard_after_forward": False}),
    (fsdp(fsdp_reshard_after_forward=2), {"reshard_after_forward": False}),
    (fsdp(fsdp_reshard_after_forward="no_shard"), {"shard_size": 1, "reshard_after_forward": False}),
    (fsdp(fsdp_sharding_strategy="FULL_SHARD"), {}),
    (fsdp(fsdp_sharding_strategy=1), {}),
    (fsdp(fsdp_sharding_strategy="SHARD_GRAD_OP"), {"reshard_after_forward": False}),
    (fsdp(fsdp_sharding_strategy=3), {"shard_size": 1, "reshard_after_forward": False}),
    (fsdp(fsdp_sharding_strategy="HYBRID_SHARD"), {}),
    (fsdp(fsdp_sharding_strategy="5"), {"reshard_after_forward": False}),
    (fsdp(fsdp_sharding_strategy="FULL_SHARD", fsdp_reshard_after_forward=False), {"reshard_after_forward": False}),
    ({**fsdp(fsdp_sharding_strategy=4), "num_processes": 16, "num_machines": 2}, {"shard_size": 8}),
    (
        {**fsdp(fsdp_sharding_strategy="HYBRID_SHARD_ZERO2"), "num_processes": 16, "num_machines": 4},
        {"shard_size": 4, "reshard_after_forward": False},
    ),
    ({**FSDP, "num_processes": 16, "num_machines": 4}, {}),
    (fsdp(fsdp_transformer_layer_cls_to_wrap="A, B"), {"block_class_names": ("A", "B")}),
    (fsdp(fsdp_transformer_layer_cls_to_wrap=["A", "B"]), {"block_class_names": ("A", "B")}),
    (fsdp(fsdp_transformer_layer_cls_to_wrap=""), {}),
    (fsdp(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP", fsdp_min_num_params=5), {}),
    (size_based(fsdp_min_num_params=2000), {"min_unit_params": 2000}),
    (size_based(fsdp_min_num_params="1e6"), {"min_unit_params": 10**6}),
    (size_based(), {"min_unit_params": 10**8}),
    (size_based(fsdp_min_num_params=0), {}),
    (size_based(fsdp_transformer_layer_cls_to_wrap="A", fsdp_min_num_params=7), {"min_unit_params": 7}),
    (fsdp(fsdp_activation_checkpointing=True), {"activation_checkpointing": True}),
    (fsdp(fsdp_activation_checkpointing=False, fsdp_activation_checkpointing_offload=False), {}),
    (fsdp(fsdp_ignored_modules=r".*\.(vision|audio)"), {"ignored_modules": (r".*\.(vision|audio)",)}),
    (fsdp(fsdp_ignored_modules=["a,b", "c"]), {"ignored_modules": ("a,b", "c")}),
    (fsdp(fsdp_ignored_modules=None), {}),
    (dynamo(), {"compile_blocks": True}),
    (dynamo("inductor", dynamo_mode="default", dynamo_use_regional_compilation=True), {"compile_blocks": True}),
    (dynamo("aot_eager", dynamo_use_fullgraph=False, dynamo_use_dynamic=False), {"compile_blocks": "aot_eager"}),
    (dynamo("NO", dynamo_mode="max-autotune", dynamo_use_fullgraph=True), {}),
    ({**FSDP, "dynamo_config": None}, {}),
    (parallel(dp_shard_size=4, dp_replicate_size=2), {"shard_size": 4}),
    (parallel(dp_shard_size=1, dp_replicate_size=1), {}),
    (parallel(tp_size=1, cp_size=1, sp_size=1, cp_comm_strategy="allgather", cp_backend="torch"), {}),
    (parallel(sp_size=2), {"shard_size": 2, "sequence_parallel_size": 2}),
    (parallel(dp_shard_size=4, sp_size=2), {"shard_size": 8, "sequence_parallel_size": 2}),
    (parallel(dp_replicate_size=2, cp_size=4), {"shard_size": 4, "sequence_parallel_size": 4}),
    ({**parallel(sp_size=2), "distributed_type": "MULTI_GPU"}, {"shard_size": 1, "reshard_after_forward": False}),
    (parallel(tp_size=2), {"tensor_parallel_size": 2}),
    (parallel(dp_shard_size=4, tp_size=2), {"shard_size": 4, "tensor_parallel_size": 2}),
    (
        {**fsdp(fsdp_sharding_strategy=4), **parallel(tp_size=2), "num_machines": 2, "num_processes": 16},
        {"shard_size": 4, "tensor_parallel_size": 2},
    ),
    (parallel(sp_backend="deepspeed", sp_seq_length=3, sp_seq_length_is_variable=True, sp_attn_implementation="x"), {}),
    (
        {
            **FSDP,
            "machine_rank": 0,
            "gpu_ids": "all",
            "main_process_ip": "host0",
            "main_process_port": 29500,
            "rdzv_backend": "static",
            "same_network": True,
            "main_training_function": "main",
            "debug": False,
            "use_cpu": False,
            "enable_cpu_affinity": False,
            "parallelism_config": {},
        },
        {},
    ),
]

# Keys for other launchers and devices: not in the table, and refused unless they are empty or off.
UNSUPPORTED = [
    *("fp8_config", "deepspeed_config", "megatron_lm_config", "mpirun_config", "downcast_bf16"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file", "commands"),
    *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version"),
    *("transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
]

# A key, a value that is reported, at which level, and what the report says.
REPORTED = [
    ("fsdp_version", 1, logging.INFO, "FSDP2"),
    ("fsdp_sharding_strategy", "FULL_SHARD", logging.INFO, "reshard_after_forward"),
    ("fsdp_use_orig_params", True, logging.INFO, "never flattened"),
    ("fsdp_use_orig_params", "false", logging.WARNING, "never flattened"),
    ("fsdp_sync_module_states", False, logging.INFO, "under one seed"),
    ("fsdp_sync_module_states", True, logging.WARNING, "under one seed"),
    ("fsdp_cpu_ram_efficient_loading", False, logging.INFO, "meta_init=True"),
    ("fsdp_cpu_ram_efficient_loading", True, logging.WARNING, "meta_init=True"),
    ("fsdp_backward_prefetch", "BACKWARD_PRE", logging.INFO, "prefetch_depth"),
    ("fsdp_backward_prefetch", 2, logging.WARNING, "prefetch_depth"),
    ("fsdp_backward_prefetch_policy", "NO_PREFETCH", logging.WARNING, "prefetch_depth"),
    ("fsdp_limit_all_gathers", False, logging.INFO, "reuses the memory"),
    ("fsdp_forward_prefetch", False, logging.INFO, "prefetch_depth=1"),
    ("fsdp_forward_prefetch", True, logging.WARNING, "prefetch_depth=1"),
    ("fsdp_state_dict_type", "FULL_STATE_DICT", logging.INFO, "each rank writes"),
    ("fsdp_state_dict_type", "SHARDED_STATE_DICT", logging.INFO, "each rank writes"),
    ("fsdp_state_dict_type", "LOCAL_STATE_DICT", logging.WARNING, "each rank writes"),
    ("fsdp_auto_wrap_policy", "NO_WRAP", logging.WARNING, "blocks are still detected"),
    ("dynamo_use_regional_compilation", False, logging.INFO, "separately"),
    ("dynamo_mode", "max-autotune", logging.WARNING, "default mode"),
    ("dynamo_use_fullgraph", True, logging.WARNING, "several graphs"),
    ("dynamo_use_dynamic", True, logging.WARNING, "shapes"),
    ("debug", True, logging.WARNING, "always cause an error"),
    ("enable_cpu_affinity", True, logging.WARNING, "--numa-binding"),
]

# A key, a value that is refused, and what the error says.
REFUSED = [
    ("compute_environment", "AMAZON_SAGEMAKER", "expected LOCAL_MACHINE. .* torchrun"),
    ("distributed_type", "DEEPSPEED", r"expected one of FSDP, MULTI_GPU, MULTI_CPU, NO\. Use FSDP"),
    *(("distributed_type", name, "Use FSDP") for name in ("MEGATRON_LM", "XLA", "TPU", "MULTI_NPU", "MULTI_XPU")),
    ("mixed_precision", "fp8", "expected one of NO, BF16, FP16. Use bf16"),
    *((name, value, "not supported: leave it out") for name in UNSUPPORTED for value in (True, "x", {"key": 1})),
    ("fsdp_activation_checkpointing_offload", True, "set it to false"),
    ("parallelism_config_tp_size", "two", "expected an integer"),
    # values that accelerate does not take, either
    ("mixed_precision", "bf32", "expected one of NO, BF16, FP16"),
    ("fsdp_offload_params", "maybe", "expected true or false"),
    ("fsdp_min_num_params", "many", "expected an integer"),
    ("fsdp_min_num_params", 1.5, "expected an integer"),
    ("fsdp_sharding_strategy", 6, "expected one of FULL_SHARD"),
    ("fsdp_reshard_after_forward", "SOMETIMES", "expected true, false or one of FULL_SHARD"),
    ("fsdp_transformer_layer_cls_to_wrap", [1], "expected a string or a list of strings"),
    ("fsdp_ignored_modules", "(", "expected valid regular expressions"),
    ("fsdp_auto_wrap_policy", "WRAP", "expected one of TRANSFORMER_BASED_WRAP"),
    ("num_processes", "two", "expected an integer"),
]


def with_key(name, value):
    section = next((section for section, (_, keys) in SECTIONS.items() if name in keys and name not in TOP), None)
    content = {**FSDP, **({section: {name: value}} if section else {name: value})}
    if section == "dynamo_config":
        content[section]["dynamo_backend"] = "EAGER"
    return content


@pytest.mark.parametrize(("content", "expected"), CONFIGURES, ids=str)
def test_a_file_configures_what_it_says(tmp_path, content, expected):
    assert StrategyConfig.from_accelerate(written(tmp_path, content)) == StrategyConfig(**{**SHARDED, **expected})


@pytest.mark.parametrize(("key", "value", "level", "says"), REPORTED, ids=str)
def test_what_is_done_otherwise_is_reported_by_name_in_one_record(tmp_path, caplog, key, value, level, says):
    with caplog.at_level("INFO"):
        StrategyConfig.from_accelerate(written(tmp_path, with_key(key, value)))
    (record,) = caplog.records
    assert record.levelno == level
    assert f"{key} (" in record.getMessage() and says in record.getMessage()


def test_one_record_lists_all_and_nothing_to_say_makes_none(tmp_path, caplog):
    with caplog.at_level("INFO"):
        StrategyConfig.from_accelerate(written(tmp_path, fsdp(fsdp_version=2, fsdp_offload_params=True)))
        assert not caplog.records
        keys = {"fsdp_use_orig_params": True, "fsdp_version": 1, "fsdp_forward_prefetch": True}
        StrategyConfig.from_accelerate(written(tmp_path, fsdp(**keys)))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(f"\n  {name} (" in record.getMessage() for name in keys)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "FULL_SHARD"])
def test_a_strategy_of_version_1_in_a_file_of_version_2_is_reported_as_ignored(tmp_path, caplog, strategy):
    with caplog.at_level("INFO"):
        StrategyConfig.from_accelerate(written(tmp_path, fsdp(fsdp_version=2, fsdp_sharding_strategy=strategy)))
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if strategy == "FULL_SHARD" else logging.WARNING)
    assert f"fsdp_sharding_strategy ({strategy}): ignored as by accelerate" in record.getMessage()
    assert "MULTI_GPU to replicate the model" in record.getMessage()


def test_what_accelerate_does_not_look_at_does_not_count(tmp_path, caplog):
    content = {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_offload_params": True, "fsdp_version": 1}}
    with caplog.at_level("INFO"):
        config = StrategyConfig.from_accelerate(written(tmp_path, content))
    assert config == StrategyConfig(**WHOLE)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "fsdp_offload_params, fsdp_version: ignored, because distributed_type is MULTI_GPU" in record.getMessage()


def test_only_rank_0_reports_before_there_is_a_process_group(tmp_path, caplog, monkeypatch):
    path = written(tmp_path, fsdp(fsdp_version=1))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # another test's group may be there
    with caplog.at_level("INFO"):
        monkeypatch.setenv("RANK", "1")
        StrategyConfig.from_accelerate(path)
        assert not caplog.records
        monkeypatch.setenv("RANK", "0")
        StrategyConfig.from_accelerate(path)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("key", "value", "says"), REFUSED, ids=str)
def test_what_cannot_be_done_is_refused_by_key_and_value_with_a_way_out(tmp_path, key, value, says):
    with pytest.raises(ConfigError, match=says) as caught:
        StrategyConfig.from_accelerate(written(tmp_path, with_key(key, value)))
    if key != "fsdp_ignored_modules":
        assert f"fsdp.yaml: {key} is " in str(caught.value)


@pytest.mark.parametrize("off", [None, "", [], {}, False, "no", "false"], ids=str)
def test_keys_for_other_launchers_are_ignored_if_they_are_empty_or_off(tmp_path, caplog, off):
    with caplog.at_level("INFO"):
        config = StrategyConfig.from_accelerate(written(tmp_path, {**FSDP, **dict.fromkeys(UNSUPPORTED, off)}))
    assert config == StrategyConfig(**SHARDED) and not caplog.records


def test_a_key_in_the_wrong_section_is_refused_also_if_it_is_off(tmp_path):
    with pytest.raises(ConfigError, match=r"fsdp_reshard_after_forward is False, .* It belongs in fsdp_config"):
        StrategyConfig.from_accelerate(written(tmp_path, {**FSDP, "fsdp_reshard_after_forward": False}))
    with pytest.raises(ConfigError, match="something is False, which is not supported"):
        StrategyConfig.from_accelerate(written(tmp_path, fsdp(something=False)))


def test_unknown_keys_are_refused_all_at_once(tmp_path):
    content = {**fsdp(fsdp_ofload_params=True, something=1), "mixed_precison": "bf16", "fsdp_version": 2}
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.from_accelerate(written(tmp_path, content))
    message = str(caught.value)
    assert "fsdp_ofload_params is True, which is not supported: leave it out. Did you mean 'fsdp_offload_" in message
    assert "mixed_precison is 'bf16', which is not supported: leave it out. Did you mean 'mixed_precision'?" in message
    assert "fsdp_something is 1" not in message and "something is 1" in message
    assert "fsdp_version is 2, which is not supported: leave it out. It belongs in fsdp_config." in message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "distributed_type is missing"),
        ({**FSDP, "fsdp_config": "x"}, "fsdp_config is 'x', expected a mapping"),
        (fsdp(fsdp_sharding_strategy=1, fsdp_reshard_after_forward="NO_SHARD"), "expected one strategy"),
        (parallel(dp_replicate_size=2), "dp_replicate_size is 2"),
        (parallel(sp_size=2, cp_size=4), "sp_size is 2 and .*_cp_size is 4, expected 1 for one of them"),
        ({**fsdp(fsdp_sharding_strategy=4), "num_machines": 2}, "num_processes is missing on 2 machines"),
        ({**fsdp(fsdp_sharding_strategy=4), "num_machines": 2, "num_processes": 3}, "num_processes is 3 on 2"),
        (
            {**fsdp(fsdp_sharding_strategy=4), **parallel(tp_size=3), "num_machines": 2, "num_processes": 16},
            "tp_size is 3, and there are 8 processes on a machine",
        ),
        (parallel(tp_size=2, sp_size=2), "tensor_parallel_size is 2, expected 1 with sequence_parallel_size above 1"),
        ("- 1\n", "expected a mapping"),
        ("distributed_type: FSDP\n1: 2\n", "1 is 2, which is not supported"),
        ("a: [", "is not YAML"),
    ],
    ids=str,
)
def test_a_file_that_contradicts_itself_or_is_none_is_refused(tmp_path, content, says):
    with pytest.raises(ConfigError, match=says):
        StrategyConfig.from_accelerate(written(tmp_path, content))


def test_json_is_read_by_its_suffix_and_a_missing_file_is_said(tmp_path):
    content = {**fsdp(fsdp_offload_params=True), "mixed_precision": "bf16"}
    path = written(tmp_path, json.dumps(content, indent="\t"), "default_config.json")
    assert StrategyConfig.from_accelerate(path) == StrategyConfig(cpu_offload=True)
    with pytest.raises(ConfigError, match="is not JSON"):
        StrategyConfig.from_accelerate(written(tmp_path, "{", "broken.json"))
    with pytest.raises(ConfigError, match="No such file"):
        StrategyConfig.from_accelerate(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not YAML"):
        StrategyConfig.from_accelerate(tmp_path / "binary.yaml")


def test_files_that_accelerate_itself_writes_are_read(tmp_path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    keys = {"fsdp_version": 2, "fsdp_offload_params": True, "fsdp_reshard_after_forward": False}

    def config():
        return config_args.ClusterConfig(
            compute_environment="LOCAL_MACHINE",
            distributed_type="FSDP",
            mixed_precision="bf16",
            use_cpu=False,
            debug=False,
            num_processes=2,
            fsdp_config=dict(keys),
            dynamo_config={"dynamo_backend": "EAGER"},
        )

    expected = StrategyConfig(cpu_offload=True, reshard_after_forward=False, compile_blocks="eager")
    config().to_yaml_file(tmp_path / "default_config.yaml")
    config().to_json_file(tmp_path / "default_config.json")
    for name in ("default_config.yaml", "default_config.json"):
        assert StrategyConfig.from_accelerate(tmp_path / name) == expected
        assert config_args.load_config_from_file(str(tmp_path / name)).fsdp_config == keys


def test_a_cpu_is_not_promised_beside_an_accelerator(tmp_path, monkeypatch):
    path = written(tmp_path, {**FSDP, "use_cpu": True})
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert StrategyConfig.from_accelerate(path) == StrategyConfig(**SHARDED)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    with pytest.raises(ConfigError, match=r"use_cpu is True, .* CUDA_VISIBLE_DEVICES= to hide"):
        StrategyConfig.from_accelerate(path)


# --- the table -------------------------------------------------------------------------------------------------------


def test_each_key_of_the_table_has_its_case_here():
    contents = [content for content, _ in CONFIGURES] + [
        with_key(name, value) for name, value, *_ in REPORTED + REFUSED
    ]
    seen = set()
    for content in contents:
        for name, value in content.items():
            prefix = SECTIONS[name][0] if name in SECTIONS else ""
            inner = (value or {}) if name in SECTIONS else {name: value}
            seen |= {key if key.startswith(prefix) else prefix + key for key in inner}
    assert KEYS.keys() <= seen, KEYS.keys() - seen
    assert {key.sets for key in KEYS.values() if key.sets} <= {field.name for field in fields(StrategyConfig)}


def test_the_table_knows_every_key_that_accelerate_knows():
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    from accelerate.commands.launch import launch_command_parser

    known = {*config_args.ClusterConfig.__dataclass_fields__, *config_args.SageMakerConfig.__dataclass_fields__}
    assert not {*TOP, *SECTIONS} & {*UNSUPPORTED}
    assert known <= {*TOP, *SECTIONS, *UNSUPPORTED}, "keys that accelerate has added: supported or not?"
    options = {action.dest for action in launch_command_parser()._actions}
    for prefix, keys in SECTIONS.values():
        of_section = {option for option in options if option.startswith(prefix)}
        assert of_section <= keys.keys(), of_section - keys.keys()


def test_the_page_shows_the_table():
    page = (Path(__file__).parent.parent / "docs" / "coming_from_accelerate.md").read_text()
    assert not [name for name in UNSUPPORTED if f"`{name}`" not in page]
    for title, keys in {"": TOP, **{name: keys for name, (_, keys) in SECTIONS.items()}}.items():
        heading = f"### `{title}`" if title else "### The file itself"
        rows = page.split(heading, 1)[1].split("\n#", 1)[0]
        expected = [f"| `{name}` | {key.kind} | {key.text} |" for name, key in keys.items()]
        assert [row for row in rows.splitlines() if row.startswith("| `")] == expected, "\n".join(expected)


# --- a script that accelerate starts ---------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist
from helpers.models import batch_of, build, loss_of
from fsdp2_strategy import FSDPV2Strategy, StrategyConfig

config = StrategyConfig.from_accelerate({path!r})
with FSDPV2Strategy(config=config.replace(max_norm=1.0)) as strategy:
    model = strategy.prepare_model(build("llama"), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    losses = []
    for step in range(3):
        loss = loss_of("llama", model, batch_of("llama", step, strategy.get_rank()))
        strategy.backward(loss, model, optimizer)
        losses.append((strategy.all_reduce(loss.item()), strategy.optimizer_step(optimizer, model).grad_norm))
    if strategy.is_rank_0():
        mesh = model.model.layers[0].mlp.up_proj.weight.device_mesh
        facts = {{"losses": losses, "shards": mesh.size(), "world": strategy.world_size}}
        open(sys.argv[1], "w").write(json.dumps(facts))
    dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.full
def test_accelerate_launch_and_torchrun_train_alike_from_one_file(tmp_path):
    launch = pytest.importorskip("accelerate.commands.launch").__name__
    keys = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_activation_checkpointing": True}
    keys |= {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_ignored_modules": r".*_layernorm"}
    content = {
        "compute_environment": "LOCAL_MACHINE",
        **fsdp(**keys),
        "mixed_precision": "bf16",
        "main_process_port": 0,
    }
    content |= {"num_processes": 2, "num_machines": 1, "machine_rank": 0, "use_cpu": False, "debug": False}
    path = written(tmp_path, content)
    (tmp_path / "script.py").write_text(SCRIPT.format(tests=str(Path(__file__).parent), path=str(path)))

    def losses(name, *launcher):
        run = subprocess.run(
            [sys.executable, "-m", *launcher, str(tmp_path / "script.py"), str(tmp_path / name)],
            capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        return json.loads((tmp_path / name).read_text())

    started_by_accelerate = losses("accelerate", launch, "--config_file", str(path))
    assert started_by_accelerate == losses("torchrun", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert started_by_accelerate["shards"] == started_by_accelerate["world"] == 2
