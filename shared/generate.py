"""The command line and the loop of ``python -m jaxtrain.generate`` and ``python -m torchtrain.generate``.

A backend reads tokens and gives logits; which token comes next is decided here, in float64, so that both backends go
on alike: greedily, or at a temperature by drawing from one stream of random numbers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared.arguments import Parser, exit_status

if TYPE_CHECKING:
    import numpy as np

    from shared.backend import Decoder, Framework
    from shared.data.tokenizers import Tokenizer

Choose = Callable[["np.ndarray"], int]
"""The next token from its logits, float64 [V]."""


def main(argv: Sequence[str], framework: Framework) -> int:
    """Run the command; returns the exit status."""
    return exit_status(lambda: _generate(_parse(argv, framework), framework))


def _parse(argv: Sequence[str], framework: Framework) -> argparse.Namespace:
    package = f"{framework.name}train"
    parser = Parser(
        prog=f"python -m {package}.generate",
        description="Let a trained model continue a text.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help=f"run directory of {package}")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what it continues")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to use (default: the newest)")
    parser.add_argument("--max-tokens", type=int, default=100, metavar="N", help="length to add (default: 100)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0: always the likeliest token (default); above: drawn from softmax(logits / T)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    return parser.parse_args(argv)


def _generate(arguments: argparse.Namespace, framework: Framework) -> int:
    import math

    from shared.data.tokenizers import open_tokenizer
    from shared.errors import UserError
    from shared.stored_run import evaluated_role, open_stored_run

    if arguments.max_tokens < 1:
        raise UserError(f"--max-tokens must be at least 1, not {arguments.max_tokens}")
    if not 0.0 <= arguments.temperature < math.inf:
        raise UserError(f"--temperature must be 0 or above, not {arguments.temperature:g}")
    if arguments.seed < 0:
        raise UserError(f"--seed must be 0 or above, not {arguments.seed}")
    run = open_stored_run(arguments.run, arguments.step, framework)
    tokenizer = open_tokenizer(run.config.data.tokenizer)
    (prompt,) = tokenizer.encode_batch([arguments.prompt])
    if not len(prompt):
        raise UserError("--prompt holds no token; give at least a word")
    if max(prompt) >= run.spec.vocab_size:
        raise UserError(
            f"--prompt has the token {max(prompt)}, and the model knows {run.spec.vocab_size}: data.tokenizer is not "
            "the one that it was trained with"
        )
    length = len(prompt) + arguments.max_tokens
    if run.spec.max_positions is not None and length > run.spec.max_positions:
        room = run.spec.max_positions - len(prompt)
        raise UserError(
            f"--max-tokens {arguments.max_tokens}: the prompt has {len(prompt)} tokens and the model has "
            f"{run.spec.max_positions} positions; nearest valid: {room}"
            if room > 0
            else f"--prompt has {len(prompt)} tokens, and the model has {run.spec.max_positions} positions; shorten it"
        )
    state = run.state(framework)
    decoder = framework.decoder(run.config, state, evaluated_role(state), length)
    choose = chooser(arguments.temperature, arguments.seed)

    print(arguments.prompt, end="", flush=True)
    clock = [time.perf_counter()]
    for text in continued(decoder, tokenizer, prompt, arguments.max_tokens, choose):
        print(text, end="", flush=True)
        clock.append(time.perf_counter())
    print()
    count = len(clock) - 1
    ended = ", where the text ended" if count < arguments.max_tokens else ""
    first = f"; the first after {clock[1] - clock[0]:.1f} s" if count else ""
    # The second one may have been compiled for.
    speed = f", then {(count - 2) / (clock[-1] - clock[2]):,.0f} tokens/s" if count > 2 else ""
    print(f"step {run.checkpoint.step} of {arguments.run}: {count} tokens{ended}{first}{speed}", file=sys.stderr)
    return 0


def continued(
    decoder: Decoder, tokenizer: Tokenizer, prompt: np.ndarray, max_tokens: int, choose: Choose
) -> Iterator[str]:
    """The text that each further token adds, until the text ends or there are ``max_tokens``."""
    import numpy as np

    # With some of what came before, since a tokenizer may write a token in another way where a text begins.
    before = [int(token) for token in prompt[-8:]]
    tokens: list[int] = []
    shown = tokenizer.decode(before)
    logits = decoder.extend(prompt)
    for number in range(1, max_tokens + 1):
        # A table may have more rows than the tokenizer has tokens; those were never trained.
        token = choose(logits[: tokenizer.vocab_size])
        if token == tokenizer.end_of_text:
            if rest := tokenizer.decode(before + tokens)[len(shown) :]:
                yield rest
            return
        tokens.append(token)
        text = tokenizer.decode(before + tokens)
        # A character that is not complete yet is decoded as a replacement character.
        complete = text if number == max_tokens else text.rstrip("\ufffd")
        yield complete[len(shown) :]
        shown = max(shown, complete, key=len)
        if number < max_tokens:
            logits = decoder.extend(np.array([token]))


def chooser(temperature: float, seed: int) -> Choose:
    """How the next token is chosen: the likeliest, of equals the first; or drawn at that temperature."""
    import numpy as np

    if temperature == 0.0:
        return lambda logits: int(np.argmax(logits))
    draws = np.random.Generator(np.random.Philox(key=seed))

    def draw(logits: np.ndarray) -> int:
        weights = np.exp((logits - np.max(logits)) / temperature)
        bounds = np.cumsum(weights)
        return int(np.searchsorted(bounds, draws.random() * bounds[-1], side="right"))

    return draw
