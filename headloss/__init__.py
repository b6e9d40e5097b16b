"""headloss: from hidden states to a loss, with the softmax read once.

One sweep over the vocabulary yields a handful of facts about every row; every loss and metric is plain PyTorch on those
facts; autograd on small vectors gives the coefficients; one more sweep writes the combined gradient.
"""

from typing import TYPE_CHECKING

from headloss import losses
from headloss import row_weights as row_weights
from headloss.checks.verify import Verification, verify
from headloss.engine.layout import PerRow, PerSegment, Whole
from headloss.labels import shift_labels
from headloss.meter import Meter
from headloss.metrics import Metric
from headloss.module import FusedLMHead, Inputs
from headloss.objective import Objective, row_facts, topk
from headloss.parallel.shard import VocabShard
from headloss.prepared import Prepared, prepare
from headloss.record import Facts, Grads, Output
from headloss.reductions import count
from headloss.routed import Routed
from headloss.segments import Segments
from headloss.sources import Linear, Logits, Sparse
from headloss.support import Support
from headloss.term import Term

__version__ = "0.1.0"


if TYPE_CHECKING:
    from headloss.head_parallel import HeadParallel
else:

    def __getattr__(name: str) -> object:
        if name == "HeadParallel":  # loads DTensor, which a plain import should not
            from headloss.head_parallel import HeadParallel

            return HeadParallel
        raise AttributeError(f"module 'headloss' has no attribute {name!r}")


__all__ = [
    "Facts",
    "FusedLMHead",
    "Grads",
    "HeadParallel",
    "Inputs",
    "Linear",
    "Logits",
    "Meter",
    "Metric",
    "Objective",
    "Output",
    "PerRow",
    "PerSegment",
    "Prepared",
    "Routed",
    "Segments",
    "Sparse",
    "Support",
    "Term",
    "Verification",
    "VocabShard",
    "Whole",
    "count",
    "losses",
    "prepare",
    "row_facts",
    "shift_labels",
    "topk",
    "verify",
]
