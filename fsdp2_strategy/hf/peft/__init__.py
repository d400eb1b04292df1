"""peft models: the base model with merged adapters, and files that contain only adapters."""
