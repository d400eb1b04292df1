"""Look up how many floating-point operations a device can do in a second, for the MFU.

Input: the name of an accelerator, and the dtype of its matrix products. Output: the peak of the vendor's data sheet, in
FLOP/s, for dense matrices, with accumulation in fp32; None if the device is unknown.
"""

from __future__ import annotations

import re

import torch

from fsdp2_strategy.distributed.accelerator import accelerator_type, device_module

# Patterns of device names, the more specific first: peak in TFLOP/s for bf16 and fp16, TF32 and fp32. Sources: NVIDIA's
# data sheets of the products, and its architecture papers for GeForce and RTX (with fp32 accumulation); AMD's pages of
# the Instinct products. Where a sheet has the value for sparse matrices only, half of it.
_PEAKS: tuple[tuple[str, float, float | None, float], ...] = (
    (r"GB[23]00", 2500, 1250, 80),
    (r"B[23]00", 2250, 1125, 75),
    (r"H200 NVL|H100 NVL", 835, 417.5, 60),
    (r"H100 PCIe", 756, 378, 51),
    (r"H200|H100|H800|GH200", 989, 494.5, 67),
    (r"H20", 148, 74, 44),
    (r"A100|A800", 312, 156, 19.5),
    (r"A30", 165, 82, 10.3),
    (r"A40", 149.7, 74.8, 37.4),
    (r"A10", 125, 62.5, 31.2),
    (r"L40S", 362, 183, 91.6),
    (r"L40", 181, 90.5, 90.5),
    (r"L4", 121, 60, 30.3),
    (r"RTX 6000 Ada", 364, 182, 91.1),
    (r"RTX A6000", 154.8, 77.4, 38.7),
    (r"RTX 5090", 209.5, 104.8, 104.8),
    (r"RTX 4090", 165.2, 82.6, 82.6),
    (r"RTX 3090", 71, 35.6, 35.6),
    (r"MI355X", 2500, None, 157.3),
    (r"MI350X", 2300, None, 144.2),
    (r"MI300X|MI325X", 1307, 653.7, 163.4),
    (r"MI300A", 980.6, 490.3, 122.6),
    (r"MI250X", 191.5, None, 47.9),  # torch sees each of its two dies as a device
)


def peak_flops(dtype: torch.dtype) -> float | None:
    """Return the peak of this process's accelerator, in FLOP/s; None if it is unknown; not collective."""
    if (device_type := accelerator_type()) is None:
        return None
    name = getattr(device_module(device_type), "get_device_name", lambda: "")()
    return peak_of(str(name), dtype, uses_tf32=_uses_tf32())


def peak_of(device_name: str, dtype: torch.dtype, *, uses_tf32: bool = False) -> float | None:
    """Return the peak of a device by its name in FLOP/s; None if it is unknown.

    Args:
        device_name: what ``torch.cuda.get_device_name`` returns, such as "NVIDIA H100 80GB HBM3".
        dtype: bfloat16, float16 or float32.
        uses_tf32: whether products of float32 are computed in TF32.

    Example:
        >>> peak_of("NVIDIA H100 80GB HBM3", torch.bfloat16)
        989000000000000.0
    """
    for pattern, half, tf32, single in _PEAKS:
        if re.search(rf"\b({pattern})\b", device_name):
            if dtype in (torch.bfloat16, torch.float16):
                return half * 1e12
            if dtype == torch.float32:
                return (tf32 if uses_tf32 and tf32 is not None else single) * 1e12
    return None


def _uses_tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the program sets precisions by torch's newer names
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
