"""Units whose own forward is bypassed are gathered by what runs within, and a model runs by any of its methods."""

from __future__ import annotations

import gc
import io
import weakref
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers.paired import (
    LAYERS,
    WIDTH,
    Block,
    Paired,
    PairedParts,
    batch_of,
    build,
    loss_of,
    run_pair,
    train_beside_reference,
)
from helpers.reference import (
    CountCollectives,
    assert_close,
    full_grads,
    same_on_all_ranks,
)
from helpers.worlds import some, worlds
from torch import nn

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig, explain, find_blocks
from fsdp2_strategy.distributed.torch_internals import fsdp_state_of, param_groups_of
from fsdp2_strategy.errors import ConfigError, ShardError
from fsdp2_strategy.integrations.lerobot import register_policy
from fsdp2_strategy.model.fsdp_state import reshard
from fsdp2_strategy.optim.ema import EMA
from fsdp2_strategy.sharding.known_policies import ENTRY_POINTS, _registered, policy_of

BLOCKS, LINEAR = (StrategyConfig(block_class_names=[name]) for name in ("Block", "Linear"))


@pytest.mark.parametrize("world", worlds(1, 2, 3))
@pytest.mark.parametrize("kind", some([Paired, PairedParts], [PairedParts]))
def test_layers_run_in_pairs_by_a_function_train_as_the_unsharded_model(world, kind):
    names = [kind.block.__name__]
    train_beside_reference(build(kind), block_class_names=names)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "config", some([{"prefetch_depth": 1}, {"shard_size": 1}, {"cpu_offload": True}], [{"cpu_offload": True}]), ids=str
)
def test_how_bypassed_units_are_gathered_changes_no_number(config):
    train_beside_reference(build(), block_class_names=["Block"], **config)


@pytest.mark.ranks(2)
def test_a_function_that_is_run_again_in_backward_changes_no_number():
    train_beside_reference(build(recompute=True), block_class_names=["Block"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ahead", [None, 1, 2])
def test_a_bypassed_unit_costs_the_collectives_of_any_other_and_one_pair_is_gathered_at_a_time(ahead):
    model = build()
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, block_class_names=["Block"], prefetch_depth=ahead))
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    units = [*model.left, *model.right]
    gathered, held = [], []

    def look(*_: object) -> None:
        gathered.append(sum(group.is_unsharded for unit in units for group in param_groups_of(fsdp_state_of(unit))))

    def look_back(*_: object) -> None:
        groups = [group for unit in units for group in param_groups_of(fsdp_state_of(unit))]
        held.append(sum(p._unsharded_param.grad is not None for group in groups for p in group.fsdp_params))

    for unit in units:
        unit.outward.register_forward_hook(look)
        unit.inward.register_full_backward_hook(look_back)
    for _ in range(3):
        with CountCollectives() as counted:
            strategy.backward(loss_of(model, batch_of(0, dist.get_rank())), model, optimizer)
        # The root, and six blocks: gathered in both passes but for the root, which stays; reduced once.
        assert counted.counts == {"allgather_base": 1 + 6 + 6, "reduce_scatter_base": 1 + 6}
        strategy.optimizer_step(optimizer, model, None)
    assert max(gathered) <= 2
    assert max(held) <= 3 * len(dict(model.left[0].named_parameters())), "reduced on the way, not at the end"


@pytest.mark.ranks(2)
def test_a_model_runs_by_its_forward_by_name_and_by_methods_that_call_each_other():
    model = build()
    x = batch_of(0, 0)
    model.eval()
    expected = [model(x), model.one_stack(x), model.twice(x)]
    config = StrategyConfig(bf16=False, block_class_names=["Block"], forward_methods=["one_stack", "twice"])
    FSDPV2Strategy(config=config).prepare_model(model)
    for _ in range(2):
        for run, value in zip((model.forward, model.one_stack, model.twice), expected, strict=True):
            torch.testing.assert_close(run(x), value)


@pytest.mark.ranks(2)
def test_each_kind_of_pass_prefetches_the_units_that_it_runs_and_no_others():
    counts = {}
    for ahead in (None, 1):
        model = build()
        methods = ["one_stack", "twice"]
        config = StrategyConfig(bf16=False, block_class_names=["Block"], forward_methods=methods, prefetch_depth=ahead)
        FSDPV2Strategy(config=config).prepare_model(model)
        counts[ahead] = []
        with torch.no_grad():
            for run in (model, model.one_stack, model.twice, model.one_stack, model, model.twice):
                with CountCollectives() as counted:
                    run(batch_of(0, 0))
                reshard(model)
                counts[ahead].append(counted.counts)
    assert counts[1] == counts[None]


