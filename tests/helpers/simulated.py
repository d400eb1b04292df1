"""Tests that run a second time on the simulated accelerator, one case of each: a race report fails them."""

from __future__ import annotations

TESTS = {
    "test_accumulation.py": (
        "test_a_block_of_accumulate_is_for_all_models_and_for_steps_of_any_size",
        "test_items_that_are_known_at_the_end_of_a_step_only_weigh_all_tokens_alike",
        "test_each_rule_takes_the_steps_that_each_form_of_a_loop_means",
    ),
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
    "test_direct_use.py": (
        "test_a_weight_that_is_used_directly_has_its_gradient",
        "test_a_frozen_weight_that_is_used_directly_passes_gradients_on",
    ),
    "test_engines.py": (
        "test_a_trainer_uses_an_engine_by_name",
        "test_ranks_that_share_an_sglang_engine_generate_with_that_of_the_first",
        "test_vllm_takes_differences",
    ),
    "test_expert_parallel.py": (
        "test_a_rank_whose_experts_get_no_token_takes_part_in_forward_and_backward",
        "test_experts_generate_as_in_one_process_and_are_divided_by_number",
        "test_an_engine_has_all_experts",
        "test_experts_or_all_else_may_be_frozen",
    ),
    "test_export.py": (
        "test_logits_of_the_export_equal_those_of_the_trained_model",
        "test_a_plain_model_gives_one_file_and_nothing_else",
        "test_a_variant_and_the_models_own_names_can_be_had",
    ),
    "test_inference_mode.py": (
        "test_an_offloaded_model_that_is_reloaded_in_inference_mode_trains",
        "test_a_stream_of_weights_in_inference_mode_leaves_a_model_that_trains",
    ),
    "test_input_devices.py": (
        "test_log_probs_and_generation_take_ids_in_host_memory",
        "test_engines_generate_and_are_compared_with_ids_in_host_memory",
        "test_parts_of_sequences_in_host_memory_are_computed_on_the_device",
        "test_importance_inputs_are_on_the_device_of_the_new_log_probs",
        "test_replicas_in_host_memory_are_loaded_through_the_device_by_a_group_without_a_cpu_backend",
    ),
    "test_logprob.py": (
        "test_in_bf16_they_are_the_plain_ones_of_the_same_model",
        "test_training_on_them_takes_the_steps_of_the_plain_ones_with_accumulation_and_recomputation",
        "test_a_model_may_be_asked_on_one_rank_before_it_is_sharded",
    ),
    "test_loops.py": (
        "test_each_micro_batch_may_have_its_own_number_of_items",
        "test_micro_batches_can_be_discarded_on_purpose_and_after_a_skipped_step",
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
        "test_generation_with_images_on_one_rank_gives_what_one_process_gives",
    ),
    "test_nccl_rules.py": ("test_the_thread_of_a_save_starts_collectives_of_the_host_only",),
    "test_rlhf.py": (
        "test_masters_have_the_same_numbers_with_every_kernel_of_adam",
        "test_float16_scales_its_loss_skips_overflows_and_resumes",
        "test_averages_take_the_parameters_place_and_give_it_back",
        "test_a_moving_average_keeps_fp32_behind_a_bf16_model_of_another_sharding",
        "test_one_optimizer_steps_parameters_of_several_meshes_with_one_right_norm",
        "test_all_reduce_and_all_gather_take_numbers_tensors_and_dicts",
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
        "test_a_wrapper_with_its_own_parameters_replays_and_recovers_from_a_wrong_routing",
        "test_a_wrong_routing_is_an_error_on_every_rank",
        "test_split_sequences_and_compiled_blocks_are_refused",
    ),
    "test_sequence.py": (
        "test_recomputed_activations_have_the_gradients_of_unsharded",
        "test_offloaded_parameters_and_averages_are_those_of_full_sequences",
        "test_dropout_keeps_the_mean_and_its_gradients_belong_to_its_masks",
        "test_a_resumed_run_with_dropout_is_bitwise_equal",
    ),
    "test_several_models.py": (
        "test_the_free_functions_save_and_load_several_models",
        "test_models_on_other_ranks_and_on_replicas",
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
        "test_architectures_train_on_two_ranks_that_share_layers",
        "test_recomputed_blocks_have_the_numbers_of_others",
        "test_a_classifier_is_split_by_the_plan_of_its_decoder",
        "test_heads_and_adapters_of_rowwise_layers_draw_independent_masks_and_all_others_common_ones",
        "test_modules_that_an_adapter_saves_are_split_as_without_it",
        "test_master_weights_may_be_in_the_optimizer",
        "test_a_split_model_may_be_offloaded",
    ),
    "test_weights.py": (
        "test_a_plain_model_loads_from_its_own_names_with_buffers_and_uneven_shards",
        "test_hybrid_sharding_reads_once_per_shard_group_and_replicas_agree",
        "test_replicas_share_the_reading_where_their_last_shards_are_empty",
        "test_offloaded_parameters_are_loaded_into_host_memory_and_train",
        "test_values_are_replaced_in_place_where_a_model_is_real",
        "test_a_nested_block_is_part_of_the_outer_one",
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
