"""Data: GLUE, OSCAR text, the embedded samples, and the order of the examples."""