@pytest.mark.ranks(2)
def test_a_model_that_prefetches_is_freed():
    model = build()
    config = StrategyConfig(bf16=False, block_class_names=["Block"], prefetch_depth=1)
    FSDPV2Strategy(config=config).prepare_model(model, is_training=True)
    for _ in range(2):
        loss_of(model, batch_of(0, 0)).backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


class Changing(Paired):
    """Blocks that are called, until something bypasses them."""

    bypasses = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.bypasses else self.one_stack(x)


@pytest.mark.ranks(2)
def test_a_pass_that_bypasses_blocks_as_none_before_is_an_error_and_runs_from_then_on():
    model, unsharded = build(Changing), build(Changing)
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, block_class_names=["Block"]))
    strategy.prepare_model(model)
    x = batch_of(0, 0)
    torch.testing.assert_close(loss_of(model, x), loss_of(unsharded, x))
    model.bypasses = unsharded.bypasses = True
    with pytest.raises(ShardError, match=r"cannot run Changing: .* bypasses the forward of a block.*Run it again"):
        loss_of(model, x)
    for _ in range(2):
        torch.testing.assert_close(loss_of(model, x), loss_of(unsharded, x))
    model.eval(), unsharded.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), unsharded(x))


@pytest.mark.ranks(2)
def test_what_runs_outside_of_any_pass_is_named_with_the_way_out():
    model = build()
    config = StrategyConfig(bf16=False, block_class_names=["Block"])
    strategy = FSDPV2Strategy(config=config)
    strategy.prepare_model(model, is_training=True)
    for run in (model.one_stack, lambda x: run_pair(model.left[0], model.right[0], x, x), model.end):
        with pytest.raises(ShardError, match=r"cannot run .* of Paired: its parameters are sharded.*forward_methods"):
            run(batch_of(0, 0))
    assert same_on_all_ranks(model(batch_of(0, 0)).sum().item()), "nothing is broken by it"


@pytest.mark.ranks(2)
def test_a_pass_that_raises_midway_leaves_the_next_one_right():
    model = build()
    unsharded = build()
    config = StrategyConfig(bf16=False, block_class_names=["Block"])
    strategy = FSDPV2Strategy(config=config)
    strategy.prepare_model(model, is_training=True)
    optimizer = strategy.create_optimizer(model, lr=1e-2)

    def fail(*_: object) -> None:
        raise ValueError("midway")

    handle = model.right[1].outward.register_forward_hook(fail)
    with pytest.raises(ValueError, match="midway"):
        model(batch_of(0, 0))
    handle.remove()
    loss_of(unsharded, batch_of(0, 0)).backward()
    strategy.backward(loss_of(model, batch_of(0, 0)), model, optimizer)
    expected = {name: p.grad for name, p in unsharded.named_parameters() if p.grad is not None}
    assert_close(full_grads(model), expected, 1e-10, "gradient")


@pytest.mark.ranks(2)
def test_bf16_is_computed_where_a_function_bypasses_the_cast_of_a_unit():
    torch.manual_seed(0)
    model = Paired()
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=True, block_class_names=["Block"]))
    strategy.prepare_model(model, is_training=True)
    seen = set()
    model.left[1].inward.register_forward_hook(lambda m, args, out: seen.add((m.weight.dtype, out.dtype)))
    x, y = (torch.randn(2, WIDTH) for _ in range(2))
    model.begin.register_forward_hook(lambda *_: x)  # what comes is fp32
    model.end.register_forward_pre_hook(lambda m, args: args[0].to(m.weight.dtype))
    model(y).sum().backward()
    assert seen == {(torch.bfloat16, torch.bfloat16)}


