"""Profilers."""
