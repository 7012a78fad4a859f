"""Models by name, and the tiny ones that are made here."""
