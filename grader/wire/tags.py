"""The tag of the messages that the grader's own code sends between ranks: a student's code may send some as well."""

GRADER_TAG = 1000
