"""The toys that gradient reducers are judged on: which rank uses which parameters in which order, and the buckets."""

from dataclasses import replace

from grader.checks.beyond.reducer.overlap import ReducerSetting

# The gradients become ready as 5 4, 3 2 1, 0; in the first step buckets go by the reversed order of registration.
PLAIN = ReducerSetting(
    shapes=[[3, 4], [4], [2, 3, 2], [1], [4, 3], [5]],  # 48, 16, 48, 4, 48 and 20 bytes: two buckets are exactly full
    uses=[[[[0, 1, 2, 3, 4, 5]]]],
    bucket_bytes=68,
    buckets=[[[5, 4], [3, 2, 1], [0]]],
    finish=False,
)
# Rank 2 begins when all others have ended: a hook that waits for it never returns.
LATE = replace(PLAIN, late=[2])
# On ranks above 0 bucket 1 is complete first, and must wait for bucket 0. All have one size: a mix-up is no mismatch.
CROSSED = replace(
    PLAIN,
    shapes=[[4]] * 6,
    uses=[[[[0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3]]]],
    bucket_bytes=32,
    buckets=[[[5, 4], [3, 2], [1, 0]]],
)
TIED = ReducerSetting(  # 0 is used first and last, so it is complete at the end; 2 is frozen
    shapes=[[4, 3], [4], [5], [2, 3]],
    uses=[[[[0, 1, 2, 3, 0]]]],
    bucket_bytes=40,
    buckets=[[[3, 1], [0]]],
    frozen=[2],
    tied=0,
    finish=False,
)
MIXED = ReducerSetting(  # 2.6 MB, more than a bucket holds, beside some bytes of three dtypes
    shapes=[[3], [640, 1024], [4], [2, 3], [5]],
    uses=[[[[0, 1, 2, 3, 4]]]],
    bucket_bytes=10_000,
    buckets=[[[4], [3, 2], [1], [0]]],
    dtypes=["float32", "float32", "float64", "float64", "bfloat16"],
    finish=False,
)
TWICE = replace(PLAIN, uses=[[[[0, 1, 2, 3, 4, 5]], [[5, 3, 1, 0, 2, 4]]]])  # two micro-batches, the first without sync
ALONE = replace(PLAIN, bucket_bytes=10_000, buckets=[[[5, 4, 3, 2, 1, 0]]])
SENT = ((3, PLAIN), (4, TIED), (2, MIXED), (2, TWICE), (1, ALONE))

# 0 is tied, 3 frozen, 5 unused; 4 is used by rank 0 alone, and in the last step by the others alone.
ODD = ReducerSetting(
    shapes=[[4, 3], [4], [2, 2], [5], [3, 5], [6], [7]],
    uses=[
        [[[0, 1, 2, 3, 4, 6, 0], [0, 1, 2, 3, 6, 0]]],
        [[[0, 2, 1, 6, 4, 0], [0, 1, 6, 2, 0]]],
        [[[6, 1, 0], [2, 4, 1, 0]]],
        [[[0, 2, 1, 6, 4, 0], [0, 1, 6, 2, 0]]],
    ],
    bucket_bytes=70,
    dtypes=["float32"] * 6 + ["float64"],
    frozen=[3],
    tied=0,
    zero=[0, 2],
)
# The second step's first no_sync ends with an exception, which must not keep it from sending.
ACCUMULATED = ReducerSetting(
    shapes=[[3, 4], [4], [6], [2, 3]],
    uses=[[[[0, 1, 2, 3]], [[0, 1, 2, 3]]], [[[0, 1, 2, 3]], [[0, 2, 1, 3]], [[0, 1, 2, 3]]]],
    bucket_bytes=50,
    buckets=[[[3, 2], [1], [0]], [[3, 2], [1], [0]]],
    fails=[1],
)
# In the first step they become ready as 1 3 2 4 on rank 0 and otherwise elsewhere; 0 is not used.
SECOND_STEP = ReducerSetting(
    shapes=[[4], [4], [4], [4], [4]],
    uses=[[[[4, 2, 3, 1], [1, 2, 3, 4]]], [[[4, 2, 3, 1], [4, 2, 1, 3]]]],
    bucket_bytes=32,
    buckets=[[[4, 3], [2, 1], [0]], [[1, 3], [2, 4], [0]]],
    late=[None, 1],
)
