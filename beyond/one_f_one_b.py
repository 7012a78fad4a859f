"""1F1B: a pipeline schedule in which each stage starts its backwards as early as it can, and keeps fewer activations.

Four micro-batches on three stages; F0 is the forward of micro-batch 0, B0 its backward:

    GPipe    stage 0   F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3     4 micro-batches alive on every stage
             stage 1   .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
             stage 2   .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    1F1B     stage 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3     at most 3 alive
             stage 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..     at most 2
             stage 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..     at most 1

A micro-batch is alive on a stage from its forward to its backward: during this time, the stage keeps its activations.
Both schedules have the same bubble, (stages - 1) / (micro-batches + stages - 1). But GPipe keeps all M micro-batches
alive, 1F1B at most `stages - stage`, no matter how large M is.

Sources: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021 (PipeDream-Flush); Fan et al.,
"DAPPLE", PPoPP 2021. The name 1F1B is from PipeDream (SOSP 2019), which does not wait at the end of a step and has no
bubble. There, a backward may meet newer weights than its forward. So each stage keeps several versions of its weights.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """One piece of work of a stage: "forward" or "backward" of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def gpipe(micro_batches: int, stages: int, stage: int) -> list[Action]:
    """Return GPipe's order, to compare with: all forwards, then all backwards. It is the same for every stage.

    The backwards run in the order of the forwards, as in torch's ScheduleGPipe; the paper draws the last one first.
    """
    forwards = [Action("forward", i) for i in range(micro_batches)]
    return [*forwards, *(Action("backward", i) for i in range(micro_batches))]


def one_f_one_b(micro_batches: int, stages: int, stage: int) -> list[Action]:
    """Return everything that `stage` does in a step, in order: a forward and a backward of every micro-batch.

    micro_batches, stages: at least 1. stage: 0 is the first one, which has the embeddings.

    b.13 [1] Warm-up: the last stage has none. Each earlier stage first runs one more forward than the stage after it,
             but at most as many as there are micro-batches.
         [2] Then run one forward, one backward, one forward, one backward, ... until all forwards are done.
         [3] Then run the remaining backwards.
    Micro-batches are taken in order, forwards and backwards alike. At most `stages - stage` are alive at any time.
    """
    # TODO(cos598d) b.13: [1] to [3] list the warm-up, the alternating part and the rest (about 8 lines)
    # BEGIN SOLUTION b.13
    warm_up = min(stages - stage - 1, micro_batches)
    actions = [Action("forward", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        actions += [Action("forward", warm_up + i), Action("backward", i)]
    actions += [Action("backward", i) for i in range(micro_batches - warm_up, micro_batches)]
    return actions
    # END SOLUTION b.13
