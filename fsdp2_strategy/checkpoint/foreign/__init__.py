"""Recognise, read, load and export the checkpoints of other systems."""
