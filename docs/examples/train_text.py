"""Train a byte-level Llama on local text, sharded over ranks; a killed run resumes from its last checkpoint.

At the end it writes an export for plain transformers, ``AutoModelForCausalLM.from_pretrained("runs/text/export")``, and
compares it with the trained model.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 docs/examples/train_text.py --run-dir runs/text

The same command runs on GPUs; configs/pretrain_1b.yaml is a configuration for 8 of them. ``--text`` takes a file or a
folder; the default is Python's standard library. ``--explain 8`` prints the sharding plan for 8 ranks.
"""

import itertools
import os
import signal
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from exported import check_export
from options import from_mapping, make_parser, print_plan, read_settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from fsdp2_strategy import FSDPV2Strategy, StrategyConfig
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.tracking import Metrics


@dataclass(frozen=True, kw_only=True)
class Training:
    """The section ``train`` of the configuration."""

    steps: int
    sequence_length: int
    lr: float
    weight_decay: float
    warmup_ratio: float
    save_every: int


class Text(Dataset):
    """The bytes of a file, or of the text files in a folder, split into sequences."""

    def __init__(self, path: Path, length: int) -> None:
        files = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.suffix in (".py", ".txt", ".md"))
        content = b"\n".join(file.read_bytes() for file in files)
        if len(content) < length:
            raise SystemExit(f"cannot train: {path} contains {len(content)} bytes of text, expected at least {length}.")
        self.sequences = torch.frombuffer(bytearray(content), dtype=torch.uint8).unfold(0, length, length)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.sequences[i].long()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    printable = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace() and b != 0xAD]
    others = [b for b in range(256) if b not in printable]
    symbols = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({symbols[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def train(settings: dict, options: Training, text: Path, run_dir: Path) -> int:
    """Train, and return the exit status; a preempted run has a status other than 0, so that it is started again."""
    with FSDPV2Strategy(config=StrategyConfig.from_mapping(settings["strategy"])) as strategy:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / f"rank{strategy.get_rank()}.pid").write_text(str(os.getpid()))
        with strategy.init_model_context(meta_init=True):  # no rank allocates the full model
            model = transformers.LlamaForCausalLM(model_config(settings)).train()
        if not (run_dir / "losses.jsonl").exists():
            strategy.explain(model, is_training=True)
        model = strategy.prepare_model(model, is_training=True)
        optimizer = strategy.create_optimizer(model, lr=options.lr, weight_decay=options.weight_decay)
        scheduler = strategy.create_scheduler(
            optimizer, "cosine", num_training_steps=options.steps, warmup_ratio=options.warmup_ratio
        )
        strategy.set_seed(strategy.config.seed, per_rank=True)  # dropout differs between the ranks
        data = Text(text, options.sequence_length)
        loader = ResumableLoader(data, strategy.config.train_batch_size, seed=strategy.config.seed)
        resumed, _ = strategy.load_ckpt(model, run_dir / "checkpoints", dataloader=loader)
        if resumed:
            strategy.print(f"resumed from {resumed}")

        with Metrics("jsonl", run_id="losses", run_dir=run_dir, hparams=strategy.config) as metrics:
            for batch in itertools.chain.from_iterable(itertools.repeat(loader)):  # all epochs
                if strategy.global_step(model) >= options.steps:
                    break
                for ids in batch.to(strategy.device).split(strategy.config.micro_train_batch_size):
                    loss = model(input_ids=ids, labels=ids).loss
                    strategy.backward(loss, model, optimizer, num_tokens=ids.numel())
                    result = strategy.optimizer_step(optimizer, model, scheduler)
                metrics.log(result, epoch=loader.epoch)
                preempted = strategy.preempted()
                if preempted or (result.stepped and result.step % options.save_every == 0):
                    strategy.save_ckpt(
                        model, run_dir / "checkpoints", max_num=2, max_mem=10, dataloader=loader, async_save=True
                    )
                if preempted:
                    return 128 + signal.SIGTERM
        strategy.save_model(model, byte_tokenizer(), run_dir / "export", dtype=torch.bfloat16)
        check_export(model, run_dir / "export", data[0][None])
    return 0


def model_config(settings: dict) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=256, bos_token_id=None, eos_token_id=None, pad_token_id=0, **settings["model"]
    )


def main(command_line: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--config", type=Path, default=Path(__file__).with_suffix(".yaml"), help="settings of strategy, model, training"
    )
    add("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="file, or folder of text files")
    add("--run-dir", type=Path, default=Path("runs/text"), help="folder of logs, checkpoints and the export")
    add("--steps", type=int, help="number of steps; overrides the configuration")
    add("--explain", type=int, metavar="RANKS", help="print the sharding plan for this many ranks, and do not train")
    args = parser.parse_args(command_line)
    settings = read_settings(args.config, ("strategy", "model", "train"))
    if args.steps:
        settings["train"]["steps"] = args.steps
    training = from_mapping(Training, settings["train"], args.config)
    if args.explain:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(model_config(settings))
        print_plan(model, StrategyConfig.from_mapping(settings["strategy"]), args.explain)
        return 0
    return train(settings, training, args.text, args.run_dir)


if __name__ == "__main__":
    os._exit(main())  # gloo's threads can abort a Python process while it exits
