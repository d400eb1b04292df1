r"""Fine-tune a causal language model with TRL's SFTTrainer, sharded by one more line: ``with_fsdp2(SFTTrainer)``.

    torchrun --standalone --nproc-per-node 2 docs/examples/trainer_sft.py --run-dir runs/trainer_sft

Without --model and --data, it first makes a tiny model and conversations about sums, as sft.py does, so this command
runs on two CPU cores. For your own model, on 8 GPUs:

    torchrun --standalone --nproc-per-node 8 docs/examples/trainer_sft.py --run-dir runs/trainer-8b \
        --config docs/examples/configs/trainer_sft_8b.yaml --model /models/Llama-3.1-8B-Instruct \
        --data train.jsonl --eval-data eval.jsonl

Loop, data, losses and logs are TRL's. Start the command again after a kill, and it resumes from the newest checkpoint.
At the end, the program opens the folder that the trainer saved with from_pretrained, and compares its log-probabilities
with those of the trained model. It needs TRL (pip install trl).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from exported import check_export
from options import make_parser, read_settings
from sft import make_inputs

from fsdp2_strategy import list_checkpoints
from fsdp2_strategy.integrations.trl import with_fsdp2


def make_trainer(args: argparse.Namespace, settings: dict[str, dict[str, Any]]) -> transformers.Trainer:
    """Return a trainer of TRL whose model, optimizer and checkpoints are sharded."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(str(args.run_dir / "trainer"), **settings["train"], use_cpu=not torch.cuda.is_available())
    if args.model is None or args.data is None:
        with arguments.main_process_first():
            own = make_inputs(args.run_dir, write=arguments.process_index == 0)
        args.model, args.data, args.eval_data = args.model or own[0], args.data or own[1], args.eval_data or own[2]
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    arguments.assistant_only_loss = "{% generation" in (tokenizer.chat_template or "")  # else all tokens are learned
    files = {"train": str(args.data), "eval": str(args.eval_data)}
    data = datasets.load_dataset("json", data_files=files, cache_dir=str(args.run_dir / "cache"))
    return with_fsdp2(SFTTrainer, **settings["strategy"])(
        str(args.model),
        args=arguments,
        train_dataset=data["train"],
        eval_dataset=data["eval"],
        processing_class=tokenizer,
    )


def train(args: argparse.Namespace, settings: dict[str, dict[str, Any]]) -> None:
    trainer = make_trainer(args, settings)
    trainer.train(resume_from_checkpoint=bool(list_checkpoints(args.run_dir / "trainer")))
    trainer.save_model(str(args.run_dir / "export"))
    ids = torch.tensor([trainer.eval_dataset[0]["input_ids"]])
    check_export(trainer.model, args.run_dir / "export", ids)


def arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--config", type=Path, default=Path(__file__).with_suffix(".yaml"), help="settings of strategy and training")
    add("--model", type=Path, help="Hugging Face folder with model and tokenizer; by default a tiny model is made")
    add("--data", type=Path, help="conversations to learn, JSON lines; by default conversations about sums are made")
    add("--eval-data", type=Path, help="conversations to evaluate, required with --data")
    add("--run-dir", type=Path, default=Path("runs/trainer_sft"), help="folder of checkpoints and the export")
    args = parser.parse_args(command_line)
    if (args.data is None) != (args.eval_data is None):
        parser.error("--data and --eval-data belong together: pass both, or none of them.")
    return args


def main(command_line: Sequence[str] | None = None) -> None:
    args = arguments(command_line)
    train(args, read_settings(args.config, ("strategy", "train")))
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads can abort a Python process while it exits
