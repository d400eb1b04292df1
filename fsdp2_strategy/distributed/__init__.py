"""Ranks: the process group, meshes of ranks, and collectives that agree on errors and values."""
