"""Hypothesis tries the same examples in every run."""

from __future__ import annotations

from hypothesis.internal.conjecture import providers

import tipbench.settings


def test_examples_do_not_depend_on_the_modules_that_are_loaded() -> None:
    assert tipbench.settings.__file__
    assert len(providers._get_local_constants()) == 0
