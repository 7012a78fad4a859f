"""docs/private_torch.md lists every private name of others that the code uses, and no other."""

import re

from common.paths import ROOT

TABLE = (ROOT / "docs" / "private_torch.md").read_text(encoding="utf-8")


def test_every_listed_name_is_still_in_one_of_its_files():
    gone = set()
    for names, files in re.findall(r"^\| (.*?) \| ([\w/.]+\.py.*?) \|", TABLE, re.MULTILINE):
        text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files.split(", "))
        gone |= {name for name in re.findall(r"(?<!\w)_[a-zA-Z]\w+", names) if name not in text}

    assert gone == set()
