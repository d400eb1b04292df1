"""Move bytes between files and shards of any model: the safetensors format, regions, checksums, reads and writes."""
