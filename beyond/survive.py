"""Survive: save checkpoints that are complete or not there at all, and load them with any number of ranks.

    rank 0   put shard0 ──┐           ┌── put manifest ── delete old ones ──┐
    rank 1   put shard1 ──┤ all wait  │                                     ├ save returns
    rank 2   put shard2 ──┘           └─────────────────────────────────────┘

A job of N ranks fails N times as often as one rank. It survives if, whenever a rank is killed, the storage holds a
checkpoint from which any number of ranks can continue. The manifest makes a checkpoint: until it is there, the shards
are only files.
"""

import torch
import torch.distributed as dist

from beyond.storage import State, Storage


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
