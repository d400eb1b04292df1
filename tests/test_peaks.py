"""The peak of host memory of each operation stays within its bound, which does not grow with the full model."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import harness
import peaks

from fsdp2_strategy import sizes

SMALL = {
    "BLOCK_BYTES": 1 << 20,
    "OFFLOAD_BYTES": 33 << 20,  # the allocator keeps freed memory of smaller buffers
    "STAGING_BYTES": 1 << 20,
    "BUCKET_BYTES": 4 << 20,
    "LARGE_BYTES": 1 << 20,
    "BROADCAST_BYTES": 1 << 20,
}


def config_of(width, layers):
    shape = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers}
    return LlamaConfig(**shape, vocab_size=2000, num_attention_heads=8)


def check_peaks(config, folder):
    """Run every operation on a tiny model first, because Python and torch read modules at their first use."""
    harness.harness_group.cache_clear()
    tiny = peaks.Trained.of(config_of(32, 1))
    for name, operation in peaks.operations(tiny, folder / "tiny").items():
        assert not harness.error_of([peaks.run(operation)]), name
    trained = peaks.Trained.of(config)
    for name, operation in peaks.operations(trained, folder).items():
        outcomes = peaks.run(operation)
        assert not harness.error_of([outcomes]), name
        peak = max(outcome["peak_bytes"] for outcome in outcomes)
        assert peak <= operation.bound_bytes + peaks.SLACK_BYTES, (name, peak, operation.bound_bytes)
    harness.harness_group.cache_clear()
    return trained


@pytest.mark.ranks(2)
def test_operations_stay_within_their_bounds(tmp_path):
    with patch.multiple(sizes, **SMALL):
        trained = check_peaks(config_of(512, 6), tmp_path)
    assert trained.weights_bytes > 2.5 * peaks.SLACK_BYTES, "twice the shard, or the full model, would be noticed"


@pytest.mark.full
@pytest.mark.real_sizes
@pytest.mark.ranks(2)
def test_operations_on_a_larger_model_stay_within_their_bounds(tmp_path):
    trained = check_peaks(config_of(1024, 12), tmp_path)
    assert trained.weights_bytes > 4 * sizes.BLOCK_BYTES + 2 * peaks.SLACK_BYTES
