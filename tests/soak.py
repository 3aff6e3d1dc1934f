"""Many random programs, on two processes: `make soak`.

make soak ARGS="--start 500"             # from seed 500 on: to resume
make soak ARGS="--start 37 --count 1"    # one program: what it is, and what is wrong
"""

import argparse
import itertools
import multiprocessing
import time
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor

import conftest  # noqa: F401  (XLA's settings: before anything starts its backend)
from random_programs import check_program, make_program

EVERY = 25  # programs between two lines of progress


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description="Checks many random programs.")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--processes", type=int, default=2, help="how many at once")
    options = parser.parse_args()
    if options.count == 1:
        return show(options.start)
    seeds = range(options.start, options.start + options.count)
    wrong = soak(seeds, options.processes)
    print(f"{len(seeds) - wrong} of {len(seeds)} right")
    return 1 if wrong else 0


def soak(seeds: range, processes: int) -> int:
    """How many are wrong. Says which, and why, as soon as that is known."""
    began, wrong = time.monotonic(), 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        results = zip(seeds, pool.map(reason, seeds), strict=True)
        for done, (seed, why) in zip(itertools.count(1), results):
            if why:
                wrong += 1
                again = f'make soak ARGS="--start {seed} --count 1"'
                print(f"seed {seed}: {why}\n  again: {again}", flush=True)
            if done % EVERY == 0:
                seconds = time.monotonic() - began
                print(f"seeds to {seed}: {wrong} wrong, {seconds:.0f} s", flush=True)
    return wrong


def reason(seed: int) -> str:
    """Why the library is wrong about a program, in one line; empty if it is right."""
    try:
        check(seed)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return first if isinstance(error, AssertionError) else f"{type(error).__name__}: {first}"
    return ""


def show(seed: int) -> int:
    print(make_program(seed).description, flush=True)
    try:
        check(seed)
    except Exception:
        traceback.print_exc()
        return 1
    print("1 of 1 right")
    return 0


def check(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as in the tests
        check_program(seed)


if __name__ == "__main__":
    raise SystemExit(main())
