"""Data: GLUE, OSCAR text, the embedded samples, and in which order examples are seen."""
