"""The toys that sharded optimizers are judged on: their blocks, and which rank uses which parameters in which order."""

from dataclasses import replace

from grader.checks.beyond.sharded_optimizer.sharded_run import OptimizerSetting

# The root (5, 6) is used first and last. Buckets: 4 3 | 0 2 1 | 6 5; 17, 28 and 17 elements, so some shards are padded.
PLAIN = OptimizerSetting(
    shapes=[[3, 4], [4], [2, 3, 2], [5], [4, 3], [7], [2, 5]],
    blocks=[[0, 1, 2], [3, 4]],
    uses=[[[[5, 0, 1, 2, 3, 4, 6]]]],
)
# Rank 2 is one gradient behind the others: a hook that waits for what it has just sent never returns.
LATE = replace(PLAIN, late=2)
# On ranks above 0 the second bucket is complete first, and must wait for the first. All have one size.
CROSSED = replace(
    PLAIN,
    shapes=[[4]] * 6,
    blocks=[[0, 1], [2, 3], [4, 5]],
    uses=[[[[0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3]]]],
)
# 0 is tied, in no block, used first and last; 6 is in two blocks; 3 and 9 are frozen; 5 is never used, block 3 in some
# steps, and 4 by some ranks. Block 4 has nothing to train.
ODD = OptimizerSetting(
    shapes=[[4, 3], [4], [2, 2], [5], [3, 5], [6], [7], [3, 3], [2, 2], [3]],
    blocks=[[1, 2], [3, 4, 5, 6], [6, 7], [8], [9]],
    uses=[
        [[[0, 1, 2, 3, 4, 6, 7, 8, 0], [0, 1, 2, 6, 7, 8, 0]]],
        [[[0, 2, 1, 6, 9, 7, 6, 0], [0, 1, 4, 6, 7, 2, 0]]],
        [[[6, 1, 0], [2, 4, 8, 1, 0]]],
    ],
    frozen=[3, 9],
    tied=0,
)
# A bucket of 2.6 MB, in which a shard begins and ends inside a matrix, beside some bytes.
LARGE = OptimizerSetting(shapes=[[3], [640, 1024], [5]], blocks=[[0, 1]], uses=[[[[2, 0, 1]]]])
# One block in bfloat16: its sum over the ranks, and over two micro-batches, needs float32.
HALF = OptimizerSetting(
    shapes=[[6, 4], [9], [5], [3, 4]],
    blocks=[[0, 1], [2, 3]],
    uses=[[[[0, 1, 2, 3]], [[0, 1, 3, 2]]], [[[0, 1, 2, 3]]]],
    dtypes=["bfloat16", "bfloat16", "float32", "float32"],
)
# Three micro-batches, then two: in the second step nothing of the first may be left.
ACCUMULATED = replace(
    PLAIN,
    uses=[
        [[[5, 0, 1, 2, 3, 4, 6]], [[5, 0, 1, 2, 3, 4, 6]], [[5, 3, 4, 2, 1, 0, 6]]],
        [[[5, 0, 1, 2, 3, 4, 6]], [[5, 0, 1, 3, 4, 6], [5, 2, 1, 3, 4, 6]]],
    ],
)
ACCUMULATED_1 = replace(ACCUMULATED, stage=1)
MEAN = ((3, PLAIN), (2, LARGE), (4, ODD), (1, PLAIN), (2, ODD), (3, replace(ODD, stage=1)))
ADDED_UP = ((3, ACCUMULATED), (2, ACCUMULATED_1), (3, HALF))
COUNTED = ((3, PLAIN), (2, LARGE), (4, ODD), (2, ACCUMULATED_1), (3, HALF))
SENT = ((3, PLAIN), (3, LATE), (3, CROSSED), (3, ACCUMULATED), (2, ACCUMULATED_1), (4, ODD))


def adamw(setting: OptimizerSetting, limits: list[float | None]) -> OptimizerSetting:
    """The same setting, trained by AdamW with weight decay."""
    options = {"lr": 0.05, "betas": [0.8, 0.9], "eps": 1e-3}
    return replace(setting, optimizer="AdamW", options=options, weight_decay=0.3, limits=limits)


MOMENTUM = {"lr": 0.1, "momentum": 0.9}
TRAINED = (
    (3, adamw(ODD, [4.0, None, 6.0])),
    (2, replace(ACCUMULATED, options=MOMENTUM, weight_decay=0.2, limits=[5.0, None])),
    (4, adamw(ACCUMULATED_1, [None, 3.0])),
    (2, adamw(HALF, [None, 5.0])),
    (1, adamw(PLAIN, [3.0])),
)
GATHERED = (3, replace(LARGE, options=MOMENTUM))
