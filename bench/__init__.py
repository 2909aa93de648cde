"""Measurements of the whole system and of its parts; ``python -m bench --help`` lists them. They assert nothing."""
