"""Loads what `moejob checkpoint export` has written, and lets it go on with a text.

    python load.py FOLDER PROMPT [--max-tokens N]

It always takes the likeliest token, as `moejob generate --temperature 0` does. It needs torch,
transformers and safetensors.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=60)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    ids = tokenizer(options.prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(options.max_tokens):
            likeliest = model(input_ids=ids).logits[:, -1].argmax(dim=-1, keepdim=True)
            ids = torch.cat([ids, likeliest], dim=1)
    print(tokenizer.decode(ids[0]))


if __name__ == "__main__":
    main()
