"""How fast a mixture layer is whose experts two GPUs share out, as steps compute it.

    python3 layer.py MOEJOB [--layers 4] [--gpus 2] [--presets olmoe-1b-7b,..] [--tokens 8192]

A bench of a few layers is traced. A layer's time is that from its router to the sums of its tokens,
forward, and from the gradients' way to the experts to that of the router, backward; everything that
travels is in it. Work is 6 and 12 operations for each token, expert of it, and number of a matrix.
Medians over the layers and steps of rank 0, in milliseconds. Gradients leave for the experts of the
top layer alone; those of the others do beside products of the layer above, and are not counted.
"""
import argparse
import collections
import json
import statistics
import subprocess
import sys
import tempfile

FORWARD = ["router", "tokens travel", "experts", "sums travel"]
BACKWARD = ["gradients travel", "experts'", "experts' up'", "gradients travel back", "router'"]
# Experts of a token, width, width of an expert.
SHAPES = {
    "olmoe-1b-7b": (8, 2048, 1024),
    "qwen3-30b-a3b": (8, 2048, 768),
    "mixtral-8x7b": (2, 4096, 14336),
}


def spans(moejob, preset, args):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [moejob, "bench", "--preset", preset, "--layers", str(args.layers), "--devices",
                   str(args.gpus), "--expert-parallel", str(args.gpus), "--micro-batch",
                   str(args.tokens // 4096), "--steps", "8", "--warm-up", "3", "--routing",
                   args.routing, "--trace", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{preset}: exit code {done.returncode}\n{done.stderr[-1500:]}")
            return None, done.stdout
        return json.load(open(file.name)), done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("moejob")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--routing", default="natural")
    parser.add_argument("--presets", default=",".join(SHAPES))
    args = parser.parse_args()
    failed = False
    for preset in args.presets.split(","):
        trace, text = spans(args.moejob, preset, args)
        if trace is None:
            failed = True
            continue
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        of = collections.defaultdict(list)
        for event in events:
            if event.get("ph") != "X" or event.get("tid") != 1:
                continue
            top = event.get("args", {}).get("layer") == args.layers - 1
            if event["name"] != "gradients travel" or top:
                of[event["name"]].append(event["dur"] / 1e3)
        top_k, width, hidden = SHAPES[preset]
        work = 6 * args.tokens * top_k * width * hidden / 1e9
        for way, names, times in [("forward", FORWARD, 1), ("backward", BACKWARD, 2)]:
            parts = {name: statistics.median(of[name]) if of[name] else 0.0 for name in names}
            whole = sum(parts.values())
            rate = f"{work * times / whole:.0f} TFLOP/s a GPU" if whole else "no spans"
            told = ", ".join(f"{name} {parts[name]:.3f}" for name in names)
            print(f"{preset:<14} {way:<9}{whole:.3f} ms  {rate}  ({told})", flush=True)
        step = [line for line in text.splitlines() if line.startswith(("step", "model rate"))]
        print("   ", "; ".join(step), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
