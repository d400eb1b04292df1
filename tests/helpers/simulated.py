"""Tests that run a second time on the simulated accelerator, one case of each: a race report fails them."""

from __future__ import annotations

TESTS = {
    "test_accumulation.py": ("test_a_block_of_accumulate_is_for_all_models_and_for_steps_of_any_size",),
    "test_async.py": (
        "test_several_files_are_the_same_behind_the_trainer",
        "test_training_beside_saves_has_the_same_losses",
        "test_the_next_save_a_load_and_close_wait_for_the_one_in_flight",
        "test_the_memory_of_a_copy_serves_one_save_after_the_other",
        "test_what_is_away_and_tensors_larger_than_a_slab_are_copied_all_the_same",
        "test_what_is_copied_is_not_held",
    ),
    "test_checkpoint.py": (
        "test_resume_is_bitwise_exact_with_dropout",
        "test_resume_goes_on_counting_and_between_boundaries_drops_nothing_but_gradients",
        "test_parameters_without_gradients_frozen_ones_and_other_groupings_resume",
        "test_loading_into_an_optimizer_that_has_state_fills_that_and_holds_nothing_twice",
        "test_a_model_that_is_loaded_alone_leaves_the_random_state",
        "test_buffers_that_differ_between_ranks_are_saved_from_one_of_them",
    ),
    "test_engines.py": ("test_a_trainer_uses_an_engine_by_name",),
    "test_expert_parallel.py": (
        "test_a_rank_whose_experts_get_no_token_takes_part_in_forward_and_backward",
        "test_experts_generate_as_in_one_process_and_are_divided_by_number",
        "test_an_engine_has_all_experts",
    ),
    "test_logprob.py": (
        "test_in_bf16_they_are_the_plain_ones_of_the_same_model",
        "test_training_on_them_takes_the_steps_of_the_plain_ones_with_accumulation_and_recomputation",
        "test_a_model_may_be_asked_on_one_rank_before_it_is_sharded",
    ),
    "test_lora.py": (
        "test_other_kinds_of_adapters_train_as_peft_does_unsharded",
        "test_an_engine_gets_the_merged_weights_of_an_actor_and_verifies_them",
        "test_a_stream_leaves_nothing_of_the_merge_behind",
    ),
    "test_memory.py": (
        "test_a_trip_changes_no_number_of_a_run",
        "test_what_is_away_holds_no_memory_on_the_device_and_is_never_garbage",
        "test_what_is_away_is_saved_exported_and_loaded_where_it_is",
        "test_averages_are_taken_of_what_is_away",
    ),
    "test_mixed_data.py": (
        "test_a_projector_or_a_tower_may_be_all_that_is_trained",
        "test_such_a_model_is_saved_and_loaded_and_streamed_and_goes_away_as_any_other",
    ),
    "test_rollout.py": (
        "test_many_small_tensors_take_few_collectives_and_large_ones_are_not_copied",
        "test_what_is_away_streams_and_averages_stream_in_their_place",
        "test_the_engine_generates_with_exactly_the_models_weights",
        "test_a_trainer_sets_up_updates_and_puts_its_engine_to_sleep",
        "test_tensors_cut_along_another_dimension_or_not_evenly_arrive_whole",
    ),
    "test_router_replay.py": (
        "test_a_trainer_replays_the_experts_of_an_engine_in_bf16",
        "test_micro_batches_replay_their_rows_under_the_strategy",
    ),
    "test_sequence.py": (
        "test_recomputed_activations_have_the_gradients_of_unsharded",
        "test_offloaded_parameters_and_averages_are_those_of_full_sequences",
        "test_dropout_keeps_the_mean_and_its_gradients_belong_to_its_masks",
        "test_a_resumed_run_with_dropout_is_bitwise_equal",
    ),
    "test_shard.py": (
        "test_inference_holds_bf16_and_buffers_keep_their_dtype",
        "test_keep_fp32_computes_the_named_parameters_in_fp32",
        "test_frozen_units_communicate_no_gradients_and_keep_their_weights",
        "test_activation_checkpointing_recomputes_under_the_same_dropout",
        "test_generate_works_before_and_after_training_steps",
        "test_cpu_offload_and_free_functions_work_without_the_class",
        "test_uneven_and_empty_shards_are_kept_whole",
    ),
    "test_step.py": (
        "test_the_step_takes_a_name_and_no_scheduler",
        "test_the_whole_step_synchronises_the_ranks_with_one_all_reduce",
        "test_a_loop_that_clips_itself_needs_no_second_norm_and_gets_the_same_step",
        "test_models_that_take_turns_never_see_each_others_state",
        "test_a_scalar_that_is_trained_later_gets_the_average_gradient",
        "test_a_norm_that_is_not_finite_on_one_rank_skips_the_step_on_all",
        "test_accumulation_communicates_what_its_mode_says",
    ),
    "test_stream_changes.py": (
        "test_buffers_that_a_forward_pass_changes_are_weights_of_the_stream",
        "test_the_stream_after_a_change_sends_everything_again",
    ),
    "test_tensor_parallel.py": (
        "test_generation_and_log_probabilities_are_those_of_the_unsharded_model",
        "test_dropout_of_split_activations_has_independent_masks_and_the_numbers_of_the_unsharded_model",
        "test_a_run_with_dropout_in_split_layers_resumes_bitwise",
    ),
}
"""By file. Those of `test_gpu.py` run there in all cases, and first of all: they are written for an accelerator."""
CORE = (
    "test_training_on_a_gpu_equals_the_unsharded_model",
    "test_offloaded_models_free_the_device_and_return_with_the_same_bits",
    "test_an_asynchronous_save_holds_the_state_before_the_next_step",
    "test_two_gpus_train_as_one",
)
"""Tests of `test_gpu.py` that `make test` runs on the simulated accelerator; CI runs the others."""


def runs_simulated(file: str, test: str) -> bool:
    """Return whether a test also runs on the simulated accelerator."""
    return file == "test_gpu.py" or test in TESTS.get(file, ())
