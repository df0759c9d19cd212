"""How long the GPU idles between the kernels of training steps.

    python3 gaps.py PROGRAM ARGUMENT ...      for example ./moejob bench --preset olmoe-1b-7b
    python3 gaps.py --read FILE

Needs CUPTI and a C compiler (see gaps.c). Steps are told apart by the kernel that begins each, the
embedding's lookup. The first steps are left out. Copies and kernels count as busy, of all streams.
"""
import collections
import glob
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

FIRST = "kernel embed"
SKIPPED = 3


def build(folder):
    library = folder / "libgaps.so"
    roots = ["/usr/local/cuda", *glob.glob("/usr/local/cuda-*")]
    try:
        import nvidia

        for path in nvidia.__path__:
            roots += glob.glob(f"{path}/*")
    except ImportError:
        pass
    parts = ("include", "extras/CUPTI/include")
    include = [f"-I{r}/{part}" for r in roots for part in parts if os.path.isdir(f"{r}/{part}")]
    found = [
        path for root in roots for part in ("lib64", "lib", "extras/CUPTI/lib64")
        for path in glob.glob(f"{root}/{part}/libcupti.so*")
    ]
    if not found:
        raise SystemExit("no libcupti: install CUDA's extras or the wheel nvidia-cuda-cupti")
    source = pathlib.Path(__file__).with_name("gaps.c")
    command = ["cc", "-shared", "-fPIC", "-O2", *include, source, "-o", library, found[0]]
    subprocess.run([*command, f"-Wl,-rpath,{os.path.dirname(found[0])}"], check=True)
    return library


def read(name):
    spans = []
    with open(name) as file:
        for line in file:
            kind, stream, start, end, what = line.rstrip("\n").split(" ", 4)
            spans.append((int(start), int(end), f"{kind} {what}", int(stream)))
    return sorted(spans)


def tell(spans):
    begins = [start for start, _, what, _ in spans if what == FIRST]
    # Kernels of one step that look alike follow at once; a step is longer than they.
    steps = [begins[0]] if begins else []
    for start in begins:
        if start - steps[-1] > 5_000_000:
            steps.append(start)
    if len(steps) < SKIPPED + 2:
        print(f"{len(steps)} steps alone; kernels:", sorted({what for _, _, what, _ in spans})[:60])
        return
    first, last = steps[SKIPPED], steps[-1]
    idle, busy_until, before = [], first, "the step's begin"
    time_of = collections.Counter()
    for start, end, what, _ in spans:
        if start < first or start >= last:
            continue
        if start > busy_until:
            idle.append((start - busy_until, before, what))
        if end > busy_until:
            busy_until, before = end, what
        time_of[what] += end - start
    lengths = [later - sooner for sooner, later in zip(steps[SKIPPED:], steps[SKIPPED + 1:])]
    total = sum(gap for gap, _, _ in idle)
    print(f"{len(lengths)} steps of {statistics.median(lengths) / 1e6:.2f} ms (median); idle "
          f"{100 * total / (last - first):.2f}% of the time, in {len(idle) / len(lengths):.0f} "
          f"gaps a step")
    for gap, sooner, later in sorted(idle, reverse=True)[:8]:
        print(f"  {gap / 1e3:8.1f} us between {sooner[:60]} and {later[:60]}")
    for what, time in time_of.most_common(24):
        print(f"  {time / 1e6 / len(lengths):8.2f} ms a step  {what[:110]}")


def main():
    if sys.argv[1:2] == ["--read"]:
        return tell(read(sys.argv[2]))
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        where = dict(os.environ, CUDA_INJECTION64_PATH=str(build(folder)))
        where["GAPS_FILE"] = str(folder / "spans")
        subprocess.run(sys.argv[1:], env=where, check=True)
        for file in sorted(folder.glob("spans.*")):
            spans = read(file)
            if spans:
                print(f"process {file.suffix[1:]}:")
                tell(spans)


if __name__ == "__main__":
    main()
