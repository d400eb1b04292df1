"""Define all size thresholds for tensors and files, so that tests can lower them and cross each with small tensors.

Read them as ``sizes.X`` at the time of use; a ``from … import`` or a default argument would keep an old value. Files
that were written with other values of these sizes can be read, because checksum manifests record their block size. The
fingerprints of weights that a checkpoint leaves out record it, too. Both ends of a remote connection need the same
``HEADER_BYTES`` and ``MESSAGE_TENSORS``.
"""

from __future__ import annotations

# --- files -----------------------------------------------------------------------------------------------------------

BLOCK_BYTES = 16 << 20
"""Maximum size of a block of a file: a block has one checksum, and one thread reads or writes it at a time."""
SMALL_BLOCK_BYTES = 128 << 10
"""Parts of tensors from this size have checksum blocks of their own, which also end where the shards of other numbers
of ranks end, if those are not smaller; see [Note: ends of blocks] in `write`."""
CACHED_BYTES = 256 << 10
"""Bytes that are hashed and written or sent, or read and hashed, at a time; few enough for the processor's cache."""
SMALL_WRITE_BYTES = 256 << 10
"""Tensors up to this size that are adjacent in a file are copied into one buffer and written together."""
SCRATCH_BYTES = 8 << 20
"""Maximum file range that is read at once to extract a strided view from it."""
SMALL_READ_BYTES = 64 << 10
"""The same maximum for a file range of which less than half of the bytes are needed."""
SHORT_READ_BYTES = 4 << 10
"""Exception to `SMALL_READ_BYTES`: if the needed parts are shorter than this, the gaps between them are read, too."""
SHORTEST_RUN_BYTES = 4 << 10
"""Minimum file range to write; a tensor whose shards would be written in shorter ranges is gathered instead."""
STRIDED_ROW_BYTES = 2 << 20
"""Ranks that hold columns of a tensor with shorter rows have one checksum for many rows; see [Note: strided blocks] in
`checksums`."""
COMPUTED_BYTES = 256 << 20
"""Maximum size of values that are computed at a time for a write (merged adapters); one tensor may be larger."""
FILE_BYTES = 5 * 10**9
"""Default maximum total size of the tensors in one file."""
FILE_COUNT = 32
"""The size limit of a checkpoint's files is the model's (or optimizer's) size divided by this, at most `FILE_BYTES`."""
MIN_FILE_LIMIT_BYTES = 64 << 20
"""Lower bound of that limit: a model or optimizer up to this size is one file."""
FULL_GRADIENTS_BYTES = 1 << 30
"""Trainers keep unsharded gradients of up to this size between the micro-batches of a step, and reduce them once."""
MIN_EXPORT_FILE_LIMIT_BYTES = 256 << 20
"""The lower bound for an export, whose limit is otherwise the same. Its folder is copied and uploaded: fewer files."""
COPY_BYTES = 64 << 20
"""Bytes of a tensor that are copied at a time from one folder to another."""
CONVERSION_BYTES = 256 << 20
"""Bytes of another system's checkpoint that are converted at a time."""
BROADCAST_BYTES = 32 << 20
"""Size of the buckets in which the tensors that one replica reads are broadcast to the other replicas."""

# --- host memory -----------------------------------------------------------------------------------------------------

POPULATED_BYTES = 64 << 10
"""Minimum size of new memory whose pages are allocated with one system call before a read fills it."""
STAGING_BYTES = 256 << 20
"""Size of a host buffer of an asynchronous save; a power of two, because torch rounds pinned allocations up to one."""
OFFLOAD_BYTES = 128 << 20
"""Size of a pinned buffer for offloading."""

# --- weights sent to an engine ---------------------------------------------------------------------------------------

BUCKET_BYTES = 512 << 20
"""Default size of a bucket of weights that is sent to an engine."""
LARGE_BYTES = 16 << 20
"""Tensors of at least this size are gathered alone, because the cost of one more collective is small. A remote engine
loads one batch of weights, of at least this size, while it receives the next one."""
HEADER_BYTES = 64 << 20
"""Maximum size of the header of a message between a trainer and a remote engine."""
MESSAGE_TENSORS = 1 << 16
"""Maximum number of tensors in such a message."""
COMPARED_BYTES = 8 << 20
"""Bytes of a shard, in the dtype in which it is sent, that are compared at a time with its last version."""
GATHER_BYTES = 256 << 20
"""Bytes of adapter parameters that are gathered together."""
MERGED_ROWS = 1024
"""Rows of a weight that adapters are merged into at a time."""
MERGED_EXPERTS = 8
"""Experts of a weight that adapters are merged into at a time."""

# --- values ----------------------------------------------------------------------------------------------------------

LOGITS_BYTES = 256 << 20
"""Default maximum size of the fp32 logits in memory at a time."""
CACHED_LOGITS_BYTES = 2 << 20
"""The same maximum on a CPU, if the logits are more: few enough for the cache of one core."""
FINGERPRINT_ELEMENTS = 1 << 16
"""Elements of one block of a fingerprint."""
FINGERPRINT_BLOCKS = 8
"""Maximum number of blocks of a fingerprint that are summed at a time."""
