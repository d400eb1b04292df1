"""Build models on the meta device, record their constructors, and initialise tensors that no file contains."""
