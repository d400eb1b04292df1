"""A load gives back the values that a save wrote, whatever transformers' conversions do on the way."""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers.models import build
from helpers.reference import full_parameters
from helpers.training import assert_same, strategy_for
from helpers.versions import NEW_CONVERSIONS, needs_new_conversions
from helpers.worlds import some
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import core_model_loading
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import PermuteForRope, Transpose, WeightConverter
from transformers.models.auto import modeling_auto

from fsdp2_strategy import init_on_meta, load_weights
from fsdp2_strategy.checkpoint import components
from fsdp2_strategy.cli import main
from fsdp2_strategy.errors import CheckpointError
from fsdp2_strategy.hf import round_trip, save_plan
from fsdp2_strategy.hf.load_plan import match_tensors
from fsdp2_strategy.hf.round_trip import _is_own, round_trips
from fsdp2_strategy.hf.save_plan import choose_layout, tensors_to_write
from fsdp2_strategy.hf.skeleton import meta_skeleton
from fsdp2_strategy.hf.weights_folder import open_folder
from fsdp2_strategy.storage.output_files import create_files, files_for
from fsdp2_strategy.storage.regions import Piece, Region
from fsdp2_strategy.storage.safetensors_format import OWN_NAMES, Entry, read_header, read_header_and_metadata


def zeroed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def renamed(regions):
    """A save whose names no load takes for its own: a classifier around a whole model can come to that."""
    return {f"model.{name.replace('layers', 'model.layers')}": region for name, region in regions.items()}


def swapped(regions):
    """A save that exchanges two tensors of one shape, and a load that does not know of it."""
    one, other = sorted(name for name in regions if name.endswith("input_layernorm.weight"))
    return {**regions, one: regions[other], other: regions[one]}


@pytest.mark.full
@pytest.mark.each
@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", [renamed, swapped])
def test_names_that_do_not_come_back_are_saved_as_the_models_own(change, tmp_path):
    strategy = strategy_for()
    model = strategy.prepare_model(build("llama"), is_training=True)
    expected = full_parameters(model)
    conversion = save_plan.hub_regions
    with patch.object(save_plan, "hub_regions", lambda copied, tensors: change(conversion(copied, tensors))):
        strategy.save_ckpt(model, tmp_path, "a")
        strategy.save_model(model, None, tmp_path / "exported")
    assert set(read_header(tmp_path / "a/model/model.safetensors")) == set(expected)
    strategy.load_ckpt(zeroed(model), tmp_path)
    assert_same(full_parameters(model), expected)
    for folder in ("a/model", "exported"):
        opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder)
        assert_same(dict(opened.named_parameters()), expected)
    dist.barrier()


class ConvertedLlama(transformers.LlamaForCausalLM):
    """A model of which a conversion is registered whose names are the same on both sides."""


CONVERSIONS = {
    "transpose_square": ("self_attn.q_proj.weight", Transpose(0, 1)),
    "transpose_oblong": ("mlp.down_proj.weight", Transpose(0, 1)),
}
if NEW_CONVERSIONS:
    CONVERSIONS["permute"] = ("self_attn.q_proj.weight", PermuteForRope())
    CONVERSIONS["interleave"] = ("mlp.up_proj.weight", core_model_loading.Interleave(0))


@pytest.mark.full
@pytest.mark.each
@needs_new_conversions
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_values_that_a_conversion_moves_under_one_name_load_as_they_were(kind, tmp_path):
    name, operation = CONVERSIONS[kind]
    register_checkpoint_conversion_mapping("ConvertedLlama", [WeightConverter(name, name, [operation])], overwrite=True)
    strategy = strategy_for()
    model = strategy.prepare_model(ConvertedLlama(build("llama").config), is_training=True)
    expected = full_parameters(model)
    strategy.save_ckpt(model, tmp_path)
    strategy.load_ckpt(zeroed(model), tmp_path)
    assert_same(full_parameters(model), expected)
    opened = ConvertedLlama.from_pretrained(tmp_path / "global_step0/model")
    assert_same(dict(opened.named_parameters()), expected)


