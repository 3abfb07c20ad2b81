"""The pool of worker processes: results, failures, time-outs, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from patience import HANG, wait_until
from workers import Pool


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_order_from_workers_that_stay():
    pool = Pool()
    try:
        first = [pool.run(divmod, [(7, 2), (9, 4)]), pool.run(os.getpid, [(), ()])]
        assert first[0] == [(3, 1), (2, 1)]
        assert pool.run(os.getpid, [(), ()]) == first[1] and len({*first[1], os.getpid()}) == 3
    finally:
        pool.close()
    assert not any(map(alive, first[1]))


def test_a_failure_is_told_with_its_traceback_and_the_next_job_gets_new_workers():
    pool = Pool()
    try:
        before = pool.run(os.getpid, [(), ()])
        with pytest.raises(AssertionError, match=r"(?s)worker 1: Traceback.*ZeroDivisionError"):
            pool.run(divmod, [(1, 1), (1, 0)])
        assert not any(map(alive, before))
        assert pool.run(divmod, [(1, 1)]) == [(1, 0)]
    finally:
        pool.close()


def test_a_job_that_hangs_is_ended():
    pool = Pool()
    try:
        (pid,) = pool.run(os.getpid, [()])
        with pytest.raises(AssertionError, match=r"no answer within 0\.5 s"):
            pool.run(time.sleep, [(600,)], timeout=0.5)
        assert not alive(pid)
    finally:
        pool.close()


def test_workers_end_with_the_process_that_started_them():
    code = """
        import os, time
        from workers import Pool
        if __name__ == "__main__":
            pool = Pool()
            print(*pool.run(os.getpid, [(), ()]), flush=True)
            pool.members[0].pipe.send((time.sleep, (600,)))
            os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1], timeout=HANG
    )
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 2
    wait_until(lambda: not any(map(alive, pids)))
