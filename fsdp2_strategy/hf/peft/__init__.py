"""Models of peft: their base with adapters merged, and files of adapters alone."""
