"""Survive: save checkpoints that are complete or not there at all, and load them with any number of ranks.

    rank 0   put shard0 ──┐           ┌── put manifest ── delete old ones ──┐
    rank 1   put shard1 ──┤ all wait  │                                     ├ save returns
    rank 2   put shard2 ──┘           └─────────────────────────────────────┘

A job of N ranks fails N times as often as one rank. It survives if, whenever a rank is killed, the storage holds a
checkpoint from which any number of ranks can continue. The manifest makes a checkpoint: until it is there, the shards
are only files.
"""

import signal
import traceback

import torch
import torch.distributed as dist

from beyond.small_job import SmallJob
from beyond.storage import State, Storage

STOPPED, FAILED = 75, 76  # exit codes of a job that ends early: start it again; look at it first (this outweighs)


def raise_together(error: OSError | None) -> None:
    """Wait for all ranks, and raise on each of them if one has an error. This code is given."""
    failed = torch.tensor(int(error is not None))
    dist.all_reduce(failed)
    if failed:
        raise error or OSError("another rank could not save its part")


def save(storage: Storage, state: State) -> None:
    """Save a checkpoint of all ranks: each rank its shards. Every rank calls it, with the same step.

    The step is later than that of every complete checkpoint in the storage. When save has returned on all ranks, load
    returns this checkpoint; after a crash at any time before, it returns this one or the one before. If the storage is
    full for one rank, save raises OSError, no rank waits for ever, and the checkpoint before can still be loaded.

    b.19 [1] Put this rank's shards under a name with step and rank. A shard can be a view, and torch.save writes all of
             the memory behind a view: put a copy. Keep an OSError for step [2].
         [2] All ranks must know that every shard is there, or that one is missing: then raise on every rank.
         [3] Rank 0 puts the manifest: what load must know to read the checkpoint, such as the number of ranks.
         [4] Delete all older checkpoints, and what an interrupted save has left. Whenever the job is killed meanwhile,
             no checkpoint may look complete that is not.
         [5] Wait until the manifest is there, or raise on every rank if putting it has failed.
    """
    # TODO(cos598d) b.19: [1] to [5] put, wait, commit, prune (about 20 lines)
    # BEGIN SOLUTION b.19
    rank, folder = dist.get_rank(), f"step{state.step:08d}"
    error = None
    try:
        storage.put(f"{folder}/shard{rank}", {name: shard.clone() for name, shard in state.shards.items()})
    except OSError as raised:
        error = raised
    raise_together(error)
    try:
        if rank == 0:
            manifest = {"ranks": dist.get_world_size(), "step": state.step, "lengths": state.lengths}
            storage.put(f"{folder}/manifest", manifest | {"data": state.data})
            old = [name for name in storage.list() if not name.startswith(f"{folder}/")]
            for name in sorted(old, key=lambda name: not name.endswith("/manifest")):  # the manifests first
                storage.delete(name)
    except OSError as raised:
        error = raised
    raise_together(error)
    # END SOLUTION b.19


def load(storage: Storage) -> State | None:
    """Return the newest complete checkpoint, cut for this number of ranks; None if there is none. Every rank calls it.

    The checkpoint may come from any number of ranks. Damaged shards are an error, and no reason to take an older one.

    b.19 [6] Find the newest checkpoint with a manifest.
         [7] Read the shards of all ranks that saved it, put them together, and remove the padding.
         [8] Pad each tensor anew for this number of ranks, and take this rank's part, as `State` describes it.
    """
    # TODO(cos598d) b.19: [6] to [8] find, read, cut (about 12 lines)
    # BEGIN SOLUTION b.19
    manifests = [name for name in storage.list() if name.endswith("/manifest")]
    if not manifests:
        return None
    manifest, folder = storage.get(manifests[-1]), manifests[-1].removesuffix("/manifest")
    parts = [storage.get(f"{folder}/shard{rank}") for rank in range(manifest["ranks"])]
    shards = {}
    for name, length in manifest["lengths"].items():
        whole = torch.cat([part[name] for part in parts])[:length]
        missing = -length % dist.get_world_size()
        padded = torch.cat([whole, whole.new_zeros(missing)])
        shards[name] = padded.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return State(manifest["step"], shards, manifest["lengths"], manifest["data"])
    # END SOLUTION b.19


