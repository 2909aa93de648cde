"""Tests that log lines are written in batches. None is lost or repeated, and warnings are written without delay."""

import io
import threading

from vcuda.logs import BatchedLines


class Stream(io.BytesIO):
    """An output stream that signals to the test when it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = threading.Event()

    def flush(self) -> None:
        self.flushed.set()


def test_a_line_is_written_by_itself() -> None:
    stream = Stream()
    BatchedLines(stream).info(b"admission")
    assert stream.flushed.wait(10)
    assert stream.getvalue() == b"admission\n"


def test_a_warning_is_written_at_once_after_the_lines_before_it() -> None:
    stream = Stream()
    lines = BatchedLines(stream)
    lines.info(b"first")
    lines.warning(b"second")
    assert stream.getvalue() == b"first\nsecond\n"


def test_every_line_of_many_threads_is_written_completely() -> None:
    stream = Stream()
    lines = BatchedLines(stream)

    def talk(who: int) -> None:
        for number in range(200):
            lines.info(f"{who} {number}".encode())

    threads = [threading.Thread(target=talk, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.flush()
    written = stream.getvalue().decode().splitlines()
    assert sorted(written) == sorted(f"{who} {number}" for who in range(8) for number in range(200))


def test_a_forked_child_leaves_its_parents_lines_to_the_parent() -> None:
    stream = Stream()
    lines = BatchedLines(stream)
    lines.start_anew()
    lines.debug(b"the parent's")
    lines.start_anew()
    lines.error(b"the child's")
    assert stream.getvalue() in (b"the child's\n", b"the parent's\nthe child's\n")
