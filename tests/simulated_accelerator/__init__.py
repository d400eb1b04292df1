"""A simulated accelerator: a device of torch's own kind (PrivateUse1) on host memory, with streams, and with detectors.

`load` registers it in this process; from then on ``torch.accelerator`` is this device, of type ``sim``, with the module
``torch.sim`` and the collective backend ``simccl``. A folder on PYTHONPATH that torch searches for devices loads it in
every process (`environment`), which scripts need that start others.

What it simulates, and what its detectors find:

- Tensors of the device and of the CPU do not mix in an operator, but for scalars and for indices, as with CUDA.
- Memory is poisoned (NaN in floating dtypes, -1 in integers) when it is allocated and when it is freed. Allocated and
  reserved bytes have peaks.
- Streams and events carry vector clocks. Two accesses of the same bytes, one of which is a write, are reported as a
  RACE unless events, waits or the host order them. An allocation is reported as REUSE if it may get memory that another
  stream may still use: freed without `record_stream` and without an order.
- Copies from pinned memory with ``non_blocking`` are carried out late, when a kernel that is ordered after them runs;
  memory that was changed meanwhile is reported (HOST). Copies into pinned memory arrive when the host waits for them,
  and the target is poisoned until then.
- Collectives of tensors of the device run on a stream of their group, or on the current stream if they are synchronous,
  as those of NCCL in torch. The output is poisoned until something that is ordered after the collective runs: `wait`
  orders the current stream after it, and does not block the host. CPU tensors, tensors that are not contiguous, dtypes
  and reductions that NCCL refuses, and two ranks on one device raise.
- Each device has a generator with a seed and an offset, as CUDA's; kernels do not draw from the CPU's.
- The backward pass runs in another thread.
- Syncs and blocking copies are counted: `.item()`, sizes that depend on values, copies to pageable memory.
- A forked child cannot use the device if its parent has.

What it does not simulate: kernels are carried out when they are launched, so nothing overlaps, and nothing is slower or
faster than elsewhere; the host's threads share one clock, so that a lock or an event of Python that is missing between
two of them is not seen; strided accesses count as all bytes that they span; values are those of the CPU's kernels, not
of CUDA's; NCCL's hangs, its watchdog and its use of the device's memory; graphs, compiled kernels, autocast. A blocking
copy from pageable memory does not order anything here, though CUDA's waits for the stream. Memory is never fragmented
and does not run out.
"""

from simulated_accelerator.detectors import Counters, check, counted, reports, reset, watched, without_detectors
from simulated_accelerator.loading import environment, is_loaded, load, missing

__all__ = [
    "Counters",
    "check",
    "counted",
    "environment",
    "is_loaded",
    "load",
    "missing",
    "reports",
    "reset",
    "watched",
    "without_detectors",
]
