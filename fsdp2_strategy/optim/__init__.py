"""Optimizers: parameter groups, fp32 master weights, learning-rate schedules, optimizer steps, weight averages."""
