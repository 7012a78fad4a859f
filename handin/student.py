"""The student who hands in, and the file names that follow from this."""

import re
import unicodedata
from dataclasses import dataclass

from common.errors import InputError

LONGEST_STEM = 200  # bytes; a file system takes 255, suffix included
_LINE = re.compile(r"<!-- student: (\S+) (\S.*?) -->")


@dataclass(frozen=True)
class Student:
    netid: str
    name: str

    @property
    def stem(self) -> str:
        """NetID_firstname_lastname, for the report and the archive. Marks belong to letters in many scripts."""
        words = [
            "".join(c for c in word if c in "_-" or unicodedata.category(c)[0] in "LMN") for word in self.name.split()
        ]
        return "_".join([self.netid, *filter(None, words)])

    @property
    def lines(self) -> str:
        """The lines of a report that say whose it is, for its readers and for the next build."""
        return f"{self.name}, {self.netid}\n\n<!-- student: {self.netid} {self.name} -->\n\n"


def make_student(netid: str, name: str) -> Student:
    """Raises InputError where no file name can be made of them. A name may be one word, in any script."""
    netid, name = unicodedata.normalize("NFC", netid.strip()), unicodedata.normalize("NFC", " ".join(name.split()))
    if not re.fullmatch(r"\w([\w.@+-]*\w)?", netid) or "--" in netid:
        raise InputError(f"--netid: expected letters, digits, dots and hyphens, such as ab1234; got {netid!r}")
    if "--" in name or not re.search(r"[^\W_]", name):
        raise InputError(f'--name: expected a name, such as --name "First Last"; got {name!r}')
    student = Student(netid, name)
    if (length := len(student.stem.encode())) > LONGEST_STEM:
        raise InputError(f"--netid, --name: expected at most {LONGEST_STEM} bytes for a file's name, got {length}")
    return student


def remembered(text: str) -> Student | None:
    """The student of an earlier report."""
    match = _LINE.search(text)
    return Student(match[1], match[2]) if match else None
