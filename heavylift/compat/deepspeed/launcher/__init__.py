"""The launcher is `heavylift launch`."""
