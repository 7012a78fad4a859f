"""The rank's end: the process that forks ranks, and what surrounds a student's code in one."""
