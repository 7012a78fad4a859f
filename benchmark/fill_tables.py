"""The old name of `benchmark.tables FOLDER --predict`."""

raise SystemExit("benchmark.fill_tables is python -m benchmark.tables FOLDER --predict now; it takes the same flags")
