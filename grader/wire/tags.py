"""The tag of the messages that probes themselves send between ranks: a student's code may send some as well."""

OURS = 1000
