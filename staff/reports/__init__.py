"""The half that people grade: sheets for the reports, what the records say, and the points that come back."""
