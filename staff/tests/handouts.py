"""The handout of this tree, made once for all tests of a process: open, and with every region solved."""

import functools

from common.paths import ROOT
from course.table import load_course
from staff.handout.assemble import Handout, assemble


@functools.cache
def open_handout() -> Handout:
    return assemble(ROOT)


@functools.cache
def solved_handout() -> Handout:
    return assemble(ROOT, solved=list(load_course().regions))
