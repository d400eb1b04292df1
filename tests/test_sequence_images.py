"""Image-text models compute split sequences as full ones, with images in all batches or in some."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import _BASE, VOCAB, batch_of, build
from helpers.reference import Unsharded, assert_close, full_grads
from helpers.worlds import some

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.parallel.sequence.ranks import run_in_threads
from fsdp2_strategy.parallel.sequence.shard import shard_sequence
from fsdp2_strategy.parallel.sequence.split import split_sequences
from fsdp2_strategy.parallel.sequence.split_plan import plan_split

LENGTH = 23  # no number of ranks divides it
IMAGE = VOCAB - 1
TEXT = {**_BASE, "num_hidden_layers": 4}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PATCHES = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4}
PATCHES |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "in_channels": 3}


def tokens(count, first=3):
    ids = torch.randint(3, VOCAB - 8, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, first : first + count] = IMAGE
    return {"input_ids": ids, "labels": ids}


def pixels(*shape):
    return {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(1))}


def qwen(model, config, **vision):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    special = {"video_token_id": VOCAB - 2, "vision_start_token_id": VOCAB - 3, "vision_end_token_id": VOCAB - 4}
    made = config(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=PATCHES | vision, image_token_id=IMAGE, **special
    )
    batch = tokens(4)
    batch["input_ids"][:, 2] = VOCAB - 3
    grid = torch.tensor([[1, 4, 4]] * 2)
    types = (batch["input_ids"] == IMAGE).int()
    return model(made), {**batch, **pixels(2 * 16, 3 * 2 * 4 * 4), "image_grid_thw": grid, "mm_token_type_ids": types}


def gemma3():
    text = {**TEXT, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
    special = {"image_token_id": IMAGE, "boi_token_index": VOCAB - 2, "eoi_token_index": VOCAB - 3}
    vision = {**VISION, "image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **special)
    batch = tokens(4)
    types = (batch["input_ids"] == IMAGE).long()
    return transformers.Gemma3ForConditionalGeneration(config), {
        **batch, **pixels(2, 3, 16, 16), "token_type_ids": types,
    }  # fmt: skip


def paligemma():
    vision = {**VISION, "image_size": 16, "patch_size": 8, "projection_dim": 32, "model_type": "siglip_vision_model"}
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"}, vision_config=vision, image_token_index=IMAGE, projection_dim=32
    )
    types = (torch.arange(LENGTH) > 9).long().expand(2, -1)  # a prefix that sees all of itself, and an answer
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    return transformers.PaliGemmaForConditionalGeneration(config), {
        **tokens(4, first=0), **pixels(2, 3, 16, 16), "attention_mask": mask, "token_type_ids": types,
    }  # fmt: skip


def internvl():
    vision = {**VISION, "image_size": [16, 16], "patch_size": [4, 4]}
    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"}, vision_config=vision, image_token_id=IMAGE
    )
    return transformers.InternVLForConditionalGeneration(config), {**tokens(4), **pixels(2, 3, 16, 16)}


def idefics3():
    vision = {**VISION, "image_size": 16, "patch_size": 4}
    config = transformers.Idefics3Config(
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, image_token_id=IMAGE, scale_factor=2
    )
    return transformers.Idefics3ForConditionalGeneration(config), {**tokens(4), **pixels(2, 1, 3, 16, 16)}


def mllama():
    """Blocks attend to images: keys that every rank has in full."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1}
    vision |= {"attention_heads": 4, "image_size": 16, "patch_size": 8, "vision_output_dim": 64, "max_num_tiles": 1}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
    head_dim = TEXT["hidden_size"] // TEXT["num_attention_heads"]
    text = {**TEXT, "cross_attention_layers": [1, 3], "head_dim": head_dim}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    ones = torch.ones(2, 1, dtype=torch.int64)
    batch = {**tokens(1), **pixels(2, 1, 1, 3, 16, 16), "aspect_ratio_ids": ones, "aspect_ratio_mask": ones[..., None]}
    batch |= {"attention_mask": torch.ones(2, LENGTH, dtype=torch.int64)}
    return transformers.MllamaForConditionalGeneration(config), {
        **batch, "cross_attention_mask": torch.ones(2, LENGTH, 1, 1, dtype=torch.int64),
    }  # fmt: skip


