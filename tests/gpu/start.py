"""How long `moejob run` takes to the first step of a small model on one GPU or on several.

    python3 start.py MOEJOB [--devices 1] [--rounds 5]

First with an empty cache of compiled kernels, then with the one that this has left.
"""
import argparse
import os
import pathlib
import signal
import statistics
import subprocess
import tempfile
import time

MANIFEST = """
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: {{ name: start }}
spec:
  nodes: {{ profile: {profile}, min: 1, max: 1, devicesPerNode: {devices} }}
  parallelism: {{ expert: {devices} }}
  model:
    hiddenSize: 256
    numHiddenLayers: 4
    numAttentionHeads: 4
    experts: {{ count: 16, perToken: 4, intermediateSize: 128 }}
    router: {{ auxLossCoef: 0.01 }}
  data:
    train: {{ text: {{ paths: ["**/*.txt"] }} }}
    tokenizer: bytes
    sequenceLength: 256
  training:
    steps: 1000000
    globalBatchSize: 8
    microBatchSize: 4
    precision: {precision}
    optimizer: {{ adamw: {{ learningRate: 4.0e-4 }} }}
"""


def first_step(args, cache):
    """Seconds from the command to the first line of metrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        precision = "bf16" if args.profile == "gpu" else "fp32"
        text = MANIFEST.format(devices=args.devices, profile=args.profile, precision=precision)
        (folder / "start.yaml").write_text(text)
        command = [args.moejob, "run", folder / "start.yaml", "--dir", folder]
        where = dict(os.environ, MOEJOB_CUBIN_CACHE=cache)
        began = time.monotonic()
        with open(folder / "log", "wb") as log:
            job = subprocess.Popen(
                command, stdout=log, stderr=log, cwd="data", env=where, start_new_session=True
            )
        metrics = folder / "start/metrics.jsonl"
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if job.poll() is not None or time.monotonic() - began > 120:
                    raise SystemExit((folder / "log").read_text()[-3000:])
                time.sleep(0.002)
            return time.monotonic() - began
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("moejob", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", default="gpu", help="cpu: to try this script")
    args = parser.parse_args()
    os.chdir(pathlib.Path(__file__).parent)
    with tempfile.TemporaryDirectory() as cache:
        cold = first_step(args, cache)
        warm = [first_step(args, cache) for _ in range(args.rounds)]
    print(f"first step on {args.devices} device(s): {cold:.2f} s cold, then "
          f"{statistics.median(warm):.2f} s ({min(warm):.2f} to {max(warm):.2f} of {args.rounds})")


if __name__ == "__main__":
    main()
