"""Scripts that hang for good, and whose watchdog has patience until they do, so that no test depends on the time.

A script waits for ever at some place. `--hang_seconds` is long at first. A thread of the script makes it short when the
place is reached.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from common.paths import ROOT
from tests.own.warm import Script

BEGINNING = f"""
import runpy, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
import common.workers.process_group as module
from common.workers.pulse import Thread

main = Thread()
configs = []


class Watchdog(module.Watchdog):
    def __init__(self, config, *arguments, **named):
        configs.append(config)
        super().__init__(config, *arguments, **named)


module.Watchdog = Watchdog


def lose_patience_when(reached):
    def watch():
        while not reached():
            time.sleep(0.01)
        object.__setattr__(configs[0], "hang_seconds", 0.1)

    threading.Thread(target=watch, daemon=True).start()


def go_on_as(script):
    sys.argv[0] = {str(ROOT)!r} + "/" + script
    runpy.run_path(sys.argv[0], run_name="__main__")

"""
PATIENT = ("--hang_seconds", 600, "--no_cuda")


class Hanging:
    """A script with `program` after the beginning above; `end` waits until its watchdog has ended it."""

    def __init__(self, folder: Path, program: str, words: Sequence[object], rank: int = 0) -> None:
        self.script, self.log = folder / "hangs.py", folder / f"log{rank}.txt"
        self.script.write_text(BEGINNING + program)
        self.folder = folder / "run"
        self.process = Script(self.script, [*words, *PATIENT, "--output_dir", self.folder], self.log)

    def end(self) -> int:
        """The exit code; fails with the log if the run hangs without an end."""
        try:
            return self.process.wait(timeout=120)
        except TimeoutError:
            raise AssertionError(f"nothing has ended the run:\n{self.log.read_text()}") from None
        finally:
            self.process.kill()

    @property
    def kept(self) -> dict:
        return json.loads((self.folder / "stopped.json").read_text())
