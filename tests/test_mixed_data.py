"""Images on some ranks only: no hang, the gradients of all batches together, and a name for what diverges otherwise."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import _BASE, VOCAB, batch_of, build, on_device
from helpers.reference import Unsharded, assert_close, assert_parameters_close, full_grads, full_parameters
from helpers.worlds import some

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, explain, shard_model
from fsdp2_strategy.errors import ShardError, StepError

POLICIES = ("root", "dummy", "replicate")


def qwen2_5_vl():
    text = {**_BASE, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "window_size": 16}
    vision |= {"fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
        vision_start_token_id=VOCAB - 3,
        vision_end_token_id=VOCAB - 4,
    )
    torch.manual_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(config).train()


def model_of(name):
    return qwen2_5_vl() if name == "qwen2_5_vl" else build(name)


def batch(name, step, rank, images):
    made = batch_of("llava" if name == "llava" else "qwen2_vl", step, rank)
    if not images:
        ids = batch_of("llama", step, rank)["input_ids"] % (VOCAB - 8) + 3
        made = {"input_ids": ids, "labels": ids}
    return made


def loss_of(model, batch):
    return model(**batch, use_cache=False).loss


def at(step, rank, world):
    """Say whether a rank's batch has images at a step: on one rank, on all, on none, on all others."""
    return [rank == 0, True, False, rank != 0 or world == 1][step % 4]


def cases(*rows):
    """Mark each row with the number of ranks, its first value; 1, 4 and llava are for `make test-full`."""
    return [
        pytest.param(*row, marks=[pytest.mark.ranks(row[0]), *([pytest.mark.full] if {1, 4, "llava"} & {*row} else [])])
        for row in rows
    ]


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize(
    ("world", "name", "policy"),
    cases(
        (1, "qwen2_5_vl", "dummy"),
        (3, "qwen2_5_vl", "root"),
        *((world, "qwen2_5_vl", policy) for world in (2, 4) for policy in POLICIES),
        *((2, "llava", policy) for policy in POLICIES),
    ),
)
def test_ranks_with_and_without_images_train_as_one_process_that_has_all(world, policy, name):
    model = model_of(name)
    reference = Unsharded(model, loss_of, lr=1e-3, weight_decay=0.1)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, mixed_mm_data=policy))
    strategy.prepare_model(model, is_training=True, shard_size=2 if world == 4 else -1)
    optimizer = strategy.create_optimizer(model, lr=1e-3, weight_decay=0.1)
    for step in range(4):
        batches = [batch(name, step, rank, at(step, rank, world)) for rank in range(world)]
        strategy.backward(loss_of(model, batches[dist.get_rank()]), model, optimizer)
        grads = full_grads(model)
        result = strategy.optimizer_step(optimizer, model, None)
        _, norm = reference.step(batches)
        assert_close(grads, reference.grads, 1e-5, f"{policy}, step {step}")
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert_parameters_close(full_parameters(model), full_parameters(reference.model), 2e-4)


