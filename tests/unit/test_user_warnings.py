"""Warnings name a line of the user's script."""

import threading
import warnings

from kerasdist.core.user_warnings import warn_user


def in_module(name, source):
    made = {"__name__": name, "warn_user": warn_user}
    exec(compile(source, f"{name}.py", "exec"), made)
    return made["function"]


def places_of(call):
    with warnings.catch_warnings(record=True, action="always") as told:
        call()
    return [(one.filename, str(one.message), one.category) for one in told]


INNER = in_module("kerasdist.callbacks.some", "def function(): warn_user('a word')")
OUTER = in_module("keras.src.trainers.trainer", "def function(inner): inner()")


def test_libraries_are_passed_over():
    assert places_of(lambda: OUTER(INNER)) == [(__file__, "a word", UserWarning)]


def test_code_of_the_user_that_keras_calls_is_named():
    own = in_module("my_model", "def function(inner): inner()")
    assert places_of(lambda: OUTER(lambda: own(INNER)))[0][0] == "my_model.py"


def test_a_thread_of_a_framework_has_no_script_above_it():
    def call():
        thread = threading.Thread(target=INNER)
        thread.start()
        thread.join()

    assert places_of(call)[0][0] == "kerasdist.callbacks.some.py"