def test_rows_that_change_places_within_a_tensor_do_not_round_trip():
    tensors = {"weight": torch.empty(8, 3), "bias": torch.empty(8)}
    model = nn.Linear(3, 8, device="meta")
    own = {name: Region.of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    rows = torch.split(own["weight"], 2)
    assert round_trips(model, own, tensors)
    assert round_trips(model, {**own, "weight": torch.cat(rows)}, tensors)
    with patch.object(round_trip, "_MAX_PARTS", 2):  # what would be cut too often counts as lost
        assert not round_trips(model, {**own, "weight": torch.cat(rows)}, tensors)
    assert not round_trips(model, {**own, "weight": torch.cat([rows[0], rows[2], rows[1], rows[3]])}, tensors)
    assert not round_trips(model, {"weight": own["weight"]}, tensors)
    assert not round_trips(model, {**own, "more": own["bias"]}, tensors)


def test_a_strided_view_and_its_inverse_round_trip():
    """A file holds (8, 3) as (4, 2, 3) with rows interleaved; the load takes them apart again."""
    written = {"w": Region.of("weight", (8, 3), torch.float32).view(2, 4, 3).transpose(0, 1).contiguous()}
    entry = Entry("w", Path(), 0, torch.float32, (4, 2, 3))
    for half in range(2):
        rows = Piece(entry, (4 * half, 0), (4, 3), (6, 1), 3 * half)
        assert _is_own("weight", (3, 1), rows, written)
        assert not _is_own("weight", (3, 1), replace(rows, start=(4 - 4 * half, 0)), written)
        assert not _is_own("weight", (3, 1), replace(rows, strides=(3, 1)), written)


@pytest.mark.ranks(2)
def test_plain_modules_in_a_checkpoint_wrapper_load_again(tmp_path):
    def wrapped():
        return nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), checkpoint_wrapper(nn.Linear(4, 2)))

    strategy = strategy_for()
    model = strategy.prepare_model(wrapped(), is_training=True)
    expected = full_parameters(model)
    strategy.save_ckpt(model, tmp_path)
    strategy.load_ckpt(zeroed(model), tmp_path)
    assert_same(full_parameters(model), expected)


@needs_new_conversions
@pytest.mark.ranks(2)
def test_a_model_that_no_conversion_gives_back_is_saved_under_its_own_names_and_marked(tmp_path):
    def pixio(seed):  # transformers renames "pixio.layernorm" to "layernorm", which it has already
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
        model = transformers.PixioBackbone(transformers.PixioConfig(**sizes))
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        return model

    strategy = strategy_for()
    model = strategy.prepare_model(pixio(0), is_training=True)
    warned = []
    with patch.object(save_plan, "log", lambda message, *args, level=None: warned.append((level, message % args))):
        strategy.save_ckpt(model, tmp_path, "a")
    assert warned[0][0] == logging.WARNING and "PixioBackbone" in warned[0][1], "from_pretrained will not open it"
    file = tmp_path / "a/model/model.safetensors"
    assert read_header_and_metadata(file)[1] == OWN_NAMES
    expected = full_parameters(model)
    strategy.load_ckpt(zeroed(model), tmp_path)
    assert_same(full_parameters(model), expected)
    other = strategy.prepare_model(pixio(1), is_training=True)
    load_weights(other, file.parent)
    assert_same(full_parameters(other), expected)
    with strategy.init_model_context(meta_init=True):
        remembered = transformers.PixioBackbone.from_pretrained(file.parent)
    assert_same(full_parameters(strategy.prepare_model(remembered, is_training=True)), expected)
    with pytest.raises(CheckpointError, match="cannot export PixioBackbone: from_pretrained would not"):
        strategy.save_model(model, None, tmp_path / "exported")
    if dist.get_rank() == 0:
        main(["export", str(tmp_path / "a"), str(tmp_path / "out")])
    dist.barrier()
    load_weights(zeroed(other), tmp_path / "out")
    assert_same(full_parameters(other), expected)


@pytest.mark.ranks(1)
def test_the_check_is_made_once_for_a_model(tmp_path):
    strategy = strategy_for()
    model = strategy.prepare_model(build("mixtral"), is_training=True)
    with patch.object(components, "choose_layout", wraps=choose_layout) as planned:
        for tag in "abc":
            strategy.save_ckpt(model, tmp_path, tag)
    assert planned.call_count == 1


# --- every architecture ----------------------------------------------------------------------------------------------

SHARES = 8
"""In how many parts the architectures are checked."""

FEWER = {"num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2}
FEWER |= {"depth": 2, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8}


def architectures():
    """Return transformers' classes for a task, by name."""
    mapped = [cls for name, table in vars(modeling_auto).items() if name.endswith("_NAMES") for cls in table.values()]
    names = {n for cls in mapped for n in (cls if isinstance(cls, list | tuple) else (cls,))}
    names |= {name for name in dir(transformers) if "For" in name}
    for name in sorted(names):
        try:
            cls = getattr(transformers, name, None)
        except (ImportError, ValueError):  # needs a package that is not installed
            continue
        is_model = inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel) and cls.config_class
        if is_model and not name.endswith("PreTrainedModel"):
            yield cls


