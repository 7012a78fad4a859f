"""The pictures of the READMEs that need no run: memory of ZeRO, a remainder that is dealt out, heads of two ranks."""

from pathlib import Path

from common.figures import COLOURS, HATCHES, figure

LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the box below a number on a hatched bar


def memory(path: Path) -> None:
    """Draw the bytes that a worker keeps for each fp32 parameter with Adam, on 4 workers."""
    kept = {"values": (4, 4, 4, 1), "gradients": (4, 4, 1, 1), "optimizer states": (8, 2, 2, 2)}
    names, left = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"], [0, 0, 0, 0]
    with figure(path, height=2.4) as axes:
        for (part, sizes), colour, hatch in zip(kept.items(), COLOURS, HATCHES, strict=False):
            bars = axes.barh(names, sizes, left=left, color=colour, edgecolor="black", hatch=hatch, label=part)
            axes.bar_label(bars, label_type="center", bbox=LABEL)
            left = [before + size for before, size in zip(left, sizes, strict=True)]
        for row, total in enumerate(left):
            axes.text(total + 0.2, row, f"{total}", va="center", weight="bold")
        axes.invert_yaxis()
        axes.set_xlim(0, 18)
        axes.set_xlabel("bytes per parameter on each of 4 workers")
        axes.legend(frameon=False, loc="lower right")


def remainder(path: Path) -> None:
    """Draw 11 examples in parts of 0.7, 0.2 and 0.1: a box for each whole example, and what rounding down loses."""
    with figure(path, height=1.9) as axes:
        for row, (tenths, got) in enumerate(((77, 8), (22, 2), (11, 1))):
            whole, lost = divmod(tenths, 10)
            axes.barh(row, [1] * whole, left=range(whole), height=0.7, color=COLOURS[4], edgecolor="black")
            axes.barh(row, lost / 10, left=whole, height=0.7, color="white", edgecolor="black", hatch="///")
            dealt = "  it lost the most" if got > whole else ""
            axes.text(whole + lost / 10 + 0.2, row, f"{whole} + 0.{lost}  →  {got}{dealt}", va="center")
        axes.invert_yaxis()
        axes.set_yticks(range(3), ["0.7 x 11", "0.2 x 11", "0.1 x 11"])
        axes.set_xlim(0, 13)
        axes.set_xticks(range(0, 9, 2))
        axes.set_xlabel("examples", loc="left")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0)


def heads(path: Path) -> None:
    """Draw the columns of c_attn by head, and which of them each of two ranks has."""
    with figure(path, height=1.9) as axes:
        for column in range(12):
            third, head = divmod(column, 4)
            rank = head // 2
            for row in (0, 1 + rank):
                axes.barh(row, 1, left=column, color=COLOURS[4 - 3 * rank], edgecolor="black", hatch=HATCHES[rank])
                axes.text(column + 0.5, row, f"{'qkv'[third]}{head}", ha="center", va="center", bbox=LABEL)
        for third in (4, 8):
            axes.axvline(third, color="black", linewidth=2)
        axes.invert_yaxis()
        axes.set_yticks(range(3), ["c_attn", "rank 0", "rank 1"])
        axes.set_xlim(0, 12)
        axes.set_xticks([2, 6, 10], ["queries", "keys", "values"])
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)


DRAWINGS = {
    "memory": (memory, "beyond/memory.png"),
    "remainder": (remainder, "task2b_allreduce/remainder.png"),
    "heads": (heads, "beyond/heads.png"),
}
