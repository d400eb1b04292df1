"""All sizes at which the code takes another way, so that a test can shrink them and cross each one with small tensors.

They are read as ``sizes.X`` at the time of use; a ``from … import`` or a default argument would keep an old value.
Files do not depend on them: a list of checksums says how large its blocks are, and a list of weights that were left out
says how large the blocks of its fingerprints are. Two have bounds: ``PACK_BYTES`` is at least ``LARGE_BYTES``, and both
ends of a remote link have the same ``HEADER_BYTES``.
"""

from __future__ import annotations

# --- files -----------------------------------------------------------------------------------------------------------

BLOCK_BYTES = 16 << 20
"""Of a file, that one checksum is for, and that one thread writes or reads at a time."""
CACHED_BYTES = 256 << 10
"""Hashed at once, while they are still in the processor's cache from being copied, or will be."""
SMALL_WRITE_BYTES = 256 << 10
"""Of a tensor, up to which it is copied to its neighbours and written with them."""
SCRATCH_BYTES = 8 << 20
"""Of a file, read at once to pick a strided view out of them."""
SMALL_READ_BYTES = 64 << 10
"""Of a file, read at once even where less than half of them are wanted."""
SHORT_READ_BYTES = 4 << 10
"""Of one range of a file; shorter ones with gaps between them are read with what lies between."""
SHORTEST_RUN_BYTES = 4 << 10
"""Of one range of a file; a tensor whose shards would be written in shorter ones is gathered."""
COMPUTED_BYTES = 256 << 20
"""Of values that are computed to be written, and let go of together."""
FILE_BYTES = 5 * 10**9
"""Of the tensors in one file at most, where nobody names a size."""
FILES = 32
"""Files that a checkpoint's model is spread over, and its optimizer, so that ranks write to different ones."""
LEAST_FILE_BYTES = 64 << 20
"""Of the tensors in one file of a checkpoint up to which no other is begun."""
COPY_BYTES = 64 << 20
"""Of a tensor, copied at once from one folder to another."""
CONVERSION_BYTES = 256 << 20
"""Of tensors of another system's checkpoint, converted at once."""
BROADCAST_BYTES = 32 << 20
"""Of tensors that one replica has read, handed to the others at once."""

# --- host memory -----------------------------------------------------------------------------------------------------

STAGING_BYTES = 256 << 20
"""Of one slab of the copy that an asynchronous save writes; a power of two, since pinned memory is given in those."""
OFFLOAD_BYTES = 128 << 20
"""Of one slab of what travels between host and device."""

# --- weights that travel ---------------------------------------------------------------------------------------------

BUCKET_BYTES = 512 << 20
"""Of a bucket of weights on their way to an engine, where nobody names a size."""
LARGE_BYTES = 16 << 20
"""Of a tensor, from which on it travels by itself: a collective costs little beside it, and nothing is copied out."""
PACK_BYTES = 64 << 20
"""Of small tensors that travel to a remote engine together."""
HEADER_BYTES = 64 << 20
"""Of a message's header, at most."""
GATHER_BYTES = 256 << 20
"""Of adapters' parameters that are gathered together."""
MERGED_ROWS = 1024
"""Rows of a weight that adapters are merged into at once."""
MERGED_EXPERTS = 8
"""Experts of a weight that adapters are merged into at once."""

# --- values ----------------------------------------------------------------------------------------------------------

LOGITS_BYTES = 256 << 20
"""Of the fp32 logits that exist at a time, where nobody names a size."""
FINGERPRINT_ELEMENTS = 1 << 16
"""Elements of one block of a fingerprint."""
FINGERPRINT_BLOCKS = 8
"""Blocks of a fingerprint summed at once."""
