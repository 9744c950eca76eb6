"""Backups that tests write themselves."""

from kerasdist.callbacks.backup import storage


def write(folder, number, facts, arrays):
    path = storage.path_of(folder, number)
    storage.write_file(path, facts, arrays)
    return path
