"""Judges where run_gpt2.py of task 2b averages (2b.8): in every step, and with --pytest True as well."""

from grader.checks import reference
from grader.checks.training import steps, updates
from grader.grading import Grade

CLIP = 0.05  # below the norm of any gradient here, so that clipping always shows


def check_every_step(grade: Grade) -> None:
    """In every step, on one worker and on several, the gradients are averaged once, before they are clipped; after the
    short last batch of an epoch, too."""
    updates.check_steps(steps.gpt2(grade, 3, train=5, batch=2, n_epochs=1), 3)
    clipped = steps.gpt2(grade, 2, train=6, batch=2, n_epochs=2, max_grad_norm=CLIP)
    updates.check_clipping(clipped, 6, CLIP)
    updates.check_sent_once(clipped)
    updates.check_clipping(steps.gpt2(grade, 1, train=4, batch=2, n_epochs=1, max_grad_norm=CLIP), 2, CLIP)


def check_kept(grade: Grade) -> None:
    """With --pytest True the first step's averaged gradients are kept, and training ends there."""
    kept = steps.gpt2(grade, 2, train=4, batch=2, n_epochs=1, pytest=True)
    kept.must_not_hang()
    what = "--pytest True: the gradients that are kept"
    events = [[event for event in rank.events if event.name == "kept"] for rank in kept.result.ranks]
    if any(len(mine) != 1 for mine in events):
        raise grade.lacking(kept.result, "--pytest True: expected gradients to be kept once, in the first step")
    own = [kept.gradient(rank.rest.examples, number, 0)[1] for number, rank in enumerate(kept.ranks)]
    mean = reference.mean(own)
    for rank, mine in enumerate(events):
        if words := kept.differ(mine[0].data["grads"], mean):
            alone = not kept.differ(mine[0].data["grads"], own[rank])
            cause = "are this worker's own: average in this run, too" if alone else "are not the mean of all workers'"
            grade.fail(f"{what} {cause}\non rank {rank}, {words}")
    grade.must_return(kept.result)
