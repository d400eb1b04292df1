"""Write data sets in LeRobot's format v3.0, for examples, tests and benchmarks; LeRobot's own package writes them, too.

`generate.DatasetWriter` writes episodes with what the other modules contain: features and their columns, videos,
statistics, and the files that episodes share.
"""

from lerobot_writer.generate import DatasetWriter

__all__ = ["DatasetWriter"]
