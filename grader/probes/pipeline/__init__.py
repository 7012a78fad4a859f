"""Probes of the pipeline part."""