def qwen2_5_vl():
    window = {"window_size": 16, "fullatt_block_indexes": [1]}
    return qwen(transformers.Qwen2_5_VLForConditionalGeneration, transformers.Qwen2_5_VLConfig, **window)


def qwen3_vl():
    """Features of images are added to the hidden states of several blocks."""
    added = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    return qwen(transformers.Qwen3VLForConditionalGeneration, transformers.Qwen3VLConfig, **added)


MODELS = {
    "qwen2_vl": lambda: (build("qwen2_vl"), batch_of("qwen2_vl", 0, 0)),
    "llava": lambda: (build("llava"), batch_of("llava", 0, 0)),
    **{f.__name__: f for f in (qwen2_5_vl, qwen3_vl, gemma3, paligemma, internvl, idefics3, mllama)},
}


@pytest.mark.parametrize("count", some([2, 3, 4], [2]))
@pytest.mark.parametrize("name", some(MODELS, ["qwen3_vl", "mllama"]))
def test_images_are_embedded_before_the_sequences_are_split(name, count):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model = model.double().eval()
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    full = model(**batch, use_cache=False)
    full.loss.backward()
    plan = plan_split(model, count)
    if model(**batch, use_cache=False, num_items_in_batch=1).loss == full.loss:  # so do some before transformers 5.16
        assert dict(plan.refused).keys() == {"loss"}
        pytest.skip("the model ignores the arguments of its loss, and is refused")
    assert not plan.refused
    copies = [copy.deepcopy(model) for _ in range(count)]
    for own in copies:
        own.zero_grad()
        split_sequences(own, plan)

    def compute(ranks):
        output = copies[ranks.rank](**shard_sequence(batch, ranks))
        (output.loss / count).backward()
        return output.logits.detach(), output.loss.detach()

    logits, losses = zip(*run_in_threads(count, compute), strict=True)
    length = batch["input_ids"].shape[1]
    torch.testing.assert_close(torch.cat(logits, dim=1)[:, :length], full.logits.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(sum(losses) / count, full.loss.detach(), rtol=1e-6, atol=0)
    parameters = [dict(own.named_parameters()) for own in copies]
    for key, parameter in model.named_parameters():
        parts = [own[key].grad for own in parameters if own[key].grad is not None]
        found = sum(parts) if parts else torch.zeros_like(parameter)
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # transformers computes the loss and some norms in float32.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")


def batch_for(step, dp_rank, has_images):
    made = batch_of("qwen2_vl", step, dp_rank)
    if not has_images:
        made = {
            name: batch_of("llama", step, dp_rank)["input_ids"] % (VOCAB - 8) + 3 for name in ("input_ids", "labels")
        }
    return made


@pytest.mark.ranks(4)
@pytest.mark.parametrize("policy", some(["root", "dummy", "replicate"], ()))
def test_images_may_be_in_the_batches_of_some_ranks_that_share_sequences(policy):
    model = build("qwen2_vl")
    reference = Unsharded(model, lambda own, batch: own(**batch, use_cache=False).loss, max_norm=1.0, lr=1e-3)
    config = StrategyConfig(bf16=False, mixed_mm_data=policy, sequence_parallel_size=2, max_norm=1.0)
    with FSDPV2Strategy(config=config) as strategy:
        strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-3)
        for step in range(4):
            with_images = [step == 0, True, False, step == 1]
            batches = [batch_for(step, dp_rank, with_images[(step + dp_rank) % 4]) for dp_rank in range(2)]
            loss = model(**strategy.shard_sequence(batches[strategy.dp_rank])).loss
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            strategy.backward(loss, model, optimizer)
            grads = full_grads(model)
            result = strategy.optimizer_step(optimizer, model)
            losses, norm = reference.step(batches, scale=2)  # it divides by the number of all ranks
            assert mean.item() / 4 == pytest.approx(sum(losses) / 2, rel=1e-5)
            assert_close(grads, reference.grads, 1e-5, f"{policy}, step {step}")
            assert result.grad_norm == pytest.approx(norm, rel=1e-5)
