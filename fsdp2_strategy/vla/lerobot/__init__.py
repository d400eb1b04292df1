"""Read data sets in LeRobot's format (v3.0), from a folder or from a server, while training."""
