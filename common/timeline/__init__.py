"""Who computes, who sends, who waits: all ranks of a run on one clock."""
