"""What counting pairs of tokens reaches on a recipe's held-out rows: the mark that a trained model must beat.

    python tests/bench/bigram.py [--config configs/demo.yaml]

Counts every (token, next token) of one epoch of training rows, adds one to each count, and prints the held-out loss of
single tokens and of pairs in nats a token; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from shared.config.load import load_config
from shared.data import open_data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/demo.yaml")
    config = load_config(parser.parse_args().config).config
    data = open_data(config)
    size = config.model.vocab_size
    counts = np.zeros(size * size)
    for step in range(data.steps_per_epoch):
        batch = data.batch(step)
        pairs = batch.tokens[batch.mask].astype(np.int64) * size + batch.targets[batch.mask]
        counts += np.bincount(pairs, minlength=size * size)
    counts = counts.reshape(size, size) + 1
    single = -np.log(counts.sum(0) / counts.sum())
    pair = -np.log(counts / counts.sum(1, keepdims=True))
    losses, tokens = np.zeros(2), 0
    for batch in data.held_out_batches(config.evaluation.max_rows):
        before, after = batch.tokens[batch.mask], batch.targets[batch.mask]
        losses += single[after].sum(), pair[before, after].sum()
        tokens += len(after)
    result = {"unigram": round(losses[0] / tokens, 3), "bigram": round(losses[1] / tokens, 3)}
    print(f"held-out nats a token: {result['unigram']} counting tokens, {result['bigram']} counting pairs")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
