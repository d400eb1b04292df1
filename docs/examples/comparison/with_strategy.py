"""Train a Llama with this library: the same program as plain_fsdp2.py.

    torchrun --standalone --nproc-per-node 2 with_strategy.py

It resumes from its newest checkpoint in ckpts, and exports to out.
"""

import itertools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp2_strategy import FSDPV2Strategy
from fsdp2_strategy.data import ResumableLoader

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)
TOKENS = torch.arange(480 * 32).view(480, 32) % 251
DATA = [{"input_ids": ids, "labels": ids} for ids in TOKENS]
STEPS, SAVE_EVERY = 40, 10
BATCH, MICRO_BATCHES = 12, 2  # samples of a micro-batch over all ranks


def train() -> list[float]:
    with FSDPV2Strategy(
        seed=42,
        max_norm=1.0,
        bf16=True,
        gradient_accumulation_steps=MICRO_BATCHES,
    ) as strategy:
        model = LlamaForCausalLM(CONFIG)
        model = strategy.prepare_model(model, is_training=True)

        optimizer = strategy.create_optimizer(
            model, lr=1e-3, weight_decay=0.01, no_decay=()
        )
        scheduler = strategy.create_scheduler(
            optimizer,
            "cosine",
            num_warmup_steps=4,
            num_training_steps=STEPS,
        )

        loader = ResumableLoader(DATA, BATCH, shuffle=False)
        strategy.load_ckpt(model, "ckpts", dataloader=loader)

        losses = []
        epochs = itertools.repeat(loader)
        for batch in itertools.chain.from_iterable(epochs):
            if strategy.global_step(model) >= STEPS:
                break
            inputs = {n: t.to(strategy.device) for n, t in batch.items()}
            strategy.backward(model(**inputs).loss, model, optimizer)
            result = strategy.optimizer_step(optimizer, model, scheduler)
            if not result.stepped:
                continue
            losses.append(result.loss)
            strategy.print(
                f"step {result.step}: loss {result.loss:.4f}, "
                f"norm {result.grad_norm:.2f}"
            )

            if result.step % SAVE_EVERY == 0:
                strategy.save_ckpt(model, "ckpts", dataloader=loader)

        strategy.save_model(model, output_dir="out")
    return losses


if __name__ == "__main__":
    train()
