"""Other systems that this package serves; each has its settings, layout and loop."""