def save_together(storage: Storage, state: State) -> bool:
    """Save, and return on every rank whether all ranks have saved. This code is given."""
    problem = None
    try:
        save(storage, state)
    except OSError as exception:
        problem = exception
    try:
        raise_together(problem)  # also where save raises on some ranks only
        return True
    except OSError as exception:
        traceback.print_exception(exception)
        return False


def next_examples(data: dict[str, int], count: int, batch_size: int) -> tuple[list[int], dict[str, int]]:
    """Return this rank's examples of the next batch, and the place in the data after this batch.

    data: the place before it, as in State.data: "seed", "epoch" and "position". It is the same on every rank, and does
    not change. count: the number of examples in the data set. batch_size: examples of all ranks together.

    The batches follow from seed, count and batch_size alone: with any number of ranks, and after any interruption, the
    k-th batch has the same examples. Each epoch has every example once, in an order of its own.

    b.20 [1] The order of an epoch: a permutation that depends on seed and epoch, drawn by a generator of its own.
         [2] Take batch_size examples from `position` on. At the end of an epoch, continue with the next one.
         [3] Divide them among the ranks: every rank has as many as the others, or one more or less.
    """
    # TODO(cos598d) b.20: [1] to [3] one batch for all ranks, then this rank's share (about 10 lines)
    # BEGIN SOLUTION b.20
    seed, epoch, position = data["seed"], data["epoch"], data["position"]
    batch: list[int] = []
    while len(batch) < batch_size:
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        order = torch.randperm(count, generator=generator).tolist()
        taken = order[position:][: batch_size - len(batch)]
        batch += taken
        position += len(taken)
        if position == count:
            epoch, position = epoch + 1, 0
    after = {"seed": seed, "epoch": epoch, "position": position}
    return batch[dist.get_rank() :: dist.get_world_size()], after
    # END SOLUTION b.20


class Stop:
    """Whether the job is to end: noticed on one rank, decided by all of them."""

    def __init__(self) -> None:
        """Notice SIGTERM from now on.

        b.21 [1] `asked` becomes True when this process gets SIGTERM. Nothing else happens then: the rank may be inside
                 a collective, and the other ranks know of nothing.
        """
        self.asked = False
        # TODO(cos598d) b.21: [1] note the signal (1-3 lines)
        # BEGIN SOLUTION b.21
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "asked", True))
        # END SOLUTION b.21

    def agree(self, failed: bool) -> int:
        """Return the same code on all ranks: FAILED if it `failed` on one, else STOPPED if one was asked, else 0.

        b.21 [2] Every rank calls it once in a step, and it sends one small tensor.
        """
        # TODO(cos598d) b.21: [2] one all_reduce for both questions (about 3 lines)
        # BEGIN SOLUTION b.21
        code = torch.tensor(FAILED if failed else STOPPED if self.asked else 0)
        dist.all_reduce(code, op=dist.ReduceOp.MAX)
        return int(code)
        # END SOLUTION b.21


def train(storage: Storage, job: SmallJob, steps: int, every: int) -> int:
    """Continue from the newest checkpoint up to `steps` updates, and save after each `every` of them.

    Returns the exit code, the same on all ranks: 0, STOPPED (after a signal) or FAILED.

    b.21 [3] Compute this rank's gradient: job.gradient(values, examples). If that raises, print the exception
             (traceback.print_exception), and take part in the agreement: the other ranks wait there.
         [4] Agree. If the job ends, leave the loop before the update: the state is the one of the last step.
         [5] If updates were made since the last save, save once more. Return the code, or FAILED if that save fails.
    """
    state = load(storage) or job.fresh()
    stop, code, saved = Stop(), 0, state.step
    while state.step < steps:
        examples, data = next_examples(state.data, job.count, job.batch_size)
        values = job.gather(state)  # every rank waits for every other here
        # TODO(cos598d) b.21: [3] and [4] compute, agree, leave together (about 9 lines)
        # BEGIN SOLUTION b.21
        failed = False
        try:
            gradient = job.gradient(values, examples)
        except Exception as error:  # whatever an example raises: the others wait in agree, and would wait for ever
            traceback.print_exception(error)
            failed = True
        code = stop.agree(failed)
        if code:
            break
        # END SOLUTION b.21
        job.update(state, gradient)
        state.data = data
        if state.step % every == 0:
            if not save_together(storage, state):
                return FAILED
            saved = state.step
    # TODO(cos598d) b.21: [5] save what is not saved yet, and return the code (about 3 lines)
    # BEGIN SOLUTION b.21
    if state.step > saved and not save_together(storage, state):
        return FAILED
    return code
    # END SOLUTION b.21
