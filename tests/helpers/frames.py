"""Keep the frames of a thread, as a debugger or a profiler does."""

import threading
from collections import deque
from contextlib import contextmanager

from fsdp2_strategy.distributed.torch_internals import look_at_threads


@contextmanager
def keeping_frames():
    """Keep the last frames of all threads within the block, and what their locals refer to."""
    ended, kept = threading.Event(), deque(maxlen=6000)

    def keep(frame):
        while frame is not None:
            kept.append(frame)
            frame = frame.f_back

    def look():
        while not ended.wait(0.001):
            look_at_threads(keep)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        kept.clear()
