"""Hugging Face directories through `moejob` and back, held against `transformers`.

    python roundtrip.py PATH_OF_MOEJOB [--random COUNT] [--seed N]

For each family, float type and layout: `save_pretrained` -> `moejob checkpoint import` ->
`moejob checkpoint export` -> `AutoModelForCausalLM.from_pretrained`, without remote code. Tensors
must come back bit for bit, logits within 1e-5, and `moejob eval` must find the loss that
`transformers` finds. `--random` takes COUNT models of random shapes of each family. A model with a
router of sigmoids, which is trained here, has to be read by both as well.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from generate import CORRECTION, FAMILIES, random_shape
from safetensors import safe_open
from transformers import AutoModelForCausalLM

SEQUENCE, SEQUENCES = 16, 24
LOGITS_BOUND, LOSS_BOUND = 1e-5, 1e-5
CASES = [
    # float type, as published, more than one file
    ("float32", True, True),
    ("bfloat16", True, False),
    ("float16", False, False),
]


def tensors(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def unfused(named, family):
    """One tensor an expert, whatever the layout, under the published names."""
    place, letters = "mlp", ("gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        place, letters = "block_sparse_moe", ("w1", "w3", "w2")
    result = {}
    for name, value in named.items():
        head, _, last = name.rpartition(".")
        if family == "mixtral":
            head = head.replace(".mlp.", ".block_sparse_moe.")
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if not head.endswith(f"{place}.experts"):
            result[name] = value
            continue
        for expert, matrix in enumerate(value):
            parts = [matrix] if last == "down_proj" else matrix.chunk(2, dim=0)
            kinds = letters[2:] if last == "down_proj" else letters[:2]
            for kind, part in zip(kinds, parts, strict=True):
                result[f"{head}.{expert}.{kind}.weight"] = part
    return result


def random_model(shape, dtype, seed):
    make, config, _ = shape
    config = type(config)(**{**config.to_dict(), "vocab_size": 256})
    torch.manual_seed(seed)
    model = make(config)
    with torch.no_grad():
        for param in model.parameters():
            centre = 1.0 if param.ndim == 1 and param.mean() == 1.0 else 0.0
            param.copy_(centre + 0.2 * torch.randn_like(param))
        for name, buffer in model.named_buffers():
            if name.endswith(CORRECTION):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model.to(getattr(torch, dtype)).eval()


def loss_of(model, text):
    """Mean cross-entropy of all whole windows of SEQUENCE + 1 bytes, stride SEQUENCE."""
    count = (len(text) - 1) // SEQUENCE
    ids = torch.tensor(list(text))
    windows = torch.stack([ids[i * SEQUENCE : (i + 1) * SEQUENCE + 1] for i in range(count)])
    with torch.no_grad():
        logits = model(input_ids=windows[:, :-1]).logits.double()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), windows[:, 1:].flatten()
    ).item()


def call(moejob, *arguments):
    done = subprocess.run([moejob, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def load(directory):
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False, output_loading_info=True,
        # The grouped product of torch wants sizes that 4 divides.
        experts_implementation="eager",
    )
    return model.eval(), report


def case(moejob, family, shape, seed, dtype, published, several, folder):
    source, checkpoint, exported = folder / "source", folder / "checkpoint", folder / "exported"
    model = random_model(shape, dtype, seed)
    size = "5KB" if several else "1GB"
    model.save_pretrained(source, max_shard_size=size, save_original_format=published)
    files = len(list(source.glob("*.safetensors")))
    assert (files > 1) == several, f"{family}: {files} files"
    call(moejob, "checkpoint", "import", source, checkpoint)
    call(moejob, "checkpoint", "verify", checkpoint / "step-00000000")
    call(moejob, "checkpoint", "export", checkpoint, exported)
    before, after = unfused(tensors(source), family), tensors(exported)
    assert before.keys() == after.keys(), f"{family}: {before.keys() ^ after.keys()}"
    for name, value in before.items():
        same = value.dtype == after[name].dtype and torch.equal(value, after[name])
        assert same, f"{family}: {name} came back differently"
    again, report = load(exported)
    wrong = {key: value for key, value in report.items() if value}
    assert not wrong, f"{family}: {wrong}"
    # A model that was cast has cast its rotary frequencies too: it is read anew.
    wide = load(source)[0]
    text = bytes(torch.randint(0, 256, (SEQUENCE * SEQUENCES + 5,)).tolist())
    ids = torch.tensor(list(text[: SEQUENCE * 4])).view(4, SEQUENCE)
    with torch.no_grad():
        expected, found = wide(input_ids=ids).logits, again(input_ids=ids).logits
    error = ((expected - found).abs().max() / expected.abs().max()).item()
    assert error <= LOGITS_BOUND, f"{family}: logits differ by {error:.1e}"
    data = folder / "data.txt"
    data.write_bytes(text)
    for weights in (source, checkpoint, exported):
        options = ["--data", data, "--sequence-length", SEQUENCE, "--tokenizer", "bytes", "--json"]
        measured = json.loads(call(moejob, "eval", weights, *options))
        assert measured["tokens"] == SEQUENCE * SEQUENCES, measured
        gap = abs(measured["loss"] - loss_of(wide, text))
        assert gap <= LOSS_BOUND, f"{family}: {weights.name}: the loss differs by {gap:.1e}"
    print(f"{family} {dtype}: {files} files, logits {error:.1e}, loss {gap:.1e}", file=sys.stderr)


SIGMOID = """apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: sigmoid }
spec:
  nodes: { profile: cpu }
  model:
    hiddenSize: 32
    numHiddenLayers: 2
    numAttentionHeads: 2
    initializerRange: 0.2
    experts: { count: 4, perToken: 2, intermediateSize: 32 }
    router: { scoring: sigmoid }
  data: { train: { text: { paths: ["DATA"] } }, sequenceLength: 16 }
  training: { steps: 5, globalBatchSize: 4 }
