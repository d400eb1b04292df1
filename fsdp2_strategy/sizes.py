"""All size thresholds of the package, so that tests can lower them and cross each one with small tensors.

Read them as ``sizes.X`` at the time of use; a ``from … import`` or a default argument would keep an old value. Files do
not depend on them: checksum manifests record their block size, and so do the fingerprints of weights that a checkpoint
leaves out. Both ends of a remote connection need the same ``HEADER_BYTES``.
"""

from __future__ import annotations

# --- files -----------------------------------------------------------------------------------------------------------

BLOCK_BYTES = 16 << 20
"""Maximum size of a block of a file: a block has one checksum, and one thread reads or writes it at a time."""
CACHED_BYTES = 256 << 10
"""Bytes that are hashed and then written, or read and then hashed, while they are in the processor's cache."""
SMALL_WRITE_BYTES = 256 << 10
"""Tensors up to this size are copied into one buffer with their neighbours and written together."""
SCRATCH_BYTES = 8 << 20
"""Maximum file range that is read at once to extract a strided view from it."""
SMALL_READ_BYTES = 64 << 10
"""Maximum file range that is read at once if less than half of its bytes are needed."""
SHORT_READ_BYTES = 4 << 10
"""File ranges shorter than this are read together with the gaps between them."""
SHORTEST_RUN_BYTES = 4 << 10
"""Minimum file range to write; a tensor whose shards would be written in shorter ranges is gathered instead."""
COMPUTED_BYTES = 256 << 20
"""Maximum size of computed values that are kept at a time during a write, unless one tensor is larger."""
FILE_BYTES = 5 * 10**9
"""Default maximum size of the tensors in one file."""
FILE_COUNT = 32
"""The size limit of a checkpoint's files is the size of the model (or optimizer) divided by this number."""
MIN_FILE_LIMIT_BYTES = 64 << 20
"""Lower bound of that limit: a model or optimizer up to this size is one file."""
COPY_BYTES = 64 << 20
"""Bytes of a tensor that are copied at a time from one folder to another."""
CONVERSION_BYTES = 256 << 20
"""Bytes of another system's checkpoint that are converted at a time."""
BROADCAST_BYTES = 32 << 20
"""Bucket size for broadcasting the tensors that one replica has read to the other replicas."""

# --- host memory -----------------------------------------------------------------------------------------------------

STAGING_BYTES = 256 << 20
"""Size of a host buffer of an asynchronous save; a power of two, because pinned memory is allocated in those."""
OFFLOAD_BYTES = 128 << 20
"""Size of a pinned buffer for offloading."""

# --- weights sent to an engine ---------------------------------------------------------------------------------------

BUCKET_BYTES = 512 << 20
"""Default size of a bucket of weights that is sent to an engine."""
LARGE_BYTES = 16 << 20
"""Tensors of at least this size are gathered alone, because the cost of one more collective is small. A remote engine
receives weights of this size together while it uses those before them."""
HEADER_BYTES = 64 << 20
"""Maximum size of a message's header."""
GATHER_BYTES = 256 << 20
"""Bytes of adapter parameters that are gathered together."""
MERGED_ROWS = 1024
"""Rows of a weight that adapters are merged into at a time."""
MERGED_EXPERTS = 8
"""Experts of a weight that adapters are merged into at a time."""

# --- values ----------------------------------------------------------------------------------------------------------

LOGITS_BYTES = 256 << 20
"""Default size of the fp32 logits that exist at a time."""
FINGERPRINT_ELEMENTS = 1 << 16
"""Elements of one block of a fingerprint."""
FINGERPRINT_BLOCKS = 8
"""Blocks of a fingerprint that are summed at a time."""
