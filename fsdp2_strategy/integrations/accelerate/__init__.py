"""Read the configuration files of accelerate."""