class Mixed(nn.Module):
    """A block with a part in fp32, and a part that computes in fp32 from what is bf16 around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inward, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        return x + self.gate(x.float()).to(x.dtype)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.scale = nn.Linear(WIDTH, WIDTH), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale(self.inward(x).float()).to(x.dtype)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module], run: object) -> None:
        super().__init__()
        self.begin, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(LAYERS))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = self.run(layer, x)
        return x


@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", ["run", "walked", "run again"])
def test_a_unit_within_a_bypassed_one_or_within_a_recomputed_one_has_inputs_of_its_own_dtype(how):
    run = Mixed.forward if how == "walked" else nn.Module.__call__
    torch.manual_seed(0)
    model = Stack(Mixed, run)
    recompute = ["Mixed"] if how == "run again" else []
    config = StrategyConfig(block_class_names=["Mixed"], keep_fp32=["gate"], activation_checkpointing=recompute)
    FSDPV2Strategy(config=config).prepare_model(model, is_training=True)
    seen = set()
    model.layers[1].gate.register_forward_hook(lambda m, args, out: seen.add((args[0].dtype, m.weight.dtype)))
    model(torch.randn(2, WIDTH)).sum().backward()
    assert seen == {(torch.float32, torch.float32)}


@pytest.mark.ranks(1)
def test_a_block_that_runs_again_in_backward_computes_in_the_dtypes_that_it_computed_in_before():
    grads = []
    for recompute in ([], ["Scaled"]):
        torch.manual_seed(0)
        model = Stack(Scaled, nn.Module.__call__)
        config = StrategyConfig(block_class_names=["Scaled"], activation_checkpointing=recompute)
        FSDPV2Strategy(config=config).prepare_model(model, is_training=True)
        model(torch.ones(2, WIDTH)).sum().backward()
        grads.append(full_grads(model))
    assert_close(*grads, 0, "gradient")


@pytest.mark.ranks(2)
def test_a_block_may_be_walked_through_before_and_after_its_own_forward():
    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = block(x + block.inward(x)[:, :WIDTH])
        return x + block.norm(x)

    torch.manual_seed(0)
    model = Stack(Block, run).double()
    train_beside_reference(model, block_class_names=["Block"])


@pytest.mark.ranks(1)
def test_blocks_that_are_known_to_be_bypassed_are_not_compiled_and_are_gathered_all_the_same():
    class OwnPolicy(Paired):
        pass

    try:
        register_policy("OwnPolicy", ["Block"], bypassed=True)
        train_beside_reference(build(OwnPolicy), compile_blocks="eager")
    finally:
        _registered.pop("OwnPolicy", None)


@pytest.mark.ranks(2)
def test_what_was_gathered_ahead_for_a_unit_that_did_not_run_is_not_computed_with_later():
    model = build()
    strategy = FSDPV2Strategy(config=StrategyConfig(bf16=False, block_class_names=["Block"], prefetch_depth=1))
    strategy.prepare_model(model, is_training=True)
    averages = EMA(model)
    x = batch_of(0, 0)
    with torch.no_grad():
        before = model.eval()(x)
        for average in averages.averages.values():
            average.mul_(0.5)
        with averages.swapped_in(model):
            swapped = model(x)
        torch.testing.assert_close(model(x), before)
    whole = build().eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(0.5)
        torch.testing.assert_close(swapped, whole(x))


class Views(nn.Module):
    """A block whose parts put out views, and that holds other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = View(), View()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))


