"""What several test modules use: ranks, models, the unsharded reference, runs of a few steps, crashes."""
