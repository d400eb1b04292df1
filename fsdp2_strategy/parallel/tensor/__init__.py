"""Divide layers over ranks: a plan for each layer, checked on a tiny model, and random numbers as undivided."""
