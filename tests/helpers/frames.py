"""Keep the frames of a thread, as a debugger or a profiler does."""

import threading
from collections import deque
from contextlib import contextmanager

from fsdp2_strategy.distributed.torch_internals import frames_of_threads


@contextmanager
def keeping_frames():
    """Keep the last frames of this thread within the block, and what their locals refer to."""
    ended, kept, own = threading.Event(), deque(maxlen=3000), threading.get_ident()

    def look():
        while not ended.wait(0.001):
            frame = frames_of_threads().get(own)
            while frame is not None:
                kept.append(frame)
                frame = frame.f_back

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        kept.clear()
