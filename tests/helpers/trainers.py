"""Tiny runs of transformers' ``Trainer`` and of TRL's trainers, on the ranks of the pool or under torchrun.

Input: the kind of trainer, and what makes its class. Output: a trainer with a model, a tokenizer and data made here.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

KINDS = ("plain", "sft", "dpo", "reward", "grpo")
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
SAMPLES = 48
LORA = ["q_proj", "v_proj"]

SIZE = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@contextlib.contextmanager
def launched(**variables: str) -> Iterator[None]:
    """Run a block as under torchrun: accelerate reads its variables, and keeps states for the life of a process."""
    from accelerate.state import AcceleratorState, GradientState

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", **variables}
    with patch.dict(os.environ, names), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of accelerate, TRL and peft
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@contextlib.contextmanager
def fsdp2_on_cpu() -> Iterator[None]:
    """Let accelerate shard on CPUs: it knows FSDP for accelerators only, although it works with gloo."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    init = AcceleratorState.__init__

    def as_on_accelerators(self: Any, *args: Any, **kwargs: Any) -> None:
        if not AcceleratorState._shared_state:
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        init(self, *args, **kwargs)

    with patch.object(AcceleratorState, "__init__", as_on_accelerators):
        yield


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def write_model(folder: Path, **config: Any) -> Path:
    """Write the model that all kinds but "reward" train, on rank 0; trainers make the reference from this folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZE, **config)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return folder


def text(seed: int, length: int = 8) -> str:
    draw = torch.Generator().manual_seed(seed)
    return " ".join(f"w{int(i)}" for i in torch.randint(0, 60, (length + seed % 4,), generator=draw))


class Sequences(Dataset):
    """Token sequences with labels, some of which are ignored."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(4, len(WORDS), (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": torch.where(torch.arange(12) < i % 5, -100, ids)}


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def untrained(kind: str, folder: Path) -> Any:
    """Return the model that trainers of a kind start from, without adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    if kind == "reward":
        return LlamaForSequenceClassification(LlamaConfig(**SIZE, num_labels=1))
    return LlamaForCausalLM.from_pretrained(folder)


def trainer_of(
    kind: str,
    wrap: Callable[[type], type],
    folder: Path,
    output: Path,
    *,
    lora: bool = False,
    samples: int = SAMPLES,
    **arguments: Any,
) -> Any:
    """Make a trainer of a kind; ``wrap`` makes its class from the published one."""
    import transformers
    import trl

    prompts = {"prompt": lambda i: text(i, 4), "chosen": lambda i: " " + text(100 + i, 4)}
    prompts |= {"rejected": lambda i: " " + text(200 + i, 4)}
    classes = {
        "plain": (transformers.Trainer, transformers.TrainingArguments, ()),
        "sft": (trl.SFTTrainer, trl.SFTConfig, ("text",)),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, tuple(prompts)),
        "reward": (trl.RewardTrainer, trl.RewardConfig, tuple(prompts)),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, ("prompt",)),
    }
    trainer_class, arguments_class, columns = classes[kind]
    model = untrained(kind, folder)
    defaults = {
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        "bf16": False,
    }
    others: dict[str, Any] = {"processing_class": tokenizer()}
    if lora:
        from peft import LoraConfig, get_peft_model

        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        config = LoraConfig(r=4, target_modules=LORA, task_type=task)
        if kind == "plain":
            model = get_peft_model(model, config)
        else:
            others["peft_config"] = config
    if kind == "plain":
        data: Any = Sequences()
    else:
        import datasets

        make = {**prompts, "text": text}
        datasets.disable_progress_bars()
        data = datasets.Dataset.from_list([{name: make[name](i) for name in columns} for i in range(samples)])
    if kind == "grpo":
        defaults |= {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 4, "beta": 0.1}
        others["reward_funcs"] = rewards
    evaluates = arguments.get("eval_strategy", "no") != "no"
    return wrap(trainer_class)(
        model=model,
        args=arguments_class(**defaults | arguments),
        train_dataset=data,
        **({"eval_dataset": data} if evaluates else {}),
        **others,
    )


def logged(trainer: Any, *names: str) -> list[tuple[float, ...]]:
    """Return what a trainer has logged of each step: loss and norm, and values of these names."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [tuple(entry[name] for name in ("loss", "grad_norm", *names)) for entry in entries]


def recording(cls: type, log: Any, dies_after: int | None) -> type:
    """Make a trainer class that records the tokens of each step, without padding, and dies where it is told to.

    Those of GRPO are the prompts alone: completions differ between numbers of ranks.
    """
    import json
    import signal

    from fsdp2_strategy.integrations.trl import with_fsdp2

    class Recording(cls):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if dies_after is not None and self.state.global_step >= dies_after and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ids = inputs["prompt_ids" if "prompt_ids" in inputs else "input_ids"].tolist()
            log.write(json.dumps([self.state.global_step + 1, [[i for i in row if i] for row in ids]]) + "\n")
            return super().compute_loss(model, inputs, *args, **kwargs)

    return with_fsdp2(Recording)


def run_rank(rank: int, world: int, port: int, kind: str, folder: str, output: str, settings: dict[str, Any]) -> None:
    """Run one rank of a trainer in this process, to its end; with ``kill_at``, rank 1 dies in the step after it."""
    import json
    import sys

    with Path(f"{output}-rank{rank}.log").open("a") as printed:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(printed.fileno(), stream.fileno())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    kill_at, resume = settings.pop("kill_at", None), settings.pop("resume", None)
    with Path(f"{output}-rank{rank}.jsonl").open("a", buffering=1) as log:
        trainer = trainer_of(kind, lambda cls: recording(cls, log, kill_at), Path(folder), Path(output), **settings)
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(Path(output) / "final"))
    if rank == 0:
        (Path(output) / "losses.json").write_text(json.dumps(logged(trainer)))
    dist.barrier() if dist.is_initialized() else None
    os._exit(0)


def main() -> None:
    """Fork the ranks of each run that a line of standard input describes, and answer with their exit codes.

    Imports take longer than a run, and forked processes have them already. As under torchrun, the other ranks of a run
    end when one has failed.
    """
    import json
    import multiprocessing
    import socket
    import sys
    from multiprocessing.connection import wait

    import peft  # noqa: F401
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer  # noqa: F401

    import fsdp2_strategy.integrations.trl  # noqa: F401

    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        world, *run = json.loads(line)
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        ranks = [fork.Process(target=run_rank, args=(rank, world, port, *run)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        while alive := [rank for rank in ranks if rank.is_alive()]:
            if any(rank.exitcode for rank in ranks):
                for rank in alive:
                    rank.terminate()
            wait([rank.sentinel for rank in alive])
        sys.stdout.write(json.dumps([rank.exitcode for rank in ranks]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
