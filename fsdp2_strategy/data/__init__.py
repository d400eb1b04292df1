"""Which samples a rank sees, and when; knows nothing of models."""
