"""Answers reviews without a server, for the tests and for the reference."""

import functools

from webhook.review.answers import answer

mutate, validate = functools.partial(answer, "/mutate"), functools.partial(answer, "/validate")
