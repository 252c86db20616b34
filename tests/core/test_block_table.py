"""The tuple of block ids is the same object until the table changes."""

from octavo.core.block_table import BlockTable


def test_ids_keep_their_identity_until_the_table_changes() -> None:
    table = BlockTable()
    assert table.ids == ()
    table.append(4)
    table.extend([7, 9])
    ids = table.ids
    assert ids == (4, 7, 9)
    assert table.ids is ids
    table.replace(2, 5)
    assert table.ids == (4, 7, 5)
    assert len(table) == 3


def test_a_fork_has_the_same_ids_and_its_own_future() -> None:
    table = BlockTable()
    table.extend([4, 7])
    table.num_published = 1
    child = table.fork()
    assert child.ids is table.ids
    assert child.num_published == 1
    child.append(8)
    assert table.ids == (4, 7)
    assert child.ids == (4, 7, 8)


def test_clear_returns_what_was_held() -> None:
    table = BlockTable()
    table.extend([4, 7])
    assert table.clear() == [4, 7]
    assert table.ids == ()
    assert len(table) == table.num_published == 0
