"""Sizes so small that tensors of a few kilobytes cross them."""

from __future__ import annotations

SHRUNK = {
    "BLOCK_BYTES": 2048,
    "SMALL_BLOCK_BYTES": 100,
    "CACHED_BYTES": 512,
    "SMALL_WRITE_BYTES": 300,
    "SCRATCH_BYTES": 1024,
    "SMALL_READ_BYTES": 256,
    "SHORT_READ_BYTES": 32,
    "STRIDED_ROW_BYTES": 200,
    "COMPUTED_BYTES": 1000,
    "COPY_BYTES": 1000,
    "CONVERSION_BYTES": 1000,
    "BROADCAST_BYTES": 1000,
    "POPULATED_BYTES": 100,
    "STAGING_BYTES": 1 << 14,
    "OFFLOAD_BYTES": 1 << 14,
    "BUCKET_BYTES": 5000,
    "LARGE_BYTES": 3000,
    "COMPARED_BYTES": 600,
    "GATHER_BYTES": 3000,
    "MERGED_ROWS": 16,
    "MERGED_EXPERTS": 2,
    "LOGITS_BYTES": 1000,
    "CACHED_LOGITS_BYTES": 600,
    "FINGERPRINT_ELEMENTS": 64,
    "FINGERPRINT_BLOCKS": 2,
}
"""By their names in `fsdp2_strategy.sizes`. Not those that say how many files there are: tests name the files that they
look at, and `test_sizes` splits some."""

FILES = (
    "test_async.py",
    "test_boxes.py",
    "test_checkpoint.py",
    "test_checkpoint_format.py",
    "test_differences.py",
    "test_export.py",
    "test_lerobot_layout.py",
    "test_lora.py",
    "test_memory.py",
    "test_only_trainable.py",
    "test_outside.py",
    "test_rollout.py",
    "test_trainer_layout.py",
    "test_weights.py",
)
"""Whose tests run a second time so."""
