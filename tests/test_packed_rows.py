"""Packed rows: documents are kept apart in every way in which a model is run."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.models import build
from helpers.training import strategy_for
from torch import nn

from fsdp2_strategy import token_log_probs
from fsdp2_strategy.hf.packed_rows import positions_of_documents

LENGTHS = ((3, 5), (6, 2))
"""The lengths of the documents of two rows."""
IDS = torch.randint(3, 30, (2, 8), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
PADDING = 2
ONES = torch.ones(2, 8, dtype=torch.long)


def padded(tensor, value=0):
    return nn.functional.pad(tensor, (0, PADDING), value=value)


def apart(model):
    """Return the logits of each document by itself, in their places."""
    rows = [
        torch.cat([model(ids[None]).logits[0] for ids in row.split(lengths)])
        for row, lengths in zip(IDS, LENGTHS, strict=True)
    ]
    return torch.stack(rows)


def log_probs_of(logits):
    return logits[:, :-1].float().log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)


WAYS = {
    "no mask": {"input_ids": IDS, "position_ids": POSITIONS},
    "a mask of ones": {
        "input_ids": IDS,
        "position_ids": POSITIONS,
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
    },
    "a mask of bools": {"input_ids": IDS, "position_ids": POSITIONS, "attention_mask": ONES.bool()},
    "padding": {
        "input_ids": padded(IDS),
        "position_ids": padded(POSITIONS, 1),
        "attention_mask": padded(ONES),
    },
}


def forward_ways(model):
    for name, batch in WAYS.items():
        yield name, model(**batch).logits[:, :8]
        yield f"{name}, use_cache", model(**batch, use_cache=True).logits[:, :8]
    yield "by position", model(IDS, torch.ones(2, 8), POSITIONS).logits
    yield "the decoder's forward", model(**WAYS["a mask of ones"], output_hidden_states=True).logits


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.ranks(1)
def test_a_forward_keeps_documents_apart(name):
    with torch.no_grad():
        expected = apart(build(name).eval())
    with strategy_for() as strategy:
        for is_training in (True, False):
            model = strategy.prepare_model(build(name), is_training=is_training)
            for is_train_mode in (True, False):
                model.train(is_train_mode)
                with torch.set_grad_enabled(is_training):
                    for way, logits in forward_ways(model):
                        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5, msg=way)


class Wrapper(nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, **inputs):
        return self.lm.lm_head(self.lm.model(**inputs).last_hidden_state)


@pytest.mark.ranks(2)
def test_log_probs_and_wrappers_keep_documents_apart():
    with torch.no_grad():
        expected = apart(build("llama").eval())
    with strategy_for() as strategy:
        for model in (strategy.prepare_model(build("llama"), is_training=True), build("llama")):
            for way, batch in WAYS.items():
                found = token_log_probs(model, **batch)[:, :7]
                torch.testing.assert_close(found, log_probs_of(expected), rtol=1e-5, atol=1e-5, msg=way)
        wrapper = strategy.prepare_model(Wrapper(build("llama")), is_training=True)
        for batch in WAYS.values():
            torch.testing.assert_close(wrapper(**batch)[:, :8], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
def test_split_sequences_keep_documents_apart():
    with torch.no_grad():
        expected = log_probs_of(apart(build("llama").eval()))
    with strategy_for(sequence_parallel_size=2) as strategy:
        model = strategy.prepare_model(build("llama"), is_training=True)
        for way, batch in WAYS.items():
            torch.testing.assert_close(token_log_probs(model, **batch)[:, :7], expected, rtol=1e-5, atol=1e-5, msg=way)
            with torch.no_grad():  # full sequences, as in evaluation
                found = log_probs_of(model(**batch).logits[:, :8])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=way)
        labels = padded(torch.where(POSITIONS == 0, -100, IDS), -100)
        full = build("llama")(
            input_ids=padded(IDS), position_ids=padded(POSITIONS), labels=labels, use_cache=False
        ).loss
        part = model(**strategy.shard_sequence({**WAYS["padding"], "labels": labels})).loss
        torch.distributed.all_reduce(part.detach())
        torch.testing.assert_close(part.detach() / 2, full.detach(), rtol=1e-5, atol=1e-5)


def test_padding_alone_is_not_packed():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    for pads in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, pads)
        assert positions_of_documents(positions, mask) is None
    assert positions_of_documents(torch.arange(5)[None], mask) is None
    assert positions_of_documents(torch.arange(5)[None], None) is None
    assert positions_of_documents(torch.arange(5), None) is None
    assert positions_of_documents(torch.zeros(3, 3, 5), mask) is None  # the axes of images


def test_padding_between_and_beside_documents_is_a_document_of_its_own():
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0]])
    found = positions_of_documents(torch.tensor([[7, 0, 1, 2, 3, 0, 1, 2]]), mask)
    assert found.tolist() == [[0, 0, 1, 0, 0, 0, 1, 0]]
    found = positions_of_documents(torch.tensor([[0, 1, 2, 9, 9, 1, 2, 3]]), torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]]))
    assert found.tolist() == [[0, 1, 2, 1, 1, 1, 2, 3]]
    text = positions_of_documents(torch.tensor([[7, 0, 1, 2, 3, 0, 1, 2]]).expand(4, 1, 8), mask)
    assert text.shape == (4, 1, 8) and text[0].tolist() == [[0, 0, 1, 0, 0, 0, 1, 0]] and text[1, 0, 0] == 7


@pytest.mark.ranks(1)
def test_a_cache_of_the_caller_is_left_as_it_is():
    with strategy_for() as strategy:
        model = strategy.prepare_model(build("llama").eval())
        expected = build("llama").eval()
        with torch.no_grad():
            found = []
            for each in (model, expected):
                cached = {"past_key_values": each(IDS[:, :4], use_cache=True).past_key_values, "use_cache": True}
                positions = {"position_ids": torch.tensor([[4, 0]]).expand(2, -1), "attention_mask": ONES[:, :6]}
                with warnings.catch_warnings():  # transformers is renaming the argument
                    warnings.simplefilter("ignore", FutureWarning)
                    found.append(each(IDS[:, 4:6], **positions, **cached).logits)
            torch.testing.assert_close(*found)
            generated = [m.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (model, expected)]
        assert torch.equal(*generated)


def test_places_of_an_image_that_share_a_time_are_no_documents():
    times = torch.tensor([[0, 1, 1, 1, 1, 3, 4, 5]])
    rows = torch.stack([times, times, times, times])
    mask = torch.ones_like(times)
    assert positions_of_documents(rows, mask) is None
    assert positions_of_documents(rows, None) is None
    packed = torch.cat([rows, rows[..., :3]], dim=-1)
    expected = [[*range(8), *range(3)]]
    for given in (torch.ones(1, 11, dtype=torch.long), None):
        found = positions_of_documents(packed, given)
        assert found is not None
        assert found[0].tolist() == expected
        assert torch.equal(found[1:], packed[1:])
    text = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 6]])  # with a row of its own, a document may have one token
    found = positions_of_documents(torch.stack([text, times, times, times]), mask)
    assert found is not None
    assert torch.equal(found[0], text)
