"""Monitors."""
