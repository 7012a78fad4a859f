"""Shows who computes, who sends and who waits: all ranks of a run on one clock."""
