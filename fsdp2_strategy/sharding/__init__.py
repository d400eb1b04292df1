"""Sharding: a model and class names become a plan, and the plan becomes units of `fully_shard`."""
