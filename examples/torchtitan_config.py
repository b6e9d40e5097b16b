"""torchtitan with a headloss objective: a config for its trainer, and the plan of its head, without a GPU.

    python examples/torchtitan_config.py --tokens 8192 --vocab 128256 --hidden 4096      # what the head will do

To train with it, put `llama3_with_headloss()` where torchtitan looks for configs, next to those in its
`models/llama3/config_registry.py`, and start the trainer with this name.
"""

import argparse
from typing import Any

import torch

import headloss as hl

OBJECTIVE: dict[str, Any] = {
    "terms": {"ce": "cross_entropy", "z": {"loss": "z_loss", "weight": 1e-4}},
    "metrics": ["entropy", "accuracy"],
}
MEMORY = "1GiB"


def llama3_with_headloss() -> Any:
    """torchtitan's debug model with the objective in place of its chunked cross-entropy."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from headloss.integrations.torchtitan import HeadlossLoss

    config = llama3_debugmodel()
    config.loss = HeadlossLoss.Config(objective=OBJECTIVE, memory=MEMORY)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch on one rank")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=4096)
    args = parser.parse_args()
    shape = lambda *size: torch.empty(*size, dtype=torch.bfloat16, device="meta")
    source = hl.Linear(shape(args.tokens, args.hidden), shape(args.vocab, args.hidden), memory=MEMORY)
    targets = torch.empty(args.tokens, dtype=torch.long, device="meta")
    print(hl.Objective.from_config(OBJECTIVE).explain(source, targets))
    try:
        print(f"\ntorchtitan's config: {llama3_with_headloss().loss}")
    except ImportError as error:
        print(f"\ntorchtitan is not installed ({error}); the plan above does not need it")


if __name__ == "__main__":
    main()
