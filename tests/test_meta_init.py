"""Building on the meta device: every tensor of a constructor has the values that it has with memory, or is an error."""

import collections
import copy
import dataclasses
import functools
import logging
import types
import warnings
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.models import build
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, init_on_meta, load_weights, shard_model
from fsdp2_strategy.errors import CheckpointError

# --- operations on tensors with and without memory --------------------------------------------------------------------


def line(count=5):
    """A tensor with memory: transformers creates it on the CPU also in the context."""
    return torch.linspace(0, 1, count)


def numbers(count=2, **options):
    """A tensor on meta in the context."""
    return torch.arange(count, **options)


def is_large():
    return numbers(5) > 2


def relative_positions(grid):
    flat = torch.stack(grid).flatten(1)
    return (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).sum(-1)


FORMS = {
    "index": lambda: line()[numbers()],
    "index2": lambda: line(6).reshape(2, 3)[numbers(), numbers()],
    "index meta by cpu": lambda: numbers(5)[line(2).long()],
    "take": lambda: line().take(numbers()),
    "gather": lambda: line().gather(0, numbers()),
    "index_select": lambda: line().index_select(0, numbers()),
    "embedding": lambda: functional.embedding(numbers(), line(6).reshape(3, 2)),
    "masked_select": lambda: line().masked_select(is_large()),
    "boolindex": lambda: line()[is_large()],
    "meta boolindex": lambda: numbers(5)[is_large()],
    "meta bool by cpu": lambda: numbers(5)[line() > 0.3],
    "scatter": lambda: line().scatter(0, numbers(), torch.ones(2)),
    "scatter_add": lambda: line().scatter_add(0, numbers(), torch.ones(2)),
    "index_put": lambda: line().index_put((numbers(),), torch.ones(2)),
    "where": lambda: torch.where(is_large(), line(), torch.zeros(5)),
    "masked_fill": lambda: line().masked_fill(is_large(), 7.0),
    "add": lambda: line() + numbers(5),
    "outer": lambda: torch.outer(line(), numbers(3.0)),
    "matmul": lambda: line(6).reshape(2, 3) @ numbers(3.0),
    "cat": lambda: torch.cat([line(), numbers(3.0)]),
    "stack": lambda: torch.stack([line(3), numbers(3.0)]),
    "lerp": lambda: torch.lerp(line(3), numbers(3.0), 0.5),
    "einsum": lambda: torch.einsum("i,j->ij", line(), numbers(3.0)),
    "bucketize": lambda: torch.bucketize(numbers(3.0), line()),
    "searchsorted": lambda: torch.searchsorted(line(), numbers(3.0)),
    "take_along": lambda: line().take_along_dim(numbers(), 0),
    "index_add": lambda: line().index_add(0, numbers(), torch.ones(2)),
    "index_fill": lambda: line().index_fill(0, numbers(), 3.0),
    "index_copy": lambda: line().index_copy(0, numbers(), torch.ones(2)),
    "masked_scatter": lambda: line().masked_scatter(is_large(), torch.ones(5)),
    "repeat_interleave": lambda: line(3).repeat_interleave(numbers(3)),
    "one_hot": lambda: functional.one_hot(numbers(3)),
    "nonzero": lambda: (is_large()).nonzero(),
    "unique": lambda: numbers(5).unique(),
    "bincount": lambda: numbers(5).bincount(),
    "item": lambda: torch.full((2,), numbers(5).sum().item()),
    "tolist": lambda: torch.tensor(numbers(5).tolist()),
    "iter": lambda: torch.tensor([int(x) * 2 for x in numbers(5)]),
    "bool": lambda: torch.ones(2) if numbers(5).sum() > 3 else torch.zeros(2),
    "cpu": lambda: numbers(5).cpu(),
    "numpy": lambda: torch.from_numpy(numbers(5).numpy() * 2),
    "slice by item": lambda: line()[: torch.tensor(3)],
    "sort": lambda: line().sort().values[numbers(5).flip(0)],
    "tensor of tensors": lambda: torch.tensor([numbers(3)[1], numbers(3)[2]]),
    "interpolate": lambda: functional.interpolate(line().reshape(1, 1, 5), 7, mode="linear") + numbers(7),
    "tensor of tensor": lambda: torch.tensor([line()[1], numbers(3)[2]]),
    "as_tensor": lambda: torch.as_tensor(numbers(3)),
    "asarray": lambda: torch.from_numpy(np.asarray(numbers(3))),
    "float": lambda: torch.full((2,), float(numbers(3)[1])),
    "tensor dtype": lambda: torch.tensor([numbers(3, dtype=torch.float64)[1]]),
    "new_tensor": lambda: line().new_tensor([numbers(3)[1]]),
    "clamp": lambda: line().clamp(max=numbers(5.0)),
    "pow": lambda: line() ** numbers(5),
    "rpow": lambda: 2 ** (numbers(5) * line()),
    "minimum": lambda: torch.minimum(line(), numbers(5.0)),
    "addcmul": lambda: torch.addcmul(line(), numbers(5.0), line()),
    "tril": lambda: torch.tril(line()[:, None] * numbers(5.0)[None]),
    "allclose": lambda: torch.ones(2) * torch.allclose(line(), numbers(5.0)),
    "equal": lambda: torch.ones(2) * torch.equal(line(), numbers(5.0)),
    "split": lambda: torch.cat(line().split([int(x) for x in torch.tensor([2, 3])])),
    "max dim": lambda: line()[numbers(5.0).max(0).indices],
    "scatter_reduce": lambda: line().scatter_reduce(0, numbers(), torch.ones(2), "sum"),
    "index with none": lambda: line(6).reshape(2, 3)[:, None, numbers()],
    "select": lambda: line()[numbers(3)[1]],
    "conv": lambda: functional.conv1d(line().reshape(1, 1, 5), numbers(2.0).reshape(1, 1, 2)),
    "pad_sequence": lambda: nn.utils.rnn.pad_sequence([line(3), numbers(2.0)], batch_first=True),
    "block_diag": lambda: torch.block_diag(line(3), numbers(2.0)),
    "meshgrid": lambda: torch.stack(torch.meshgrid(line(3), numbers(2.0), indexing="ij")),
    "relative positions": lambda: relative_positions(torch.meshgrid(numbers(3), numbers(2), indexing="ij")),
    "cdist": lambda: torch.cdist(line(4).reshape(2, 2), numbers(4.0).reshape(2, 2)),
}
WRITES = {
    "set data view": lambda t: setattr(t, "data", line(6)[1:]),
    "cpu[mask]=": lambda t: t.__setitem__(is_large(), 7.0),
    "cpu[mask]=tensor": lambda t: t.__setitem__(is_large(), torch.ones(2)),
    "[idx]=": lambda t: t.__setitem__(numbers(), 7.0),
    "[idx]=cpu": lambda t: t.__setitem__(numbers(), line(2)),
    "[:2]=": lambda t: t.__setitem__(slice(2), numbers()),
    "[cpumask]=": lambda t: t.__setitem__(line() > 0.3, 7.0),
    "copy_": lambda t: t.copy_(numbers(5.0)),
    "copy_cpu": lambda t: t.copy_(line()),
    "add_": lambda t: t.add_(numbers(5.0)),
    "masked_fill_": lambda t: t.masked_fill_(is_large(), 3.0),
    "scatter_": lambda t: t.scatter_(0, numbers(), torch.ones(2)),
    "index_put_": lambda t: t.index_put_((numbers(),), torch.ones(2)),
    "index_fill_": lambda t: t.index_fill_(0, numbers(), 2.0),
    "index_copy_": lambda t: t.index_copy_(0, numbers(), torch.ones(2)),
    "index_add_": lambda t: t.index_add_(0, numbers(), torch.ones(2)),
    "masked_scatter_": lambda t: t.masked_scatter_(is_large(), torch.ones(5)),
    "masked_scatter_cpu": lambda t: t.masked_scatter_(line() > 0.3, line() + 1),
    "put_": lambda t: t.put_(numbers(), torch.ones(2)),
    "data": lambda t: setattr(t, "data", numbers(5.0)),
    "out": lambda t: torch.gather(line(), 0, numbers(5), out=t),
    "fill_": lambda t: t.fill_(numbers(5).sum()),
    "set row": lambda t: t[1:3].copy_(numbers(2.0)),
}


