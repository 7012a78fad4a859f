"""The table of all frameworks on 1, 2 and 4 workers: speed-up, throughput, times, validation loss and perplexity.

    python -m benchmark.frameworks                                                  # gpt2-tiny, all strategies
    python -m benchmark.frameworks --models gpt2 --workers 1,2,4,8 -- --precision bf16

Every run takes the same steps over the same examples: --examples_per_step is divided among the workers. So validation
losses must agree, whatever the framework and however many workers, and what differs is time. A worker uses one CPU
thread unless OMP_NUM_THREADS is set; otherwise a single worker would use all cores and look as fast as several: the
row `single all cores` does. `ddp again` is a second launch of ddp; by how much they differ is the table's own error.

The runs are those of benchmark.sweep: existing results are skipped. Flags behind a lone -- go to
benchmark.run. Writes frameworks.csv, frameworks.md and figures to --output_dir.
"""

from functools import partial

from benchmark.sweep import main
from common.errors import exit_on_input_error
from common.paths import ROOT

FOLDER = str(ROOT / "runs/benchmark/frameworks")
DEFAULTS = "--strategies all --workers 1,2,4 --examples_per_step 16 --steps 24 --output_dir".split(" ") + [FOLDER]

if __name__ == "__main__":
    exit_on_input_error(partial(main, "frameworks", __doc__, DEFAULTS))