@pytest.mark.parametrize("policy", some(POLICIES, ["replicate"]))
@pytest.mark.parametrize(("world", "grad_sync"), cases((2, "last"), (4, "defer_all_reduce")))
def test_micro_batches_may_have_images_at_any_time(world, policy, grad_sync):
    for bf16 in (False, True):
        model = qwen2_5_vl()
        reference = Unsharded(model.to(torch.bfloat16) if bf16 else model, loss_of, lr=1e-3)
        model = qwen2_5_vl()
        config = StrategyConfig(mixed_mm_data=policy, grad_sync=grad_sync, train_batch_size=3 * world, bf16=bf16)
        strategy = FSDPV2Strategy(config=config)
        strategy.prepare_model(model, is_training=True, shard_size=world // 2)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        some, others = [False, True, False], [True, False, False]
        for images in ([some if rank == 0 else [False] * 3 for rank in range(world)], [others] + [some] * (world - 1)):
            batches = [[batch("qwen2_5_vl", i, rank, images[rank][i]) for i in range(3)] for rank in range(world)]
            for micro in batches[dist.get_rank()]:
                strategy.backward(loss_of(model, micro), model, optimizer)
                if micro is batches[dist.get_rank()][-1]:
                    grads = full_grads(model)
                strategy.optimizer_step(optimizer, model, None)
            reference.step([b for of_rank in batches for b in of_rank], scale=1 / 3)
            assert_close(grads, reference.grads, 3e-2 if bf16 else 1e-5, f"{policy}, {grad_sync}")
            if bf16:
                break  # the reference's masters are bf16


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.ranks(2)
def test_a_projector_or_a_tower_may_be_all_that_is_trained(policy):
    for part in ("projector", "vision_tower"):
        model = model_of("llava")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part in name)
        reference = Unsharded(model, loss_of, lr=1e-3)
        shard_model(model, config=StrategyConfig(bf16=False, mixed_mm_data=policy), is_training=True)
        batches = [batch("llava", 0, rank, rank == 0) for rank in range(2)]
        loss_of(model, batches[dist.get_rank()]).backward()
        found = full_grads(model)
        loss_of(reference.model, batches[0]).backward()
        expected = {n: p.grad / 2 for n, p in reference.model.named_parameters() if p.grad is not None}
        assert_close(found, expected, 1e-5, f"{policy}, {part}")


@pytest.mark.parametrize("policy", some(POLICIES, ["dummy"]))
@pytest.mark.ranks(2)
def test_in_bf16_with_recomputation_and_a_frozen_tower_and_after_evaluation(policy):
    rank = dist.get_rank()
    config = StrategyConfig(mixed_mm_data=policy, activation_checkpointing=("Qwen2_5_VLVisionBlock",))
    for freezes in (False, True):
        strategy = FSDPV2Strategy(config=config)
        model = qwen2_5_vl()
        model.model.visual.requires_grad_(not freezes)
        strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        for step in range(2):
            with torch.no_grad():
                loss_of(model, batch("qwen2_5_vl", step, rank, rank == 1))
            strategy.backward(loss_of(model, batch("qwen2_5_vl", step, rank, rank == 0)), model, optimizer)
            trained = {name for name, p in model.named_parameters() if p.grad is not None}
            assert trained == {n for n, _ in model.named_parameters() if not (freezes and "visual" in n)}
            assert strategy.optimizer_step(optimizer, model, None).stepped


