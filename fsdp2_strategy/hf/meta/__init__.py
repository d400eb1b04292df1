"""Models without memory: meta skeletons, recorded constructors, and values for what no file holds."""
