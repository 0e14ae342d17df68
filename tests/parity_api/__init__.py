"""Both sides of the comparisons in test_api_*.py."""
