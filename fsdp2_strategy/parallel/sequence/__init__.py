"""Divide sequences over ranks."""
