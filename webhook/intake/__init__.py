"""How the body of a review is read, and how large reviews wait their turn.

`bodies` bounds what is read. `large_reviews` has a large review wait in `fair_queue`, and decides it in a thread.
"""