class Holds(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.register_buffer("made", make())


def written(make, write):
    target = make()
    write(target)
    return target


def all_forms():
    forms = dict(FORMS)
    for name, write in WRITES.items():
        forms[f"memory: {name}"] = functools.partial(written, line, write)
        forms[f"meta: {name}"] = functools.partial(written, lambda: numbers(5.0) * 2, write)
    return forms


@pytest.mark.parametrize("world_size", [1, 2])
def test_operations_on_tensors_with_and_without_memory_have_the_values_of_the_cpu(world_size, run_on):
    run_on(world_size, every_form_has_its_values)


def every_form_has_its_values():
    forms = all_forms()
    assert len(forms) > 100
    expected = {name: make() for name, make in forms.items()}
    with init_on_meta():
        models = nn.ModuleList(Holds(make) for make in forms.values())
    load_weights(models)
    for (name, value), model in zip(expected.items(), models, strict=True):
        assert model.made.device.type == "cpu", name
        assert model.made.dtype == value.dtype, name
        assert torch.equal(model.made, value), name


UNKNOWN = {
    "mask of random numbers": (lambda: line()[torch.rand(5) > 0.5], "aten::index .* depend on random numbers"),
    "random number": (lambda: torch.rand(1).item(), "aten::_local_scalar_dense .* depend on random numbers"),
    "random write": (lambda: line().copy_(torch.rand(5)), "aten::copy_ .* depend on random numbers"),
    "uninitialised": (lambda: line().copy_(torch.empty(5)), "aten::copy_ .* are uninitialised"),
    "weights": (lambda: list(nn.Linear(2, 2).weight.tolist()), "aten::_to_copy .* depend on random numbers"),
    "unrecorded init": (lambda: bool(nn.init.trunc_normal_(torch.empty(1)) > 0), "depend on random numbers"),
    "unknown shape, written": (
        lambda: torch.masked_select(line(), is_large(), out=torch.empty(2)),
        "aten::masked_select.* writes to a tensor on meta",
    ),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_operation_that_needs_values_that_are_not_known_is_an_error(name):
    make, message = UNKNOWN[name]
    with pytest.raises(CheckpointError, match=message), init_on_meta():
        make()


@pytest.mark.ranks(1)
def test_values_of_files_and_of_other_blocks_are_not_known(folder):
    with init_on_meta():
        earlier = numbers(2)
    with (
        pytest.raises(CheckpointError, match="depend on tensors that are in files or outside of this block"),
        init_on_meta(),
    ):
        line()[earlier > 0]
    with pytest.raises(CheckpointError, match="are in files, and not loaded yet"), init_on_meta():
        AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.cpu()


# --- tensors that are neither parameters nor buffers ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: object


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


Pair = collections.namedtuple("Pair", "first second")


def identity(tensor, _other=0):
    return tensor


class Scattered(nn.Module):
    """Tensors everywhere but in parameters and buffers."""

    cache = {}  # noqa: RUF012  as a cache of a class is

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.positions = numbers(6)
        self.half = self.positions[:3]  # a view
        self.lists, self.dicts = [numbers(2), [numbers(3)]], {"a": numbers(4), "b": {"c": numbers(5)}}
        self.tuples, self.pair, self.sets = (numbers(2), numbers(3)), Pair(numbers(1), numbers(2)), {numbers(2)}
        self.frozen, self.slotted = Frozen(numbers(7)), Slotted(numbers(3))
        self.nested = types.SimpleNamespace(inner=types.SimpleNamespace(tensor=numbers(8)))
        self.partial = functools.partial(identity, numbers(9))
        self.partial_by_name = functools.partial(identity, tensor=numbers(3))
        closed = numbers(10)
        self.closure = lambda: closed
        self.default = lambda tensor=numbers(11): tensor  # noqa: B008  as a constructor may
        self.normal = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
        self.register_buffer("buffer", numbers(6) * 2)
        self.same, self.view = self.buffer, self.buffer[2:]
        self.noise = torch.randn(4)
        self.hidden = [nn.Linear(2, 2)]
        self.after = nn.Linear(3, 3)
        self.mixed = line()[is_large()]
        self.lstm = nn.LSTM(3, 4)
        self.itself = [self]
        Scattered.cache["table"] = numbers(12)

    def forward(self, x):
        return self.inner(x)[:, self.positions.flip(0)] + self.lstm(x[None, :, :3])[0].sum()

    def tensors(self):
        return [
            self.positions, self.half, self.lists[0], self.lists[1][0], self.dicts["a"], self.dicts["b"]["c"],
            *self.tuples, *self.pair, *self.sets, self.frozen.tensor, self.slotted.tensor, self.nested.inner.tensor,
            self.partial(), self.partial_by_name(), self.closure(), self.default(), self.normal.loc, self.normal.scale,
            self.buffer, self.same, self.view, self.noise, *self.hidden[0].parameters(), self.mixed,
            self.cache["table"],
        ]  # fmt: skip


def scattered_tensors_have_their_values(how):
    torch.manual_seed(0)
    unsharded = Scattered().double()
    expected = [tensor.clone() for tensor in unsharded.tensors()]
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = nn.Sequential(Scattered())
    if how == "copied":
        model = copy.deepcopy(model)
    torch.manual_seed(0)
    if how == "loaded":
        load_weights(model)
    else:
        strategy.prepare_model(model, is_training=True)
    for number, (tensor, value) in enumerate(zip(model[0].tensors(), expected, strict=True)):
        assert tensor.device.type == "cpu", number
        assert torch.equal(tensor, value.to(tensor.dtype)), number
    assert model[0].same is model[0].buffer
    x = torch.linspace(0, 1, 12).reshape(2, 6)
    assert torch.allclose(model(x).double(), unsharded(x.double()), rtol=1e-5)


@pytest.mark.parametrize(("how", "world_size"), [("prepared", 2), ("loaded", 1), ("copied", 1)])
def test_tensors_outside_of_parameters_and_buffers_have_their_values(how, world_size, run_on):
    run_on(world_size, scattered_tensors_have_their_values, how=how)


class Refers(nn.Module):
    def __init__(self, how, folder=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if how == "parameter":
            self.plain = [self.linear.weight]
        elif how == "view of a parameter":
            self.plain = (self.linear.weight[:2],)
        elif how == "graph":
            self.plain = self.linear.weight * 2
        elif how == "buffer in a tuple":
            self.register_buffer("buffer", torch.ones(3))
            self.plain = (self.buffer,)
        elif how == "uninitialised":
            self.plain = torch.empty(3)
        elif how == "files":
            self.plain = [AutoModelForCausalLM.from_pretrained(folder)]
        elif how == "own generator":
            self.plain = torch.rand(3, generator=torch.Generator().manual_seed(0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "reason"),
    {
        "parameter": "is a parameter of the model, or a view of one",
        "view of a parameter": "is a parameter of the model, or a view of one",
        "graph": "has an autograd graph",
        "buffer in a tuple": "is a parameter or buffer of the model, too",
        "uninitialised": "has values that are uninitialised",
        "files": "has values that are in files",
        "own generator": "has values that are uninitialised, or depend on",
        "changed later": "was not made in an init_on_meta block, or was changed after it",
        "made later": "was not made in an init_on_meta block, or was changed after it",
    }.items(),
)
def test_a_plain_tensor_without_known_values_is_an_error_that_names_it(how, reason, tmp_path):
    if how == "files":
        if dist.get_rank() == 0:
            build("llama").save_pretrained(tmp_path)
        dist.barrier()
    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        model = nn.Sequential(nn.Linear(4, 4), Refers(how, tmp_path))
        if how == "changed later":
            model[1].plain = numbers(3)
    if how == "changed later":
        model[1].plain.zero_()
    elif how == "made later":
        model[1].plain = torch.ones(3, device="meta")
    with pytest.raises(CheckpointError, match=rf"1\.plain\S*, a tensor on meta that is not registered, {reason}"):
        strategy.prepare_model(model, is_training=True)


class OfRemoteCode(PreTrainedModel):
    """As in much remote code: a plain reference to a buffer, which ``from_pretrained`` leaves on the meta device."""

    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", numbers(4))
        self.original_frequencies = self.frequencies
        self.post_init()

    def forward(self, x):
        return self.linear(x) * self.frequencies


@pytest.mark.ranks(2)
def test_a_plain_tensor_that_transformers_leaves_on_meta_is_named_and_left(tmp_path):
    if dist.get_rank() == 0:
        OfRemoteCode(PretrainedConfig()).save_pretrained(tmp_path)
    dist.barrier()
    strategy = FSDPV2Strategy(bf16=False)
    model, expected = (OfRemoteCode.from_pretrained(tmp_path) for _ in range(2))
    assert model.original_frequencies.is_meta, "otherwise there is nothing to test"
    with patch.object(logging.getLogger("fsdp2_strategy"), "log") as logged:
        strategy.prepare_model(model, is_training=True)
    named = [call.args[1] % call.args[2:] for call in logged.call_args_list if call.args[0] == logging.WARNING]
    named = [message for message in named if "original_frequencies" in message]
    assert len(named) == (dist.get_rank() == 0) and all("on the meta device" in message for message in named)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(x), expected(x))


@pytest.mark.ranks(2)
def test_a_model_that_has_only_plain_tensors_on_meta_is_not_used_without_values():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = numbers(4)

    strategy = FSDPV2Strategy(bf16=False)
    with strategy.init_model_context(meta_init=True):
        positions = Positions()
    torch.manual_seed(0)
    model = strategy.prepare_model(nn.Sequential(nn.Linear(4, 4), positions))
    assert torch.equal(model[1].positions, numbers(4))


# --- copies of tensors whose values are in files ----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A small Llama, saved."""
    build("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def tied(tmp_path):
    """A small Llama with tied embeddings, saved."""
    build("llama_tied").save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def saving(*names):
    def change(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of tied weights
            return get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=[*names]))

    return change


def cloned(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    return model


def cloned_embedding(model):
    model.model.embed_tokens.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    return model


def copied_parameter(model):
    model.lm_head.weight = copy.deepcopy(model.lm_head.weight)
    return model


def copied_head(model):
    model.value_head = copy.deepcopy(model.lm_head)
    return model


def head_of_a_copy(model):
    model.lm_head = copy.deepcopy(model).lm_head
    return model


def new_head(model, fill=lambda head, weight: setattr(head, "weight", nn.Parameter(weight.clone()))):
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    fill(head, model.lm_head.weight)
    model.lm_head = head
    return model


UNTIED = {
    "lm_head saved": saving("lm_head"),
    "both saved": saving("lm_head", "embed_tokens"),
    "clone": cloned,
    "clone of the embedding": cloned_embedding,
    "copied parameter": copied_parameter,
    "copied head": copied_head,
    "head of a copy": head_of_a_copy,
}
IN_THE_BLOCK = {
    "new head": new_head,
    "new head, copied": functools.partial(new_head, fill=lambda head, weight: head.weight.data.copy_(weight)),
    "new head, loaded": functools.partial(new_head, fill=lambda head, weight: head.load_state_dict({"weight": weight})),
}


def untied_copies_have_the_values_of_the_source(tied):
    for name, change in (UNTIED | IN_THE_BLOCK).items():
        expected = dict(change(LlamaForCausalLM.from_pretrained(tied)).named_parameters())
        for is_inside in (True, False) if name in UNTIED else (True,):
            strategy = FSDPV2Strategy(bf16=False)
            with strategy.init_model_context(meta_init=True):
                model = LlamaForCausalLM.from_pretrained(tied)
                model = change(model) if is_inside else model
            model = model if is_inside else change(model)
            strategy.prepare_model(model, is_training=True)
            parameters = dict(model.named_parameters())
            assert parameters.keys() == expected.keys(), name
            for own, value in expected.items():
                if "lora_" not in own:
                    assert torch.equal(parameters[own].full_tensor(), value), (name, is_inside, own)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_copies_of_a_tied_weight_have_its_values(world_size, tied, run_on):
    run_on(world_size, untied_copies_have_the_values_of_the_source, tied=tied)


@pytest.mark.ranks(1)
def test_a_tied_weight_that_is_copied_after_the_block_to_a_new_module_is_an_error(tied):
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(tied)
    new_head(model)
    shard_model(model, config=StrategyConfig(bf16=False))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: it was made on meta after the init_on_meta block"):
        load_weights(model, strict=False)


@pytest.mark.ranks(1)
def test_a_copy_of_a_changed_weight_is_an_error(tied):
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(tied)
        model.lm_head.weight.data.mul_(2)
        cloned(model)
    with pytest.raises(CheckpointError, match="was changed after from_pretrained"):
        load_weights(model, strict=False)


@pytest.mark.ranks(1)
def test_a_new_head_of_a_tied_model_is_fresh(tied):
    with init_on_meta():
        model = LlamaForCausalLM.from_pretrained(tied)
        model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    report = load_weights(model, strict=False)
    assert report.missing == ["lm_head.weight"]
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
