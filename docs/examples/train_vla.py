"""Train a vision-language-action model on generated episodes; killed at any moment, it goes on where it was.

Two hands reach for targets of their colour. A tiny PaliGemma sees the image, the instruction says which hand is to
move, and a flow-matching head gives the next actions of both hands. Backbone and head have rates of their own, and the
backbone stands still for the first steps; or, with --freeze-backbone, all the time.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 docs/examples/train_vla.py --run-dir runs/vla
"""

import argparse
import os
import shutil
import signal
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset

from fsdp2_strategy import init_on_meta
from fsdp2_strategy.data import ResumableLoader
from fsdp2_strategy.vla import VLAFSDPStrategy, VLAMetrics

SIZE, PATCH, WIDTH = 32, 8, 64  # of an image, of what the backbone sees of it at once, of hidden states
IMAGE_TOKEN, TOKENS = 257, (SIZE // PATCH) ** 2
INSTRUCTIONS = ("left hand", "right hand", "both hands")
CHUNK, PARTS = 8, {"left_hand_6d": 6, "left_hand_joints": 2, "right_hand_6d": 6, "right_hand_joints": 2}
ACTIONS = sum(PARTS.values())
MICRO_BATCH = 32  # samples over all ranks, however many there are: so a run goes on at another number


class Episodes(Dataset):
    """Episodes in which hands go straight to their targets; frame i is the same wherever it is asked for."""

    def __init__(self, count: int, length: int, seed: int = 0) -> None:
        self.episode_lengths = [length] * count
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return len(self.episode_lengths) * self.length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        episode, frame = divmod(i, self.length)
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + episode)
        starts, targets = torch.rand(2, 2, 2, generator=random)  # (hand, x and y), from 0 to 1
        which = int(torch.randint(len(INSTRUCTIONS), (), generator=random))
        moves = torch.tensor([which != 1, which != 0])
        progress = torch.arange(frame, frame + CHUNK + 1).clamp(max=self.length) / self.length
        path = starts + progress[:, None, None] * (targets - starts) * moves[:, None]  # (time, hand, xy)
        steps = (path[1:] - path[:-1]) * self.length  # (CHUNK, hand, xy)
        closing = (progress[1:, None] * moves).unsqueeze(2).expand(-1, -1, 2)  # hands close on the way
        hand = torch.cat([steps, steps.new_zeros(CHUNK, 2, 4), closing], dim=2)  # 6d: x, y and what stands still
        ids = torch.tensor([IMAGE_TOKEN] * TOKENS + list(INSTRUCTIONS[which].encode().ljust(10)))
        return {
            "pixel_values": self._image(path[0], targets),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "actions": hand.flatten(1),  # (CHUNK, ACTIONS)
            "action_masks": (torch.arange(frame, frame + CHUNK) < self.length)[:, None].expand(-1, ACTIONS),
            "current_state": path[0].flatten(),
            "current_state_mask": torch.ones(4, dtype=torch.bool),
            "fov": torch.tensor([1.0, 1.0]),
        }

    def _image(self, hands: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Draw hands and targets as spots: left ones red, right ones green, targets blue as well."""
        axis = (torch.arange(SIZE) + 0.5) / SIZE

        def spot(at: torch.Tensor) -> torch.Tensor:
            return torch.exp(-((axis[None, :] - at[0]) ** 2 + (axis[:, None] - at[1]) ** 2) * 100)

        red, green = (spot(hands[i]) + spot(targets[i]) for i in range(2))
        return torch.stack([red, green, spot(targets[0]) + spot(targets[1])])


class FlowBlock(nn.Module):
    """One layer of the action model: it mixes the actions of a chunk under what backbone, state and time say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.condition = nn.Linear(WIDTH, 2 * WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.condition(condition).unsqueeze(1).chunk(2, dim=2)
        y = self.norm(x) * (1 + scale) + shift
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class FlowVLA(nn.Module):
    """A PaliGemma from a folder, a cognition token that is read at its end, and a flow-matching action model."""

    def __init__(self, backbone: Path) -> None:
        super().__init__()
        self.backbone = transformers.PaliGemmaModel.from_pretrained(backbone)
        self.cognition_token = nn.Parameter(torch.zeros(1, WIDTH))
        self.state = nn.Linear(4 + 2 + 1, WIDTH)  # of the hands, the field of view, and time
        self.inward, self.outward = nn.Linear(ACTIONS, WIDTH), nn.Linear(WIDTH, ACTIONS)
        self.place = nn.Parameter(torch.zeros(CHUNK, WIDTH))
        self.blocks = nn.ModuleList(FlowBlock() for _ in range(2))

    def forward(
        self,
        rgb: torch.Tensor,  # (batch, 3, SIZE, SIZE)
        input_ids: torch.Tensor,  # (batch, tokens)
        attention_mask: torch.Tensor,
        action_labels: torch.Tensor,  # (batch, CHUNK, ACTIONS)
        action_masks: torch.Tensor,
        current_state: torch.Tensor,  # (batch, 4)
        current_state_mask: torch.Tensor,
        fov: torch.Tensor,  # (batch, 2)
        data_source: list[str],
    ) -> dict[str, torch.Tensor]:
        noise = torch.randn_like(action_labels)
        time = torch.rand(len(rgb), 1, device=rgb.device, dtype=rgb.dtype)
        seen = self.backbone(input_ids=input_ids, pixel_values=rgb, attention_mask=attention_mask, use_cache=False)
        told = torch.cat([current_state * current_state_mask, fov, time], dim=1)
        condition = seen.last_hidden_state[:, -1] + self.cognition_token + self.state(told)
        x = self.inward(torch.lerp(noise, action_labels, time[:, :, None])) + self.place
        for block in self.blocks:
            x = block(x, condition)
        error = (self.outward(x) - (action_labels - noise)).float().square() * action_masks
        parts = zip(PARTS, error.split(list(PARTS.values()), dim=2), strict=True)
        return {"loss": error.mean(), **{name: part.mean().detach() for name, part in parts}}


def make_backbone(folder: Path) -> Path:
    """Write a tiny PaliGemma, as one that was trained before would lie there; the first process to finish wins."""
    if not folder.is_dir():
        torch.manual_seed(0)
        size = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
        text = {"model_type": "gemma", "vocab_size": 260, "num_key_value_heads": 2, "head_dim": 16}
        vision = {"model_type": "siglip_vision_model", "image_size": SIZE, "patch_size": PATCH}
        config = transformers.PaliGemmaConfig(
            text_config={**size, **text},
            vision_config={**size, **vision, "projection_dim": WIDTH, "vision_use_head": False},
            image_token_index=IMAGE_TOKEN,
            projection_dim=WIDTH,
            hidden_size=WIDTH,
        )
        own = folder.with_name(f"{folder.name}.{os.getpid()}")
        transformers.PaliGemmaModel(config).save_pretrained(own)
        try:
            own.rename(folder)
        except OSError:  # another one was first
            shutil.rmtree(own)
    return folder


def main() -> int:
    """Return the exit status: a run that was told to stop is not through, and is started again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/vla"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-interval", type=int, default=50)
    parser.add_argument(
        "--freeze-backbone", action="store_true", help="train the action model alone, and save it alone"
    )
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
    args = parser.parse_args()
    args.run_dir.mkdir(parents=True, exist_ok=True)

    folder = make_backbone(args.run_dir / "backbone")
    torch.manual_seed(0)
    with init_on_meta():  # no rank ever holds the whole model
        vla = FlowVLA(folder)
    vla.backbone.requires_grad_(not args.freeze_backbone)
    strategy = VLAFSDPStrategy(
        vla,
        device_id=int(os.environ.get("LOCAL_RANK", "0")),
        stage="vla-train",
        epochs=100,
        max_steps=args.steps,
        global_batch_size=2 * MICRO_BATCH,
        per_device_batch_size=MICRO_BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=3e-4,
        action_model_learning_rate=1e-3,
        weight_decay=0.01,
        max_grad_norm=1.0,
        lr_scheduler_type="backbone-freeze-warmup",
        llm_freeze_step=args.steps // 6,
        warmup_ratio=0.0,
        enable_mixed_precision_training=args.bf16,
        reduce_in_full_precision=True,
        sharding_strategy="full-shard",
    )
    with strategy:
        data = Episodes(count=200, length=24)
        strategy.run_setup(args.run_dir, len(data), {"GemmaDecoderLayer", "SiglipEncoderLayer", FlowBlock}, {FlowBlock})
        went_on = strategy.load_optimizer_and_scheduler(args.run_dir)
        if strategy.is_rank_0() and went_on:
            print(f"resumed at {went_on}", flush=True)
        loader = ResumableLoader(data, MICRO_BATCH, seed=1, pool=32)
        metrics = VLAMetrics(
            ("jsonl",),
            "vla",
            args.run_dir,
            {"steps": args.steps, "freeze_backbone": args.freeze_backbone},
            grad_accumulation_steps=strategy.grad_accumulation_steps,
            window_size=strategy.grad_accumulation_steps,
        )
        through = strategy.run_training(
            loader, metrics, save_interval=args.save_interval, save_full_model=not args.freeze_backbone
        )
        metrics.finalize()
    return 0 if through else 128 + signal.SIGTERM


if __name__ == "__main__":
    os._exit(main())  # gloo's threads can abort an interpreter that is on its way out
