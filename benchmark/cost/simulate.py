"""Simulate a step as events: threads that compute, operations on the network, and what they share.

Whatever is under way has a speed between 0 and 1, which changes when something begins or ends:

- Processors. All threads of a machine share its cores as the system's scheduler shares them: everybody gets the same,
  nobody more than it can use. A transfer wants a part of a core, which takes time from those who compute.
- Links. The bytes of one rank's transfers leave it one transfer after the other, in the order in which they began; on
  loopback, where bytes are copied by processors, the processors decide.
- Order. A rank's collectives begin in the order in which they were started, at most `slots` at a time: gloo has so many
  threads. A collective begins when all members have started it. So does a message: gloo sends nothing before the
  receiver has said that it is ready. Over a shaped link, that word waits behind what the receiver sends: all of it on
  the same connection, what is in the link's queue on another one.

So overlap, contention, waiting and bubbles are not formulas here. They are what comes out. (SimPy has no resource that
everybody shares equally, so the processors would still be written here.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal

from benchmark.cost.programs.program import Compute, Instruction, Kind, Start

if TYPE_CHECKING:
    from benchmark.cost.collective_times import Links

SLOTS = 2  # ProcessGroupGloo's default number of threads
# Seconds that a word waits at most in a link's queue, measured with messages of 0.5 to 2 MB in both directions, at
# 100 Mbit/s to 1 Gbit/s.
QUEUE = 0.014
NO_TIME = 1e-12  # seconds; rounding errors are smaller, and nothing that is simulated is as short


@dataclass(frozen=True)
class Transfer:
    """One operation alone: seconds before bytes flow, seconds in which they flow, cores that it wants meanwhile.

    lag: seconds by which the other direction of the same connection is later; see collective_times.py. sent: bytes of
    one rank.
    """

    latency: float
    flow: float
    cores: float
    lag: float = 0.0
    sent: float = 0.0


@dataclass(frozen=True)
class Machine:
    """cores: that ranks share. is_shared: by all ranks of the step; otherwise each rank has a machine of its own.

    threads: with which one rank computes. slots: collectives that a rank has under way at a time.
    """

    cores: float
    is_shared: bool
    threads: int = 1
    slots: int = SLOTS


def fair_level(cores: float, wanted: Sequence[tuple[float, float]]) -> float:
    """Return the most that a thread gets when cores are shared fairly; infinity if all get what they want.

    wanted: (number of threads, cores that each of them wants).
    """
    left, threads = cores, sum(count for count, _ in wanted)
    for count, want in sorted(wanted, key=lambda pair: pair[1]):
        if want * threads > left:
            return left / threads
        left, threads = left - count * want, threads - count
    return float("inf")


@dataclass(frozen=True)
class Span:
    """A time of one kind: of its thread (name: a phase, or why it does not compute), or of its network.

    A thread computes, or is blocked: then `key` is the operation that it waits for, and `of` the kind that it waits
    for, if that has not arrived yet. On the network, an operation begins when this kind starts it.
    """

    kind: int
    row: Literal["thread", "network"]
    name: str  # a phase; "communication", "waiting" or "bubble" where the thread is blocked; an operation
    start: float
    end: float
    bytes: float = 0.0
    engine: bool = False
    micro_batch: int | None = None
    key: str = ""
    of: int | None = None

    @property
    def blocked(self) -> bool:
        return self.row == "thread" and bool(self.key)


@dataclass(frozen=True)
class Simulated:
    """The step of every kind: how long it takes, and what was when."""

    seconds: float
    spans: tuple[Span, ...]


@dataclass(eq=False)
class _Flight:
    """An operation from its first start to its end."""

    start: Start
    joined: dict[int, float] = field(default_factory=dict)  # kind -> when; the last one arrived last
    ready: float = 0.0  # of a message: when the sender knows that the receiver is ready
    began: float | None = None
    order: int = 0  # so many operations began before
    ended: float | None = None
    latency: float = 0.0
    flow: float = 0.0
    cores: float = 0.0
    lag: float = 0.0
    back: float = 0.0  # seconds of the flow in the other direction, which is later by the lag

    @property
    def is_running(self) -> bool:
        return self.began is not None and self.ended is None


@dataclass(eq=False)
class _Thread:
    """The computing thread of a kind."""

    number: int  # of the kind
    kind: Kind
    program: Iterator[Instruction]  # what is left of it
    left: float = 0.0  # seconds of work
    now: Compute | None = None  # the last one
    since: float = 0.0  # of the current span
    blocked_on: str | None = None
    queue: list[str] = field(default_factory=list)  # operations that were started and have not begun
    spent: float = 0.0  # bytes of the link's burst that are spent
    idle_since: float = 0.0
    back_until: float = 0.0  # so long, bytes flow in the other direction of transfers that have a lag
    done_at: float | None = None

    def computed(self, end: float) -> Span:
        """Return the span of the work that ends now."""
        work = self.now
        assert work is not None
        return Span(
            self.number, "thread", work.phase, self.since, end, engine=work.engine, micro_batch=work.micro_batch
        )


class _Step:
    """The state of a simulated step."""

    def __init__(self, kinds: Sequence[Kind], network: "Links", machine: Machine) -> None:
        self.network, self.machine = network, machine
        self.threads = [_Thread(i, kind, iter(kind.program)) for i, kind in enumerate(kinds)]
        self.flights: dict[str, _Flight] = {}
        self.spans: list[Span] = []
        self.now = 0.0
        self.begun = 0  # operations
        everybody = sum(len(kind.ranks) for kind in kinds) if machine.is_shared else 1
        # Calibrated seconds are those with all ranks computing: alone, a thread is faster by this.
        self.crowd = min(1.0, machine.cores / (machine.threads * everybody))

    def run(self) -> Simulated:
        self.advance_programs()
        while any(thread.done_at is None for thread in self.threads):
            self.pass_time()
            self.advance_programs()
        return Simulated(max(thread.done_at or 0.0 for thread in self.threads), tuple(self.spans))

    # ------------------------------------------------------------------- instructions

    def advance_programs(self) -> None:
        """Run all instructions that take no time."""
        progress = True
        while progress:
            moved = [self.advance(thread) for thread in self.threads]
            progress = self.begin_transfers() or any(moved)

    def advance(self, thread: _Thread) -> bool:
        """Run a thread's instructions until one takes time; whether any was run."""
        moved = False
        while thread.done_at is None and thread.left <= NO_TIME:
            if thread.blocked_on is not None:
                flight = self.flights.get(thread.blocked_on)
                if flight is None or flight.ended is None:
                    break
                self.close_blocked(thread, flight)
            moved = True
            instruction = next(thread.program, None)
            if instruction is None:
                thread.done_at = self.now
            elif isinstance(instruction, Compute):
                thread.left, thread.now, thread.since = instruction.seconds * self.crowd, instruction, self.now
            elif isinstance(instruction, Start):
                self.join(thread, instruction)
            else:
                thread.blocked_on, thread.since = instruction.key, self.now
        return moved

    def join(self, thread: _Thread, start: Start) -> None:
        """Let a thread take part in an operation; a message begins at once if it can."""
        flight = self.flights.setdefault(start.key, _Flight(start))
        flight.joined[thread.number] = self.now
        thread.queue.append(start.key)
        if start.operation != "hop":
            return
        if thread.number not in start.senders and self.network.is_shaped:
            sent = self.sent_by(thread.number)
            same = [i for i, other in enumerate(sent) if other.start.connection == start.connection]
            ahead, all_bytes = sent[: same[-1] + 1] if same else [], sum(other.flow for other in sent)
            flight.ready = self.now + max(sum(other.flow for other in ahead), min(QUEUE, all_bytes))
        if self.may_begin(start.key, flight):
            self.begin(flight)

    def close_blocked(self, thread: _Thread, flight: _Flight) -> None:
        """Write down for what a thread was blocked: until the transfer began for others, then for the network."""
        senders, met = flight.start.senders, flight.began or 0.0
        if flight.start.operation == "hop":
            met = max(flight.joined.values())  # the receiver's word is on its way: that is communication
        began = max(thread.since, met)
        why, last = ("waiting", list(flight.joined)[-1]) if thread.number in senders else ("bubble", senders[0])
        for name, begin, end, of in ((why, thread.since, began, last), ("communication", began, self.now, None)):
            if end - begin > NO_TIME:
                self.spans.append(Span(thread.number, "thread", name, begin, end, key=flight.start.key, of=of))
        thread.blocked_on = None

    # ------------------------------------------------------------------- network

    def begin_transfers(self) -> bool:
        """Begin the collectives at the head of all their members' queues that find a slot, and messages whose receiver
        is ready; whether anything began.
        """
        began = False
        for thread in self.threads:
            for key in list(thread.queue):
                flight = self.flights[key]
                if self.may_begin(key, flight):
                    self.begin(flight)
                    began = True
        return began

    def may_begin(self, key: str, flight: _Flight) -> bool:
        members = flight.start.members
        if not set(members) <= set(flight.joined):
            return False
        if flight.start.operation == "hop":
            return self.now >= flight.ready - NO_TIME  # a send needs no thread of gloo's
        heads = [next(k for k in self.threads[m].queue if self.flights[k].start.operation != "hop") for m in members]
        return all(head == key for head in heads) and all(self.running(m) < self.machine.slots for m in members)

    def running(self, member: int) -> int:
        starts = (flight.start for flight in self.flights.values() if flight.is_running)
        return sum(member in start.members and start.operation != "hop" for start in starts)

    def begin(self, flight: _Flight) -> None:
        start = flight.start
        for member in start.members:
            self.threads[member].queue.remove(start.key)
        thread = self.threads[start.senders[0]]
        if not any(f.is_running and thread.number in f.start.senders for f in self.flights.values()):
            thread.spent = self.network.spent_after(self.now - thread.idle_since, thread.spent)
        flight.began, flight.order = self.now, self.begun
        self.begun += 1
        spent = thread.spent
        for _ in range(start.repeats):
            one = self.network.transfer(start.operation, start.bytes, start.workers, spent)
            flight.latency += flight.lag + one.latency  # the next one begins when both directions of this one ended
            flight.flow, flight.cores = flight.flow + one.flow, one.cores
            flight.lag, flight.back = one.lag, one.flow
            spent += one.sent
        for member in start.senders:
            self.threads[member].spent = spent

    # ------------------------------------------------------------------- time

    def pass_time(self) -> None:
        """Go to the next moment at which something ends, or a receiver's word arrives."""
        computing = [thread for thread in self.threads if thread.left > NO_TIME]
        flights = [flight for flight in self.flights.values() if flight.is_running]
        words = [f.ready - self.now for f in self.flights.values() if f.began is None and f.ready > self.now]
        if not computing and not flights and not words:
            stuck = [thread.blocked_on for thread in self.threads if thread.blocked_on]
            raise AssertionError(f"these operations are waited for and never begin: {stuck}")
        levels = self.levels(computing, flights)
        speeds = [min(1.0, levels[thread.number]) for thread in computing]
        rates = [self.rate(flight, levels) for flight in flights]
        step = min(
            [thread.left / speed for thread, speed in zip(computing, speeds, strict=True)]
            + [(f.latency or f.flow) / rate for f, rate in zip(flights, rates, strict=True) if rate]
            + words
        )
        self.now += step
        for thread, speed in zip(computing, speeds, strict=True):
            thread.left -= step * speed
            if thread.left <= NO_TIME:
                thread.left = 0.0
                self.spans.append(thread.computed(self.now))
        for flight, rate in zip(flights, rates, strict=True):
            self.advance_flight(flight, step * rate)

    def advance_flight(self, flight: _Flight, work: float) -> None:
        if flight.latency > 0:
            flight.latency -= work
            flight.latency = 0.0 if flight.latency <= NO_TIME else flight.latency
        else:
            flight.flow -= work
        if flight.latency > 0 or flight.flow > NO_TIME:
            return
        if flight.lag > 0:  # the other direction began later, and after that of earlier transfers
            first = self.threads[flight.start.members[0]]
            first.back_until = max(self.now + flight.lag, first.back_until + flight.back)
            flight.latency, flight.flow, flight.lag = first.back_until - self.now, 0.0, 0.0
        else:
            flight.ended, start = self.now, flight.start
            size = start.bytes * start.repeats
            for member in start.senders:
                self.threads[member].idle_since = self.now
                joined = flight.joined[member]
                self.spans.append(Span(member, "network", start.operation, joined, self.now, bytes=size, key=start.key))

    def levels(self, computing: list[_Thread], flights: list[_Flight]) -> list[float]:
        """Return, for the machine of each kind, how much of a core a thread may have there, if it wants as much."""
        wanted = []  # by kind: number of threads, cores that each wants
        for thread in self.threads:
            ranks = len(thread.kind.ranks) if self.machine.is_shared else 1
            own = [(ranks * self.machine.threads, 1.0)] if thread in computing else []
            wanted.append(own + [(ranks, f.cores) for f in flights if thread.number in f.start.senders])
        if self.machine.is_shared:
            return [fair_level(self.machine.cores, list(chain(*wanted)))] * len(wanted)
        return [fair_level(self.machine.cores, of_kind) for of_kind in wanted]

    def sent_by(self, number: int) -> list[_Flight]:
        """Return what a thread has under way, in the order in which it began."""
        own = [f for f in self.flights.values() if f.is_running and number in f.start.senders]
        return sorted(own, key=lambda f: f.order)

    def rate(self, flight: _Flight, levels: list[float]) -> float:
        """Return the speed of an operation: that of its slowest member; 0 while another one's bytes go first."""
        speed = 1.0
        for member in flight.start.senders:
            if flight.cores > 0:
                speed = min(speed, levels[member] / flight.cores)
            if self.network.is_shaped and flight.latency <= 0:
                first = next(f for f in self.sent_by(member) if f.latency <= 0)
                speed = speed if flight is first else 0.0
        return speed


def simulate(kinds: Sequence[Kind], network: "Links", machine: Machine) -> Simulated:
    """Run the programs of all kinds; raises AssertionError if they would wait for each other forever."""
    return _Step(kinds, network, machine).run()
