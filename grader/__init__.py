"""The grader: runs a student's code in rank processes of its own and brings back values, never verdicts."""