"""


def trained(moejob, folder):
    """A router that no family has alone: nothing is missing, and the loss is that of the run."""
    text = bytes(torch.randint(0, 128, (SEQUENCE * SEQUENCES + 5,)).tolist())
    data, exported = folder / "data.txt", folder / "exported"
    data.write_bytes(text)
    (folder / "job.yaml").write_text(SIGMOID.replace("DATA", str(data)))
    call(moejob, "run", folder / "job.yaml", "--dir", folder)
    call(moejob, "checkpoint", "export", folder / "sigmoid", exported)
    call(moejob, "checkpoint", "import", exported, folder / "imported")
    model, report = load(exported)
    wrong = {key: value for key, value in report.items() if value}
    assert not wrong, f"sigmoid: {wrong}"
    for weights in ("sigmoid", "exported", "imported"):
        options = ["--data", data, "--sequence-length", SEQUENCE, "--tokenizer", "bytes", "--json"]
        measured = json.loads(call(moejob, "eval", folder / weights, *options))
        gap = abs(measured["loss"] - loss_of(model, text))
        assert gap <= LOSS_BOUND, f"sigmoid: {weights}: the loss differs by {gap:.1e}"
    print(f"sigmoid without correction: nothing missing, loss {gap:.1e}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("moejob", type=pathlib.Path)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    moejob = str(options.moejob.resolve())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trained(moejob, pathlib.Path(folder))
    for family, fixed in FAMILIES.items():
        numbers = range(options.seed, options.seed + options.random)
        shapes = [(random_shape(family, n)[0], n) for n in numbers] or [(fixed, options.seed)]
        for shape, seed in shapes:
            for dtype, published, several in CASES:
                with tempfile.TemporaryDirectory() as folder:
                    at = pathlib.Path(folder)
                    case(moejob, family, shape, seed, dtype, published, several, at)


if __name__ == "__main__":
    main()
