"""What LightRFT's script cannot do itself: one function each, applied on request before the script runs.

`pretraining_data`: the script builds `SFTDatasetVL(data, tokenizer, length, strategy, pretrain_mode=True)`, but the
class wants a processor before the length, and calls its own `preprocess_data` with an argument that it does not take.
So with `--pretrain_data` the script raises a TypeError with any strategy. The trainer's part of it (the PTX loss) runs
with a data set in place of this class that yields what the trainer reads.

`rotary_tables_in_bf16`: FSDP2 casts each input of a unit, so LightRFT rounds the rotary tables of a vision encoder to
bf16. This package leaves them in fp32, as the unsharded model does. With tables that are exact in bf16, both compute
the same.
"""

from __future__ import annotations

import torch

from helpers.lightrft.run import IMAGE_TOKEN, PATCH


class PretrainingData:
    """Texts with one image each, as the trainer reads them."""

    def __init__(self, dataset, tokenizer, max_length, strategy, pretrain_mode=False):
        self._texts = dataset["input"]
        self._tokenizer = tokenizer

    def __len__(self):
        return len(self._texts)

    def __getitem__(self, index):
        ids = self._tokenizer(self._texts[index], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[292, IMAGE_TOKEN, 293, *ids[:12]]])
        pixels = torch.randn(4, 3 * 2 * PATCH * PATCH, generator=torch.Generator().manual_seed(index))
        return ids, pixels, torch.tensor([[1, 2, 2]])

    def collate_fn(self, items):
        length = max(ids.shape[1] for ids, _, _ in items)
        ids = torch.stack([torch.nn.functional.pad(ids, (0, length - ids.shape[1]), value=257) for ids, _, _ in items])
        pixels, grids = torch.cat([p for _, p, _ in items]), torch.cat([g for _, _, g in items])
        return None, ids, (ids != 257).long(), pixels, grids, {}


def pretraining_data():
    import lightrft.datasets

    lightrft.datasets.SFTDatasetVL = PretrainingData


def rotary_tables_in_bf16():
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    rotate = modeling_qwen2_5_vl.apply_rotary_pos_emb_vision

    def rotate_rounded(query, key, cos, sin):
        return rotate(query, key, cos.bfloat16().float(), sin.bfloat16().float())

    modeling_qwen2_5_vl.apply_rotary_pos_emb_vision = rotate_rounded
