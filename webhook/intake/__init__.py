"""Reads the bodies of reviews, and queues large reviews.

`bodies` reads a body up to a maximum size. `large_reviews` puts each large review into a queue (`fair_queue`), and
decides the review in a thread.
"""
