"""Probes of the bonus lessons."""
