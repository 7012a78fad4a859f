"""Names of reductions that both ends use."""

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")  # the ReduceOps that are supported
