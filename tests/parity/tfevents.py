"""What TensorBoard reads of `moejob run --tfevents` is what metrics.jsonl says.

    python tfevents.py PROGRAM
"""

import json
import pathlib
import struct
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAGS = {
    "loss/train": "loss",
    "loss/validation": "validationLoss",
    "train/learningRate": "learningRate",
    "train/gradNorm": "gradNorm",
    "speed/tokensPerSecond": "tokensPerSecond",
    "speed/worldSize": "worldSize",
    "router/expertImbalance": "expertImbalance",
}

MANIFEST = """\
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: drawn }
spec:
  nodes: { profile: cpu, min: 1, max: 1 }
  model:
    hiddenSize: 16
    numHiddenLayers: 2
    numAttentionHeads: 2
    experts: { count: 4, perToken: 2, intermediateSize: 16 }
  data:
    train: { text: { paths: ['words/*.txt'] } }
    validation: { fraction: 0.2, everySteps: 3 }
    sequenceLength: 32
  training: { steps: 7, globalBatchSize: 4 }
"""


def single(value):
    """As a float of 32 bits."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "words").mkdir()
        for index in range(10):
            text = " ".join(str(number * number + index) for number in range(300))
            (folder / "words" / f"{index}.txt").write_text(text)
        (folder / "job.yaml").write_text(MANIFEST)
        # The second run goes on, in a file of its own.
        for steps in (5, 7):
            command = [program, "run", "job.yaml", "--tfevents", "--set", f"training.steps={steps}"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        run = folder / "runs" / "drawn"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        read = EventAccumulator(str(run), size_guidance={"scalars": 0})
        read.Reload()
        for tag, field in TAGS.items():
            expected = [(line["step"], single(line[field])) for line in lines if field in line]
            found = [(event.step, event.value) for event in read.Scalars(tag)]
            assert found == expected, f"{tag}: {found} is not {expected}"
            assert found, f"{tag}: nothing"
    print(f"tfevents: {len(TAGS)} series of {len(lines)} steps", file=sys.stderr)


if __name__ == "__main__":
    main()
