"""The cases of the parity suite."""
