"""The list of the tests that also run on the simulated accelerator names tests that exist, and no topic is missing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.simulated import CORE, TESTS

FOLDER = Path(__file__).parent
TOPICS = {
    "shard": "test_shard.py::test_frozen_units_communicate_no_gradients_and_keep_their_weights",
    "step": "test_step.py::test_models_that_take_turns_never_see_each_others_state",
    "accumulate": "test_accumulation.py::test_a_block_of_accumulate_is_for_all_models_and_for_steps_of_any_size",
    "precision": "test_shard.py::test_keep_fp32_computes_the_named_parameters_in_fp32",
    "checkpoint": "test_checkpoint.py::test_resume_is_bitwise_exact_with_dropout",
    "asynchronous checkpoint": "test_async.py::test_training_beside_saves_has_the_same_losses",
    "offload": "test_memory.py::test_a_trip_changes_no_number_of_a_run",
    "stream": "test_rollout.py::test_what_is_away_streams_and_averages_stream_in_their_place",
    "EMA": "test_memory.py::test_averages_are_taken_of_what_is_away",
    "LoRA": "test_lora.py::test_other_kinds_of_adapters_train_as_peft_does_unsharded",
    "log-probs": "test_logprob.py::test_in_bf16_they_are_the_plain_ones_of_the_same_model",
    "generate": "test_shard.py::test_generate_works_before_and_after_training_steps",
    "sequence": "test_sequence.py::test_a_resumed_run_with_dropout_is_bitwise_equal",
    "tensor": "test_tensor_parallel.py::test_architectures_train_on_two_ranks_that_share_layers",
    "expert": "test_expert_parallel.py::test_a_rank_whose_experts_get_no_token_takes_part_in_forward_and_backward",
    "vision": "test_mixed_data.py::test_generation_with_images_on_one_rank_gives_what_one_process_gives",
    "router": "test_router_replay.py::test_a_trainer_replays_the_experts_of_an_engine_in_bf16",
    "engines": "test_rollout.py::test_the_engine_generates_with_exactly_the_models_weights",
    "export": "test_export.py::test_logits_of_the_export_equal_those_of_the_trained_model",
    "load": "test_weights.py::test_values_are_replaced_in_place_where_a_model_is_real",
}
"""For each topic of the package, a test on two ranks."""


def decorators_of(file):
    """Return the decorators of the test functions of a file, by name."""
    functions = [node for node in ast.parse((FOLDER / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    return {function.name: [ast.unparse(each) for each in function.decorator_list] for function in functions}


@pytest.mark.parametrize("file", TESTS)
def test_each_test_of_the_list_exists(file):
    assert not set(TESTS[file]) - decorators_of(file).keys()


def test_the_core_of_it_exists():
    assert not set(CORE) - decorators_of("test_gpu.py").keys()


@pytest.mark.parametrize("topic", TOPICS)
def test_each_topic_runs_on_two_ranks(topic):
    file, test = TOPICS[topic].split("::")
    assert test in TESTS[file]
    found = [text for text in decorators_of(file)[test] if "ranks(" in text or "layouts(" in text]
    assert any("ranks(2)" in text or "layouts('2')" in text for text in found), found
