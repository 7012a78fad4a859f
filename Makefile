# make demo: set up, then run tasks 1, 2a, 2b and 3 and compare them in one table.  make test: everything a change must not break.
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: setup demo demo-cluster pictures watch test bank lint check verify handout gradescope
.DEFAULT_GOAL := demo

setup:
	@command -v $(PYTHON) > /dev/null || { echo "error: no $(PYTHON); sudo apt-get install python3 python3-venv" >&2; exit 2; }
	@$(PYTHON) install.py dev

demo: setup
	$(RUN) -m cluster.demo.ladder --demo

# The same with a larger model.
demo-cluster: setup
	$(RUN) -m cluster.demo.ladder --nodes 4 --rate 1gbit --random_bert 22M --batch 8 --iterations 10 -- --do_train --learning_rate 1e-5

# The picture in each task's README: a step on emulated nodes.
pictures: setup
	$(RUN) -m cluster.demo.pictures

watch: setup
	$(RUN) -m grader.watch

# Two test processes, each file in one of them; files that start many processes first, so that neither waits at the end.
TWICE := -n 2 --dist loadfile --no-loadscope-reorder -p staff.tests.thousands_of_tests

lint: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

check: lint
	$(RUN) -m pytest -q $(TWICE) -m "not slow and not proof and not medium" tests staff/tests

test: setup
	$(RUN) -m pytest -q $(TWICE) -m "not slow and not proof" tests staff/tests

# Every known mistake must be caught by name, every right variant must pass; and the proofs that take minutes.
bank: setup
	$(RUN) -m staff.mistakes --seed 1
	$(RUN) -m pytest -q $(TWICE) -m "proof and not slow" tests staff/tests

verify: setup
	@$(RUN) -c "import horovod" 2> /dev/null || echo "note: horovod's tests are skipped; python install.py horovod builds it"
	$(RUN) -m pytest -q tests staff/tests

handout: setup
	$(RUN) -m staff.handout

gradescope: setup
	$(RUN) -m staff.gradescope.build