@pytest.mark.parametrize("policy", some(POLICIES, ["root"]))
@pytest.mark.ranks(2)
def test_such_a_model_is_saved_and_loaded_and_streamed_and_goes_away_as_any_other(policy, tmp_path):
    from fsdp2_strategy import stream_weights, weight_checksums

    expected = weight_checksums(stream_weights(qwen2_5_vl(), dtype=None))
    strategy = FSDPV2Strategy(config=StrategyConfig(mixed_mm_data=policy, bf16=False))
    model = strategy.prepare_model(qwen2_5_vl(), is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    assert weight_checksums(stream_weights(model, dtype=None)) == expected
    for step in range(3):
        strategy.backward(loss_of(model, batch("qwen2_5_vl", step, 0, dist.get_rank() == 0)), model, optimizer)
        strategy.optimizer_step(optimizer, model, None)
        if step == 1:
            strategy.save_ckpt(model, tmp_path, "two")
            strategy.offload_model(model)
            strategy.reload_model(model)
    trained = weight_checksums(stream_weights(model, dtype=None))
    assert trained != expected
    again = FSDPV2Strategy(config=StrategyConfig(mixed_mm_data=policy, bf16=False))
    model = again.prepare_model(qwen2_5_vl(), is_training=True)
    optimizer = again.create_optimizer(model, lr=1e-3)
    again.load_ckpt(model, tmp_path)
    again.backward(loss_of(model, batch("qwen2_5_vl", 2, 0, dist.get_rank() == 0)), model, optimizer)
    again.optimizer_step(optimizer, model, None)
    assert weight_checksums(stream_weights(model, dtype=None)) == trained


@pytest.mark.ranks(2)
def test_generation_with_images_on_one_rank_gives_what_one_process_gives():
    rank = dist.get_rank()
    reference = on_device(qwen2_5_vl().eval())
    for policy in POLICIES:
        model = on_device(qwen2_5_vl().eval())
        shard_model(model, config=StrategyConfig(mixed_mm_data=policy, bf16=False))
        inputs = on_device(batch("qwen2_5_vl", 0, rank, rank == 0))
        inputs.pop("labels")
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.no_grad():
            assert torch.equal(model.generate(**inputs, **options), reference.generate(**inputs, **options))


@pytest.mark.ranks(2)
def test_where_units_of_ranks_diverge_each_of_them_names_rank_and_unit_in_seconds():
    rank = dist.get_rank()
    model = qwen2_5_vl()
    shard_model(model, is_training=True)
    began = time.monotonic()
    with pytest.raises(StepError, match=r"rank 0 gathers model.visual.blocks.0 .*, rank 1 gathers model.language"):
        loss_of(model, batch("qwen2_5_vl", 0, rank, rank == 0))
    assert time.monotonic() - began < 40  # the time-out of a collective is 60


def test_plans_say_where_the_tower_is(capsys):
    text = explain(qwen2_5_vl(), StrategyConfig(mixed_mm_data="replicate"), world_size=4, is_training=True)
    assert "model.visual" in text and " vision " in text and "visual.blocks" not in text
    text = explain(qwen2_5_vl(), StrategyConfig(mixed_mm_data="root"), is_training=True)
    assert "visual.blocks" not in text.split("root unit")[0]
    assert "has no vision encoder" in explain(build("llama"), StrategyConfig(mixed_mm_data="root"), is_training=True)


@pytest.mark.ranks(2)
def test_what_cannot_be_kept_in_step_is_an_error():
    for policy in ("root", "replicate"):
        with pytest.raises(ShardError, match=r"cannot shard model.visual and its projector .*: \w+ is a separate unit"):
            shard_model(
                qwen2_5_vl(), config=StrategyConfig(mixed_mm_data=policy, keep_fp32=("*visual.blocks.0.norm1*",))
            )
    model = qwen2_5_vl()
    model.model.visual.config.spatial_merge_size = 0
    with pytest.raises(ShardError, match=r"cannot run model.visual on an image of zeros"):
        shard_model(model, config=StrategyConfig(mixed_mm_data="dummy"))
    assert StrategyConfig(mixed_mm_data=True).mixed_mm_data == "root"
    assert StrategyConfig.from_args({"mixed_mm_data": False}).mixed_mm_data is None
    shard_model(build("llama"), config=StrategyConfig(mixed_mm_data="dummy"))
    model = model_of("llava")
    with pytest.raises(ShardError, match=r"Linear is a separate unit \(dtype\)"):
        shard_model(model, config=StrategyConfig(mixed_mm_data="root", keep_fp32=("*multi_modal_projector.linear_1*",)))
    model.model.multi_modal_projector.gate = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ShardError, match="cannot train gate of LlavaMultiModalProjector"):
        shard_model(model, config=StrategyConfig(mixed_mm_data="replicate"))
    with pytest.raises(ShardError, match="it is tied"):
        shard_model(build("llama_tied"), config=StrategyConfig(keep_fp32=("model.embed_tokens.*",)))


def test_what_stands_between_tower_and_text_is_left_to_the_root_as_well():
    from transformers import Idefics2Config, Idefics2ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Idefics2Config(
        text_config={**_BASE, "model_type": "mistral"},
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        perceiver_config={"resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2,
                          "resampler_head_dim": 8, "num_key_value_heads": 1},
        image_token_id=VOCAB - 1,
    )  # fmt: skip
    model = Idefics2ForConditionalGeneration(config)
    assert "connector" in explain(model, is_training=True).split("root unit")[0]
    for policy in ("root", "replicate"):
        assert (
            "connector"
            not in explain(model, StrategyConfig(mixed_mm_data=policy), is_training=True).split("root unit")[0]
        )