class View(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(x.shape[0], 3, WIDTH // 3)


def run_views(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for part in (block.first, block.last):
        x = part(x).mul_(2.0).reshape(x.shape)
    for part in block.inner:
        x = x + part(x)
    return x


@pytest.mark.ranks(2)
def test_what_a_function_changes_in_place_is_gathered_for_all_the_same():
    torch.manual_seed(0)
    train_beside_reference(Stack(Views, run_views).double(), block_class_names=["Views"])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Inner() for _ in range(2))


def run_outer(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = block.linear(x)
    for inner in block.inner:
        x = x + inner.linear(x)
    return x


@pytest.mark.ranks(1)
def test_what_is_gathered_within_a_bypassed_unit_is_freed_with_it():
    torch.manual_seed(0)
    model = Stack(Outer, run_outer).double()
    gathered = []

    def look(*_: object) -> None:
        units = [m for m in model.modules() if isinstance(m, Outer | Inner)]
        gathered.append(sum(group.is_unsharded for unit in units for group in param_groups_of(fsdp_state_of(unit))))

    train_beside_reference(model, block_class_names=["Outer", "Inner"])
    for layer in model.layers:
        layer.inner[-1].linear.register_forward_hook(look)
    model(batch_of(0, 0))
    assert gathered == [2] * LAYERS


def test_explain_names_units_whose_forward_is_bypassed():
    model = build()
    text = explain(
        model,
        BLOCKS,
        run=lambda m: m(batch_of(0, 0)),
        file=io.StringIO(),
        is_training=True,
    )
    assert "warning    the forward of 6 units (left.0, right.0, left.1, …) is bypassed" in text
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    text = explain(
        model,
        BLOCKS,
        run=lambda m: m.one_stack(batch_of(0, 0)),
        file=io.StringIO(),
        is_training=True,
    )
    assert "bypassed" not in text
    assert "bypassed" not in explain(model, BLOCKS, file=io.StringIO(), is_training=True)
    text = explain(
        build(PairedParts), StrategyConfig(block_class_names=["Parts"]), file=io.StringIO(), is_training=True
    )
    assert "the forward of 6 units (left.0, left.1, left.2, …) is bypassed" in text


def test_a_policy_is_registered_in_a_line():
    class OwnPolicy(Paired):
        name = "own"

    try:
        register_policy("own", ["Block"], entry_points=["one_stack"], bypassed=True)
        text = explain(OwnPolicy(), file=io.StringIO(), is_training=True)
        assert "blocks     from the registered policy own: Block" in text
        assert "the forward of the blocks of own is bypassed" in text
        register_policy("OwnPolicy")  # no blocks: by size
        del OwnPolicy.name
        assert "modules with at least" in explain(OwnPolicy(), file=io.StringIO(), is_training=True)
    finally:
        _registered.pop("own", None), _registered.pop("OwnPolicy", None)
    with pytest.raises(
        ConfigError, match=r"cannot register the policy own: blocks is 'Block', expected a list of Python names"
    ):
        register_policy("own", "Block")


def test_a_policy_is_known_within_a_wrapper_that_hands_on_its_attributes():
    class Policy(Paired):
        name = "pi0"
        _fsdp_forward_methods = ("one_stack",)

    class Wrapper(nn.Module):
        def __init__(self, policy: nn.Module) -> None:
            super().__init__()
            self.policy = policy

        def __getattr__(self, name: str) -> object:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("policy"), name)

    known = policy_of(Wrapper(Policy()))
    assert (known.name, known.bypassed) == ("pi0", True)
    assert known.entry_points == ("one_stack", *ENTRY_POINTS)


def test_explain_leaves_no_hook_on_a_unit_without_modules_within():
    model = Paired()
    explain(
        model,
        LINEAR,
        run=lambda m: m(torch.ones(1, WIDTH)),
        file=io.StringIO(),
        is_training=True,
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_a_policy_declares_of_its_blocks_beats_what_is_found():
    class Declared(Paired):
        _fsdp_wrap_modules = ("Linear", "OfAVariant")

    assert set(find_blocks(Declared())) == {
        *(f"{side}.{i}.{part}" for side in ("left", "right") for i in range(LAYERS) for part in ("inward", "outward")),
        "begin",
        "end",
    }
    assert list(find_blocks(Declared(), ["Block"])) == [f"{s}.{i}" for s in ("left", "right") for i in range(LAYERS)]
    Declared._fsdp_wrap_modules = ("OfAVariant",)
    with pytest.raises(ShardError, match=r"class names \['OfAVariant'\] match no module of Declared"):
        find_blocks(Declared())


@pytest.mark.ranks(2)
def test_methods_that_a_policy_declares_gather_it():
    class Declared(Paired):
        _fsdp_forward_methods = ("one_stack",)

        def select_action(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(x)

    model = build(Declared)
    model.eval()
    x = batch_of(0, 0)
    expected = [model.one_stack(x), model.select_action(x)]
    FSDPV2Strategy(config=StrategyConfig(bf16=False)).prepare_model(model)
    torch.testing.assert_close([model.one_stack(x), model.select_action(x)], expected)


@pytest.mark.ranks(2)
def test_a_pass_that_is_refused_ahead_of_it_leaves_the_next_one_right():
    model = build()
    expected = model.eval()(batch_of(0, 0))
    FSDPV2Strategy(config=StrategyConfig(bf16=False, block_class_names=["Block"])).prepare_model(model)

    def refuse(*_: object) -> None:
        raise ValueError("refused")

    handle = model.register_forward_pre_hook(refuse, prepend=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            model(batch_of(0, 0))
    handle.remove()
    torch.testing.assert_close(model(batch_of(0, 0)), expected)


@pytest.mark.ranks(2)
def test_a_method_that_raises_midway_leaves_the_next_pass_one_that_begins():
    model = build()
    expected = model.eval()(batch_of(0, 0))
    config = StrategyConfig(bf16=False, block_class_names=["Block"], forward_methods=["one_stack"])
    FSDPV2Strategy(config=config).prepare_model(model)

    def fail(*_: object) -> None:
        raise ValueError("midway")

    handle = model.left[1].outward.register_forward_hook(fail)
    with pytest.raises(ValueError, match="midway"):
        model.one_stack(batch_of(0, 0))
    handle.remove()
    assert model._get_fsdp_state()._state_ctx.iter_forward_root is None
    torch.testing.assert_close(model(batch_of(0, 0)), expected)


def test_a_module_that_calls_something_else_its_name_is_no_policy():
    class Named(Paired):
        name: ClassVar = ["act"]

    assert set(find_blocks(Named())) == {f"{side}.{i}" for side in ("left", "right") for i in range(LAYERS)}