def smaller(config):
    """Take layers and experts out of a default configuration, where it has them under a usual name."""
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        for name, value in FEWER.items():
            if each is not None and isinstance(vars(each).get(name), int) and vars(each)[name] > value:
                setattr(each, name, value)
        kinds = getattr(each, "layer_types", None)
        if isinstance(kinds, list) and len(kinds) > 2:
            each.layer_types = [kinds[0], kinds[-1]]
    return config


def on_meta(cls):
    """Build a model on meta, small if its configuration lets it; None where its own defaults do not build."""
    for change in (smaller, lambda config: config):
        try:
            with init_on_meta():
                return cls(change(cls.config_class()))
        except Exception:  # noqa: BLE001  whatever a default configuration lacks
            continue
    return None


@pytest.mark.parametrize("share", some(range(SHARES), (), [0]))
def test_what_a_save_would_write_comes_back_for_every_architecture(share, tmp_path):
    """Models of default configurations with fewer layers, on meta, and files of headers without tensors behind them."""
    classes = list(architectures())
    assert len(classes) > 900
    built, marked, failed = 0, [], []
    for cls in classes[share::SHARES]:
        model = on_meta(cls)
        if model is None:
            continue
        built += 1
        copied = meta_skeleton(model)
        try:
            with patch.object(save_plan, "is_uninitialised", lambda _tensor: False):
                tensors = tensors_to_write(model, copied)
            arranged = choose_layout(copied, tensors)
        except (CheckpointError, TypeError) as error:
            failed.append(f"{cls.__name__}: {error}")
            continue
        if arranged.metadata == OWN_NAMES:
            marked.append(cls.__name__)
        files = files_for(tmp_path, "model", arranged.regions, sys.maxsize, metadata=arranged.metadata)
        create_files(files)
        origin = open_folder(model, tmp_path)
        _, report = match_tensors(model, {module: (origin, name) for name, module in model.named_modules()})
        never_saved = model._keys_to_ignore_on_save or ()
        if report.unexpected or set(report.missing) - set(never_saved):
            failed.append(f"{cls.__name__}: missing {report.missing[:2]}, unexpected {report.unexpected[:2]}")
    assert built > 0.8 * len(classes) / SHARES
    assert not failed
    assert set(marked) <= {"PixioBackbone"}


def untied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def with_other_values(model):
    model.model.norm.weight = nn.Parameter(torch.ones(len(model.model.norm.weight)))


def with_a_buffer(model):
    model.model.register_buffer("seen", torch.zeros(3))


def with_a_buffer_that_is_not_saved(model):
    model.model._non_persistent_buffers_set.add("seen")


def with_a_name_to_ignore(model):
    model._keys_to_ignore_on_save = {"model.norm.weight"}


def with_one_more_name_to_ignore(model):
    model._keys_to_ignore_on_save.add("model.layers.0.input_layernorm.weight")


def with_a_layer_less(model):
    del model.model.layers[1]


def with_another_order(model):
    model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.gate_proj = (
        model.model.layers[0].mlp.gate_proj,
        model.model.layers[0].mlp.up_proj,
    )


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_names_are_remembered_until_the_model_changes(is_wrapped):
    model = build("llama_tied")
    root = nn.Sequential(model) if is_wrapped else model
    changes = [
        lambda _: None,
        untied,
        with_other_values,
        with_a_buffer,
        with_a_buffer_that_is_not_saved,
        with_a_name_to_ignore,
        with_one_more_name_to_ignore,
        with_another_order,
        with_a_layer_less,
    ]
    before = None
    for change in changes:
        change(model)
        expected = save_plan._find_tensors(root, None)
        assert_same_tensors(tensors_to_write(root), expected)
        with patch.object(save_plan, "_find_tensors", side_effect=AssertionError("looked for again")):
            assert_same_tensors(tensors_to_write(root), expected)
        now = {name: id(tensor) for name, tensor in expected.items()}
        without_effect = (with_a_name_to_ignore, with_one_more_name_to_ignore) if is_wrapped else ()
        assert now != before or change in without_effect
        before = now


def assert_same_tensors(found, expected):
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in expected)


def test_names_of_tensors_that_no_module_holds_are_not_remembered():
    model = build("llama")
    assert tensors_to_write(model)["model.norm.weight"] is model.model.norm.weight
    model.register_state_dict_post_hook(
        lambda _model, state, _prefix, _metadata: state.update({"model.norm.weight": state["model.norm.weight"] * 2})
    )
    for _ in range(2):
        assert torch.equal(tensors_to_write(model)["model.norm.weight"], model.model.norm.weight * 2)
