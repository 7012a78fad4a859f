"""The handout of this tree, made once for all tests of a process: open, and with every region solved."""

import functools

from common.course import load_course
from common.paths import ROOT
from staff.handout import Handout, assemble


@functools.cache
def open_handout() -> Handout:
    return assemble(ROOT)


@functools.cache
def solved_handout() -> Handout:
    return assemble(ROOT, solved=list(load_course().regions))
