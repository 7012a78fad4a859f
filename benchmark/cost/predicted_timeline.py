"""A predicted step as a timeline: the same picture, trace and page as of a measured one, of a run that never was."""

from benchmark.cost.predict_step import Prediction
from benchmark.cost.programs.program import Kind
from benchmark.cost.simulate import Span
from common.timeline.boxes import Box, Step, Timeline, Wait

MOST_ROWS = 8  # ranks that are drawn one by one; of more, one of each kind is drawn
SAME = 1e-9  # seconds between two boxes that are drawn as one


def timeline(prediction: Prediction) -> Timeline:
    """Return the timeline of a predicted step."""
    kinds, cell = prediction.kinds, prediction.cell
    one_by_one = cell.workers <= MOST_ROWS
    rows = sorted((rank, i) for i, kind in enumerate(kinds) for rank in (kind.ranks if one_by_one else kind.ranks[:1]))
    row_of = {i: row for row, (_, i) in reversed(list(enumerate(rows)))}  # the first row of a kind
    boxes: list[Box] = []
    for row, (_, i) in enumerate(rows):
        spans = [span for span in prediction.simulated.spans if span.kind == i]
        boxes += _process(row, spans) + _network(row, spans, row_of)
    labels = () if one_by_one else tuple(_label(kinds[i]) for _, i in rows)
    title = f"{cell.strategy} on {cell.workers:,} workers, {cell.rate or 'loopback'}"
    steps = tuple(Step(row, 0, 0.0, prediction.simulated.seconds) for row in range(len(rows)))
    return Timeline(title, len(rows), steps, tuple(boxes), notes=prediction.notes, labels=labels)


def _label(kind: Kind) -> str:
    return f"rank {kind.ranks[0]}" if len(kind.ranks) == 1 else f"each of {len(kind.ranks):,} ranks"


def _process(row: int, spans: list[Span]) -> list[Box]:
    """What the thread does; pieces of one phase that follow one another are one box."""
    boxes: list[Box] = []
    for span in sorted((span for span in spans if span.row == "thread"), key=lambda span: span.start):
        name = "communication" if span.blocked else span.name
        if span.micro_batch is not None:
            name += f" {span.micro_batch}"
        begin = span.start
        if boxes and boxes[-1].name == name and begin - boxes[-1].end < SAME:
            begin = boxes.pop().start
        boxes.append(Box(row, "process", name, begin, span.end))
    return boxes


def _network(row: int, spans: list[Span], row_of: dict[int, int]) -> list[Box]:
    """Operations from when this rank starts them, and what the thread is blocked for, as a receiver is."""
    waits: dict[str, list[Wait]] = {}
    for span in spans:
        if span.blocked and span.of is not None:
            waits.setdefault(span.key, []).append(Wait(span.start, span.end, row_of[span.of]))
    sent = [span for span in spans if span.row == "network"]
    boxes = [Box(row, "network", s.name, s.start, s.end, round(s.bytes), tuple(waits.get(s.key, ()))) for s in sent]
    started = {span.key for span in sent}
    received: dict[str, list[Span]] = {}
    for span in spans:
        if span.blocked and span.key not in started:
            received.setdefault(span.key, []).append(span)
    for key, parts in received.items():
        boxes.append(Box(row, "network", "recv", parts[0].start, parts[-1].end, 0, tuple(waits.get(key, ()))))
    return boxes
