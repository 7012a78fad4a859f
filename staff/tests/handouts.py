"""The handout of this tree, made once for all tests of a process: open, and with every region solved."""

import functools

from common.paths import ROOT
from staff.handout.assemble import Handout, assemble
from staff.proofs.bank import solved_files


@functools.cache
def open_handout() -> Handout:
    return assemble(ROOT)


def solved_handout() -> dict[str, bytes]:
    return open_handout().files | solved_files()
