"""What fault tolerance costs on one GPU, apart from snapshots.

    python3 tolerance.py MOEJOB [--pairs 4] [--steps 60] [--layers 4] [--accumulate 1] [--bench]

OLMoE cut to 4 layers on the text files of ./data, in short runs A B B A A B B A ...:

    off   no snapshots, no checkpoints, heartbeats every minutes, no restarts
    on    everything as a job has it without a word of its manifest

What is compared are steps between snapshots and checkpoints: the steps that either stalled, and
the one behind each, are left out and counted. What is left of the difference are heartbeats,
records, what ranks agree on a step, and the flags that a step looks at. `--bench` also measures
`moejob bench` of the same model, in whose process there is no job at all. Both train the same
steps, so their losses are the same bits.

A run takes about 20 s. Prints the medians and means of step times, run by run and of all, and
on over off. The bar is 1.005.
"""
import json
import statistics
import subprocess

import snapshots

OFF = (f"memoryEverySteps: {snapshots.NEVER}, maxRestarts: 0, heartbeatTimeout: 10m, "
       "stepTimeout: 1h")
ON = "maxRestarts: 20"


def steps_between(reports, warm_up):
    """Milliseconds of the steps that nothing stalled and that follow one such."""
    tokens = reports[0]["tokens"]
    stalled = [any(report["stalls"][part] > 0 for part in ("snapshot", "checkpoint"))
               for report in reports]
    kept = [at for at in range(warm_up, len(reports)) if not (stalled[at] or stalled[at - 1])]
    left_out = len(reports) - warm_up - len(kept)
    return [1000 * snapshots.seconds_of(reports[at], tokens) for at in kept], left_out


def tell(name, times, left_out=0):
    spread = statistics.quantiles(times, n=10)
    print(f"{name}: median {statistics.median(times):.3f} ms, mean {statistics.fmean(times):.3f}, "
          f"tenths {spread[0]:.3f} to {spread[-1]:.3f}, {len(times)} steps, {left_out} left out",
          flush=True)


def bench(args):
    """Milliseconds a step of `moejob bench`, whose tokens are random."""
    command = [args.moejob, "bench", "--preset", "olmoe-1b-7b", "--layers", str(args.layers),
               "--micro-batch", "4", "--accumulation", str(args.accumulate),
               "--warm-up", str(args.warm_up), "--steps", str(args.steps), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [1000 * seconds for seconds in json.loads(done.stdout)["secondsPerStep"]]


def main():
    parser = snapshots.arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="of a run, after --warm-up others")
    parser.add_argument("--warm-up", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=120, help="a run's limit")
    parser.add_argument("--bench", action="store_true", help="beside a process without a job")
    args = parser.parse_args()
    texts = {
        "off": snapshots.manifest(args, OFF),
        "on": snapshots.manifest(args, ON, None),
    }
    times, medians, losses = {"off": [], "on": []}, {"off": [], "on": []}, []
    for pair in range(args.pairs):
        # Whatever drifts, such as heat, meets both alike.
        for name in ("off", "on") if pair % 2 == 0 else ("on", "off"):
            reports, _ = snapshots.train(
                args.moejob, texts[name], args.warm_up + args.steps, args.seconds, name
            )
            own, left_out = steps_between(reports, args.warm_up)
            if len(own) < args.steps / 2:
                raise SystemExit(f"{name}: {len(own)} steps between snapshots: too few")
            tell(f"pair {pair + 1}, {name}", own, left_out)
            times[name] += own
            medians[name].append(statistics.median(own))
            losses.append([report["loss"] for report in reports])
    for name, own in times.items():
        tell(f"all of {name}", own)
    ratios = [on / off for on, off in zip(medians["on"], medians["off"])]
    print(f"on over off: medians of all {quotient(times, statistics.median):.4f}, "
          f"means of all {quotient(times, statistics.fmean):.4f}, "
          f"medians of pairs {', '.join(f'{ratio:.4f}' for ratio in ratios)} (bar 1.005)")
    if args.bench:
        own = bench(args)
        tell("bench, no job", own)
        over = statistics.median(times["on"]) / statistics.median(own)
        print(f"on over bench: medians {over:.4f}; a bench has random tokens, so other routing")
    shortest = min(map(len, losses))
    same = all(one[:shortest] == losses[0][:shortest] for one in losses)
    print(f"losses of {shortest} steps:", "the same bits" if same else "DIFFERENT")
    return not same


def quotient(times, of):
    return of(times["on"]) / of(times["off"])


if __name__ == "__main__":
    raise SystemExit(main())
