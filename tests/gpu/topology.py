#!/usr/bin/env python3
"""Compares what lies above each GPU in NCCL's topology files: ours, and NCCL's own dumps with and
without it. `topology.py OURS WITH WITHOUT`; exits with 1 where a GPU's parents differ. Of a GPU
that ours does not tell of, they are to be those that NCCL finds by itself."""

import sys
import xml.etree.ElementTree as tree


def parents(path):
    """Of each GPU by its address: its NUMA node, and the switches above it from the top down."""
    found = {}

    def walk(node, above):
        for child in node:
            name = child.get("busid") or child.get("numaid")
            if child.tag == "pci" and child.get("class", "").startswith("0x03"):
                found[child.get("busid")] = above
            elif child.tag in ("cpu", "pci"):
                walk(child, above + [name])

    walk(tree.parse(path).getroot(), [])
    return found


def main(ours, with_it, without):
    mine, dumped, alone = parents(ours), parents(with_it), parents(without)
    wrong = 0
    for gpu, above in sorted(dumped.items()):
        written = mine.get(gpu)
        same = above == (alone.get(gpu) if written is None else written)
        wrong += not same
        print(f"{gpu}: ours {written}, NCCL's with it {above}, without it {alone.get(gpu)}",
              "" if same else "DIFFERS")
    if not dumped:
        print("NCCL's dump has no GPU")
    return 1 if wrong or not dumped else 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
