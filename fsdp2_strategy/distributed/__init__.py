"""The process group, device meshes, and collectives that make errors and values the same on all ranks."""
