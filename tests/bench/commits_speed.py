"""The first example by two programs, such as two commits' releases: tokens per second, and the time
that processors spent in user mode, which a neighbour's load disturbs less.

Rounds alternate, and every second one begins with the other program. A round's figure is the median
over its steps, after the first ones; ratios are the second program's over the first's, as medians
over the rounds. Both must end with the same loss, bit for bit.

    git worktree add --detach ../before 097657f
    (cd ../before && cargo build --release)
    cargo build --release
    python3 tests/bench/commits_speed.py ../before/target/release/moejob target/release/moejob

Exits with 1 below --bar. Run it on a machine that does nothing else; on another one go by the user
time, which says how much was computed and not how fast.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

from first_run_speed import ROOT, WARM_UP_STEPS, shortened


def measure(moejob, threads, steps):
    """Median tokens/s of the steps after the first ones, seconds in user mode, the last loss."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [moejob, "run", shortened(steps, folder), "--dir", folder / "runs"]
        command += ["--workers", "1", "--threads", str(threads)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        user = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        lines = (folder / "runs" / "first-run" / "metrics.jsonl").read_text().splitlines()
    reports = [json.loads(line) for line in lines]
    reports = [report for report in reports if "tokensPerSecond" in report]
    rates = [report["tokensPerSecond"] for report in reports[WARM_UP_STEPS:]]
    return statistics.median(rates), user, reports[-1]["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("before", type=pathlib.Path, help="the program to compare with")
    parser.add_argument("after", type=pathlib.Path, help="the other one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--bar", type=float, default=0.98, help="the least ratio of tokens/s")
    options = parser.parse_args()
    if options.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be above {WARM_UP_STEPS}")
    programs = [options.before.resolve(), options.after.resolve()]
    rates, users, losses = ([], []), ([], []), set()
    for index in range(options.rounds):
        for which in (0, 1) if index % 2 == 0 else (1, 0):
            rate, user, loss = measure(programs[which], options.threads, options.steps)
            rates[which].append(rate)
            users[which].append(user)
            losses.add(loss)
        print(
            f"round {index + 1}: {rates[0][-1]:.0f} and {rates[1][-1]:.0f} tokens/s, "
            f"{users[0][-1]:.1f} and {users[1][-1]:.1f} s in user mode",
            flush=True,
        )
    if len(losses) != 1:
        raise SystemExit(f"the runs ended with different losses: {sorted(losses)}")
    ratio = statistics.median(after / before for before, after in zip(*rates))
    work = statistics.median(after / before for before, after in zip(*users))
    print(f"loss {losses.pop()}")
    print(f"user time: {work:.3f} times (less is better)")
    print(f"tokens/s: {ratio:.3f} times, bar {options.bar}")
    sys.exit(0 if ratio >= options.bar else 1)


if __name__ == "__main__":
    main()
