"""Shows who computes, who sends and who waits: all ranks of a run on one clock.

The traces of torch.profiler, merged, would be less code. They do not show for which rank another one waits, have no
common clock for several machines, and give neither the table nor the picture of a report.
"""
