"""Models of all architectures compute split sequences with the values of full ones: logits, each gradient, the norm."""

from __future__ import annotations

from itertools import product

import pytest
import torch.distributed as dist
import transformers
from helpers.split import (
    IN_FLOAT32,
    NOT_TRAINED,
    WITHOUT_LOSS,
    assert_equal,
    batches,
    losses,
    of_full,
    of_group,
    of_threads,
    tiny_model,
)
from helpers.split_table import NAMES, NOT_BUILT, PAGE, entry_of, rows_of, table_version, written_table
from helpers.worlds import some, some_rows

from fsdp2_strategy.parallel.sequence import split_plan
from fsdp2_strategy.parallel.sequence.split_plan import plan_split

USUAL = (
    "llama", "gemma3_text", "gpt_oss", "mixtral", "deepseek_v3", "gpt_bigcode", "gpt2", "bloom", "mamba2", "roberta",
    "xlm",
)  # fmt: skip
"""Grouped heads, windows, sinks, experts, MLA, one key/value head, learned positions, ALiBi, a state space, ..."""

HEADS = ((6, 2), (8, 1), (8, 2), (8, 8), (6, 1), (6, 3), (14, 2), (3, 1))
"""Numbers of query and of key/value heads: 4 ranks do not divide some, and some are fewer than the ranks."""

IN_PROCESSES = (
    "llama", "bloom", "mamba2", "qwen2", "qwen3_next", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt_bigcode",
    "falcon_h1", "roberta", "zaya",
)  # fmt: skip

MANY = {*USUAL, *IN_PROCESSES}
"""Model types of which `make test-full` runs each case; a third of the others, too. `make sweep` runs all."""

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


@pytest.mark.parametrize(
    ("name", "count"),
    some_rows(
        product(NAMES, (2, 4)),
        [(name, 2) for name in ("gpt_oss", "deepseek_v3", "bloom", "mamba2", "roberta")],
        full=[*product(MANY, (2, 4)), *((name, 2 + 2 * (i % 2)) for i, name in enumerate(NAMES[::3]))],
    ),
)
def test_split_sequences_have_the_values_of_full_ones(name, count):
    model = tiny_model(name)
    plan = plan_split(model, count)
    if transformers.__version__ == table_version():
        assert rows_of(PAGE.read_text())[name] == entry_of(name, plan), "run the command of docs/sequence_parallel.md"
    refused = dict(plan.refused)
    for kind, batch in batches(model).items():
        if kind in refused or "plain" in refused:
            continue
        is_trained = name not in NOT_TRAINED
        expected = of_full(model, batch, is_trained=is_trained)
        found = of_threads(model, plan, count, batch, is_trained=is_trained)
        assert_equal(found, expected, batch, 1e-4 if name in IN_FLOAT32 else 1e-10)
    if not {"plain", "loss"} & refused.keys() and name not in WITHOUT_LOSS:
        loss, full_loss = losses(model, plan, count, batches(model)["plain"])
        assert loss == pytest.approx(full_loss, rel=1e-6)


@pytest.mark.parametrize("count", some((2, 4), (4,)))
@pytest.mark.parametrize(("heads", "kv_heads"), some_rows(HEADS, HEADS[:1]))
@pytest.mark.parametrize("name", some(("llama", "mistral", "gemma3_text", "gpt_oss"), ("gpt_oss",)))
def test_any_number_of_heads_is_split(name, heads, kv_heads, count):
    model = tiny_model(name, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8)
    plan = plan_split(model, count)
    assert not plan.full
    assert not plan.refused
    for batch in batches(model).values():
        assert_equal(of_threads(model, plan, count, batch), of_full(model, batch), batch, 1e-10)


@pytest.mark.parametrize("name", some(NAMES, USUAL[:2], full=MANY))
def test_a_plan_notices_that_nothing_is_exchanged(name, monkeypatch):
    monkeypatch.setattr(split_plan, "split_sequences", lambda _model, _plan: None)
    assert dict(plan_split(tiny_model(name), 2).refused).keys() == {"plain"}


def test_a_model_without_dependence_between_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(split_plan, "_NOISE", 0.0)
    model = tiny_model("llama", initializer_range=1e-6)
    ((kind, reason),) = plan_split(model, 2).refused
    assert (kind, reason) == ("plain", "shows no effect of tokens on later ones in a tiny model")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", some(IN_PROCESSES, IN_PROCESSES[:1]))
def test_processes_compute_the_same_as_threads(name):
    model = tiny_model(name)
    plan = plan_split(model, dist.get_world_size())
    for batch in batches(model).values():
        assert_equal(of_group(model, plan, batch), of_full(model, batch), batch, 1e-10)


def test_the_table_has_each_model_type():
    if transformers.__version__ != table_version():
        pytest.skip(f"the table is that of transformers {table_version()}")
    entries = rows_of(PAGE.read_text())
    assert entries.keys() == {*NAMES, *NOT_BUILT}
    assert written_table(entries) in PAGE.read_text()
