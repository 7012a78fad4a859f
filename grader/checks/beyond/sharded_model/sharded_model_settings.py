"""The toys that sharded models are judged on: which parameter is in which block, and what is used where."""

from dataclasses import dataclass, field, replace

BEGIN = -1  # the place of the root before the blocks; after them it is their number


@dataclass(frozen=True)
class ModelSetting:
    """A toy and its steps. Parameters are numbered as model.parameters() gives them: those of the blocks come first."""

    shapes: list[list[int]]
    members: list[list[int]]  # the parameters of each block; one that is in two blocks belongs to the root
    begin: list[int]  # what the root uses before the blocks
    end: list[int] = field(default_factory=list)  # and after them
    frozen: list[int] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)
    dtypes: dict[int, str] = field(default_factory=dict)  # of parameters; float32 otherwise
    micros: tuple[int, ...] = (1, 1)  # micro-batches of each step
    evaluate: tuple[int, ...] = ()  # steps after which the model is used without gradients
    late: int | None = None  # the rank that is one block behind the others
    finish: bool = True  # whether the student's send and finish are called
    measures: bool = False
    rate: float = 0.05
    momentum: float = 0.9
    decay: float = 0.1

    @property
    def depth(self) -> int:
        return len(self.members)

    def dtype(self, k: int) -> str:
        return self.dtypes.get(k, "float32")

    def uses(self) -> list[tuple[int, int]]:
        """(place, parameter) in the order of forward."""
        inside = [(place, k) for place, members in enumerate(self.members) for k in members]
        every = [*((BEGIN, k) for k in self.begin), *inside, *((self.depth, k) for k in self.end)]
        return [(place, k) for place, k in every if k not in self.unused]

    def groups(self) -> list[list[int]]:
        """The trainable parameters of each block, and last those of the root."""
        owners = [[b for b, members in enumerate(self.members) if k in members] for k in range(len(self.shapes))]
        block = [found[0] if len(found) == 1 else self.depth for found in owners]
        trained = [k for k in range(len(self.shapes)) if k not in self.frozen]
        return [[k for k in trained if block[k] == b] for b in range(self.depth + 1)]


# Three blocks whose sizes differ and divide by no number of ranks; a root before and after them.
PLAIN = ModelSetting(
    shapes=[[3, 4], [5], [7], [2, 5], [4, 3], [11], [3, 3], [6], [5, 1]],
    members=[[0, 1], [2, 3], [4, 5]],
    begin=[6, 7],
    end=[8],
)
# 1 is in two blocks (so it is the root's), 4 is frozen, 6 is used by nobody; three micro-batches, an evaluation.
ODD = ModelSetting(
    shapes=[[4, 3], [5], [2, 3], [3, 3], [7], [6, 2], [3], [4, 2], [9]],
    members=[[0, 1], [2, 3, 4], [1, 5, 6], [7]],
    begin=[8],
    frozen=[4],
    unused=[6],
    micros=(2, 1, 3),
    evaluate=(0, 1),
)
# Block 1 is of bfloat16, and its updates are smaller than what bfloat16 can hold.
HALF = replace(PLAIN, dtypes={2: "bfloat16", 3: "bfloat16"}, micros=(1, 1, 1), rate=0.0005, momentum=0.0, decay=0.0)
# 2.6 MB in the middle block, beside some bytes.
LARGE = ModelSetting(
    shapes=[[3, 4], [640, 1024], [5], [4, 3], [6]], members=[[0], [1, 2], [3]], begin=[4], micros=(1, 1)
)  # fmt: skip
ALONE = replace(PLAIN, micros=(1,))
TRAINED = ((3, PLAIN), (2, ODD), (4, ODD), (2, HALF), (2, LARGE), (1, ODD))
# No rank uses a parameter of block 1, so none of its hooks is called.
UNUSED = replace(PLAIN, unused=[2, 3])
# One rank is one block behind the others: who waits for it without need waits for ever.
LATE = replace(PLAIN, late=1)
# Seven blocks of 1.3 MB: what is in memory shows in the size of the process.
MEMORY = ModelSetting(
    shapes=[[320, 1024], [5]] * 7 + [[6]],
    members=[[2 * i, 2 * i + 1] for i in range(7)],
    begin=[14],
    evaluate=(1,),
    measures=True,
)


def gathers_only(setting: ModelSetting) -> ModelSetting:
    """The same without the student's exchange of gradients."""
    return replace(setting, finish=False)
