"""The parts of submit.py: carry (a student's lines into later scripts), report, pack."""
