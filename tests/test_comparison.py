"""The two programs of docs/coming_from_fsdp2.md are equal in what they compute, and the page shows their lines."""

from __future__ import annotations

import ast
import os
import re
import shutil
import textwrap
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coming_from_fsdp2.md"
PROGRAMS = [ROOT / "docs" / "examples" / "comparison" / name for name in ("plain_fsdp2.py", "with_strategy.py")]


def train(program):
    """Run a program on the ranks of the test, and return its losses."""
    import torch.distributed as dist

    names = {"__name__": "program"}
    exec(compile(program.read_text(), program.name, "exec"), names)
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        losses = names["train"]()
    dist.barrier()
    return losses


def forget(checkpoints):
    """Delete the newest two of four checkpoints, as if the run had been killed before them."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        complete = sorted(path for path in Path(checkpoints).iterdir() if path.is_dir())
        for path in complete[-2:]:
            shutil.rmtree(path)
    dist.barrier()


@pytest.mark.full
@pytest.mark.ranks(2)
def test_both_programs_have_the_same_losses_and_weights_also_after_a_resume(tmp_path):
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    os.chdir(folder[0])
    plain, ours = map(train, PROGRAMS)
    assert len(plain) == len(ours) == 40 and plain[-1] < 0.8 * plain[0]
    assert ours == pytest.approx(plain, rel=1e-6)
    weights = [dict(LlamaForCausalLM.from_pretrained(out).named_parameters()) for out in ("plain_out", "out")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-5)
    for program, checkpoints, losses in zip(PROGRAMS, ("plain_ckpts", "ckpts"), (plain, ours), strict=True):
        forget(checkpoints)
        assert train(program) == losses[20:], program.name
    forget("plain_ckpts")
    assert continue_plain() == pytest.approx(plain[20:], rel=1e-6)


def continue_plain():
    """Continue the checkpoint of the plain program at step 20, and return the losses; other settings are replaced."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    from fsdp2_strategy import FSDPV2Strategy

    names = {"__name__": "program"}
    exec(compile(PROGRAMS[0].read_text(), PROGRAMS[0].name, "exec"), names)
    losses = []
    with FSDPV2Strategy(max_norm=1.0, bf16=True, gradient_accumulation_steps=names["MICRO_BATCHES"]) as strategy:
        model = strategy.prepare_model(LlamaForCausalLM(names["CONFIG"]), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=0.5, weight_decay=0.5, no_decay=())
        scheduler = strategy.create_scheduler(optimizer, "cosine", num_warmup_steps=4, num_training_steps=40)
        path, client_state = strategy.load_ckpt(model, "plain_ckpts", trust=True)
        assert Path(path).name == "step000020" and strategy.global_step(model) == 20
        for micro_batch in range(client_state["run"]["batches"], names["STEPS"] * names["MICRO_BATCHES"]):
            size = names["BATCH"] // dist.get_world_size()
            first = names["BATCH"] * micro_batch + size * dist.get_rank()
            ids = torch.stack([names["TOKENS"][i % len(names["TOKENS"])] for i in range(first, first + size)])
            strategy.backward(model(input_ids=ids, labels=ids).loss, model, optimizer)
            result = strategy.optimizer_step(optimizer, model, scheduler)
            losses += [result.loss] if result.stepped else []
    return losses


def lines_of(program):
    """Return the lines of a program without its docstring, and the call at its end."""
    text = program.read_text().partition('"""\n\n')[2]
    return text.partition('\n\nif __name__ == "__main__"')[0].splitlines()


def blocks_of(page, side):
    """Return the blocks of one column of the page."""
    found = re.findall(r'^<div class="side-by-side" markdown>\n(.*?)^</div>\n</div>', page, re.MULTILINE | re.DOTALL)
    columns = [re.split(r"^</div>\n", each, flags=re.MULTILINE)[side] for each in found]
    return [block for column in columns for block in re.findall(r"```python\n(.*?)```", column, re.DOTALL)]


@pytest.mark.parametrize("side", [0, 1], ids=["plain", "with_strategy"])
def test_the_page_shows_the_programs_line_by_line(side):
    lines = [line for line in lines_of(PROGRAMS[side]) if line]
    for block in blocks_of(PAGE.read_text(), side):
        shown = [line for line in block.splitlines() if line]
        here, lines = lines[: len(shown)], lines[len(shown) :]
        assert textwrap.dedent("\n".join(here)).splitlines() == shown
    assert not lines


def count(program):
    """Count the lines that are neither empty, nor a comment, nor part of a docstring."""
    tree = ast.parse(program.read_text())
    texts = [node.body[0] for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)]
    texts = [text for text in texts if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)]
    left_out = {number for text in texts for number in range(text.lineno, text.end_lineno + 1)}
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in left_out
        for number, line in enumerate(program.read_text().splitlines(), 1)
    )


def test_the_page_has_the_numbers_of_lines():
    plain, ours = map(count, PROGRAMS)
    assert f"{plain} lines become {ours}" in " ".join(PAGE.read_text().split())
