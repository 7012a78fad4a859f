"""benchmark.compare A.json B.json: the same strategies in two results."""

import json

import pytest

from benchmark.measure.two_results import compare_results
from common.errors import InputError


def written(path, steps_ms, versions="2.13", **settings):
    rows = [{"strategy": label, "step_ms": sorted(times)[len(times) // 2]} for label, times in steps_ms.items()]
    environment = {"versions": {"torch": versions}, "host": "here"}
    settings = {"model": "gpt2-tiny", "output_dir": str(path)} | settings
    path.write_text(json.dumps({"rows": rows, "steps_ms": steps_ms, "settings": settings, "environment": environment}))
    return path


def test_what_is_faster_slower_and_undecided_is_said_with_its_interval(tmp_path):
    steady, noisy = [10.0, 10.1, 10.2] * 5, [9.0, 10.0, 11.0] * 5
    left = written(tmp_path / "a.json", {"ddp": steady, "fsdp": steady, "zero1": noisy, "gone": steady})
    faster = [0.8 * time for time in steady]
    right = written(tmp_path / "b.json", {"ddp": faster, "fsdp": [2 * t for t in steady], "zero1": noisy}, "2.15")

    text = compare_results(left, right)

    rows = json.loads(text.splitlines()[-1])["rows"]
    assert {row["strategy"]: row["verdict"] for row in rows} == {
        "ddp": "B is faster", "fsdp": "B is slower", "zero1": "no difference that these rounds show"
    }  # fmt: skip
    assert rows[0]["ratio_95"][0] < 0.8 < rows[0]["ratio_95"][1]
    assert "A and B differ in: torch 2.13 and 2.15" in text


def test_few_rounds_decide_nothing(tmp_path):
    left, right = (written(tmp_path / name, {"ddp": [time] * 3}) for name, time in (("a.json", 1.0), ("b.json", 9.0)))

    assert "too few rounds to say" in compare_results(left, right)


def test_other_settings_and_other_files_are_refused(tmp_path):
    left = written(tmp_path / "a.json", {"ddp": [1.0] * 9})
    right = written(tmp_path / "b.json", {"ddp": [1.0] * 9}, batch_size=8, model="gpt2")
    (tmp_path / "c.json").write_text("{}")

    with pytest.raises(InputError, match="different settings: model gpt2-tiny and gpt2"):
        compare_results(left, right)
    with pytest.raises(InputError, match=r"expected a comparison.json of benchmark.compare, got .*c.json"):
        compare_results(left, tmp_path / "c.json")
