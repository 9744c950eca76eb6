"""A table with objects as keys that cannot be hashed, and that it does not keep."""

import gc

from kerasdist.core.ownership import VariableTable


class Variable:
    __hash__ = None  # type: ignore[assignment]


def test_an_entry_is_stored_replaced_and_removed():
    table: VariableTable[str] = VariableTable()
    one, other = Variable(), Variable()
    table.put(one, "first")
    table.put(one, "second")
    table.put(other, "third")
    assert (table.get(one), table.get(other)) == ("second", "third")
    assert sorted(table.ids()) == sorted([id(one), id(other)])
    table.discard(one)
    table.discard(one)
    assert table.get(one) is None
    table.put(one, "fourth")
    assert table.get(one) == "fourth"


def test_an_entry_is_removed_with_its_variable():
    table: VariableTable[str] = VariableTable()
    one, other = Variable(), Variable()
    for variable in (one, other):
        table.put(variable, "first")
        table.put(variable, "second")
    del one, variable
    gc.collect()
    assert table.ids() == [id(other)]
