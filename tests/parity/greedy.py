"""What `transformers` goes on with, for worker/tests/decode.rs: tests/parity/data/greedy.json.

For each family of generate.py the 200 likeliest tokens in f64 behind a prompt, one after the
other, by the model of tests/parity/data/<family>.safetensors:

    {"versions": {..}, "families": {NAME: {"prompt": [..], "tokens": [..], "margin": X}}}

`margin` is the least difference of the two likeliest tokens' logits: sums that differ in their
last bits choose the same tokens.

    python greedy.py [--check]
"""

import argparse
import json
import pathlib
import sys

import generate
import torch
import transformers
from safetensors import safe_open
from transformers.generation import utils

TOKENS = 200
MARGIN = 1e-6
DATA = pathlib.Path(__file__).parent / "data"


def greedy(name):
    """The prompt, what follows it, and the least margin of a choice."""
    make, config, module = generate.FAMILIES[name]
    sizes = (generate.STEPS, generate.BATCH, generate.SEQUENCE)
    with safe_open(DATA / f"{name}.safetensors", "pt") as kept:
        seed = int(kept.metadata()["seed"])
        tokens, first, corrections = generate.begin(make, config, sizes, seed)
        initial = generate.logical(dict(first.named_parameters()) | corrections)
        for key, value in initial.items():
            expected = kept.get_tensor(f"initial/{key}")
            assert torch.equal(value, expected), f"{name}: {key} is not that of the file"
    # The loop of `generate` chooses among logits that it has made float32.
    with generate.wide(module), generate.wide(utils):
        torch.set_default_dtype(torch.float64)
        model = make(config).double()
        model.load_state_dict(first.state_dict())
        model.eval()
        prompt = tokens[0, :1]
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        torch.set_default_dtype(torch.float32)
    assert all(logits.dtype == torch.float64 for logits in out.logits), f"{name}: a cast was missed"
    best = [logits[0].topk(2).values for logits in out.logits]
    margin = min((first - second).item() for first, second in best)
    assert margin > MARGIN, f"{name}: two tokens are {margin:.1e} apart"
    ids = out.sequences[0].tolist()
    length = prompt.shape[1]
    return {"prompt": ids[:length], "tokens": ids[length:], "margin": margin}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = DATA / "greedy.json"
    families = {name: greedy(name) for name in generate.FAMILIES}
    if options.check:
        kept = json.loads(path.read_text())["families"]
        for name, found in families.items():
            same = all(found[key] == kept[name][key] for key in ("prompt", "tokens"))
            assert same, f"{name}: other tokens"
    else:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        path.write_text(json.dumps({"versions": versions, "families": families}) + "\n")
    for name, found in families.items():
        print(f"{name}: {TOKENS} tokens, margin {found['margin']:.1e}", file=sys.stderr)


if __name__ == "__main__":
    main()
