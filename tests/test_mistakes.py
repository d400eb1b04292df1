"""Make the mistakes of new users on two ranks; run as a script, write docs/troubleshooting.md from their table."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import torch.distributed as dist
from helpers.mistakes import MISTAKES, page
from helpers.models import batch_of, build
from helpers.training import prepared, strategy_for, train
from helpers.worlds import some
from torch.distributed.tensor import DTensor

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
OF_ALL_RANKS = [name for name, entry in MISTAKES.items() if not entry.loses_a_rank]


def make(name, folder):
    """Make a mistake on this rank, and compare what the user gets with the table."""
    entry, logged = MISTAKES[name], []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("fsdp2_strategy").addHandler(handler)
    begin = time.monotonic()
    try:
        if entry.error is None:
            entry.make(folder)
            assert dist.get_rank() or any(entry.message in text for text in logged), logged
        else:
            with pytest.raises(entry.error) as caught:
                entry.make(folder)
            assert entry.message in str(caught.value), str(caught.value)
    finally:
        logging.getLogger("fsdp2_strategy").removeHandler(handler)
    assert time.monotonic() - begin < 30  # the time-out of a collective is 60


def lose_a_rank(name, folder):
    """Make a mistake on this rank; on rank 0, compare the note to torch's error with the table."""
    (folder / f"imported{os.environ['RANK']}").touch()
    while len(list(folder.glob("imported*"))) < 2:  # imports may take longer than the time-out
        time.sleep(0.05)
    entry, begin = MISTAKES[name], time.monotonic()
    if os.environ["RANK"] != "0":
        entry.make(folder)
        return
    with pytest.raises(entry.error) as caught:
        entry.make(folder)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert entry.message in text, text
    assert time.monotonic() - begin < 30  # the time-out is 5 seconds; the rest is for a busy machine
    print("heard")  # noqa: T201


LOST = [name for name, entry in MISTAKES.items() if entry.loses_a_rank]


@pytest.mark.full
@pytest.mark.each
@pytest.mark.parametrize("name", LOST)
def test_a_rank_that_waits_alone_hears_which_ranks_are_missing(name, tmp_path):
    """In processes of their own, because the process group is lost."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, __file__, name, str(tmp_path)]
    processes = [
        subprocess.Popen(
            command, env=environment | {"RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in "01"
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert printed[0].endswith("heard\n"), "\n".join(printed)


@pytest.mark.each
@pytest.mark.parametrize("name", some(OF_ALL_RANKS, OF_ALL_RANKS[::4]))
def test_every_rank_hears_of_a_mistake(name, tmp_path, run_on):
    run_on(2, make, name=name, folder=tmp_path)


EVERYDAY_CALLS = {
    "gradient_checkpointing_enable": lambda model: model.gradient_checkpointing_enable(),
    "tie_weights": lambda model: model.tie_weights(),
    "to(device)": lambda model: model.to(next(model.parameters()).device),
    "load_state_dict": lambda model: model.load_state_dict(build("llama").state_dict()),
}
"""Calls of Hugging Face after which a model trains as without them."""


@pytest.mark.ranks(2)
def test_everyday_calls_change_no_number_of_a_run():
    results = {}
    for name, call in {"none": lambda model: None, **EVERYDAY_CALLS}.items():
        strategy = strategy_for()
        model, optimizer, scheduler = prepared(strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers has another name for a call
            call(model)
        results[name] = [
            (loss, result.grad_norm) for loss, result, _ in train(strategy, model, optimizer, scheduler, range(2))
        ]
    assert all(result == results["none"] for result in results.values()), results


@pytest.mark.ranks(2)
def test_everyday_calls_see_full_parameters_and_any_prompts():
    plain, model = build("llama"), strategy_for().prepare_model(build("llama"))
    assert model.num_parameters() == plain.num_parameters()
    assert model.get_memory_footprint() == plain.get_memory_footprint()
    ids = batch_of("llama", 0, dist.get_rank())["input_ids"][:1, : 4 + dist.get_rank()]
    generated = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert torch.equal(generated, plain.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False))
    assert all(isinstance(tensor, DTensor) for tensor in model.state_dict().values())


def test_the_page_on_troubleshooting_is_the_table():
    assert PAGE.read_text() == page(), "run: python tests/test_mistakes.py"


if __name__ == "__main__" and len(sys.argv) > 1:
    lose_a_rank(sys.argv[1], Path(sys.argv[2]))
elif __name__ == "__main__":
    PAGE.write_text(page())
