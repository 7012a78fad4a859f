"""Carries a schedule out, tick by tick, and draws who does what when."""

from collections.abc import Sequence
from dataclasses import dataclass, field

Action = tuple[str, int]  # "forward" or "backward", micro-batch
WIDEST = 60  # ticks of a picture


@dataclass
class Execution:
    """When each action begins: cells[stage][tick]; `stuck` says who waits for what, if no stage can continue."""

    cells: list[dict[int, Action]]
    end: int = 0
    stuck: str = ""
    done: dict[tuple[int, str, int], int] = field(default_factory=dict)  # (stage, kind, micro-batch) -> its end


def gpipe(micro_batches: int, stages: int) -> list[list[Action]]:
    every = [(kind, i) for kind in ("forward", "backward") for i in range(micro_batches)]
    return [every for _ in range(stages)]


def carry_out(schedule: Sequence[Sequence[Action]], backward: int = 1) -> Execution:
    """Every stage takes its actions in order, each as soon as its input is there. A forward takes 1 tick, a backward
    `backward` ticks; messages take no time."""
    line = Execution([{} for _ in schedule])
    left = [list(actions) for actions in schedule]
    free = [0] * len(left)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(left):
            while actions and (begin := _earliest(line, len(left), stage, actions[0])) is not None:
                kind, i = actions.pop(0)
                begin = max(begin, free[stage])
                line.cells[stage][begin] = (kind, i)
                free[stage] = line.done[stage, kind, i] = begin + (backward if kind == "backward" else 1)
                moved = True
    line.end = max(free)
    waits = [f"stage {stage} waits in {actions[0][0]} {actions[0][1]}" for stage, actions in enumerate(left) if actions]
    line.stuck = "; ".join(waits)
    return line


def _earliest(line: Execution, stages: int, stage: int, action: Action) -> int | None:
    """When the input of an action is there; None: not yet known."""
    kind, i = action
    before = stage - 1 if kind == "forward" else stage + 1
    if before in (-1, stages):  # the tokens; on the last stage, the loss
        return 0 if kind == "forward" else line.done.get((stage, "forward", i))
    return line.done.get((before, kind, i))


def draw(schedule: Sequence[Sequence[Action]]) -> str:
    """`stage 0   F0 F1 .. B0`: a row for each stage, as far as it can be carried out."""
    line = carry_out(schedule)
    wide = max((len(str(i)) for actions in schedule for _, i in actions), default=1) + 1
    rows = []
    for stage, cells in enumerate(line.cells):
        words = [
            f"{cells[tick][0][0].upper()}{cells[tick][1]}" if tick in cells else "." * wide
            for tick in range(min(line.end, WIDEST))
        ]
        rows.append(f"  stage {stage:<3} " + " ".join(word.ljust(wide) for word in words).rstrip())
    return "\n".join(rows[:12]) + (f"\n  {line.stuck}" if line.stuck else "")
