"""What stands behind submit.py: carry (own lines into later scripts), report, pack."""
