"""Keep the frames of a thread, as a debugger or a profiler does."""

import sys
import threading
from collections import deque
from contextlib import contextmanager


@contextmanager
def keeping_frames():
    """Keep frames of all threads within the block, and what their locals refer to; give a function to call in it.

    The function releases all but the last frames. The thread does not, because a backward of torch 2.13 has crashed
    while another thread released tensors of its graph.
    """
    ended, kept = threading.Event(), deque()

    def release():
        while len(kept) > 6000:
            kept.popleft()

    def keep(frame):
        while frame is not None:
            kept.append(frame)
            frame = frame.f_back

    def look():
        while not ended.wait(0.001):
            frames = sys._current_frames()
            del frames[threading.get_ident()]
            for frame in frames.values():
                keep(frame)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield release
    finally:
        ended.set()
        thread.join()
        kept.clear()
